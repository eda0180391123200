// Columns that grow, and plots of them that a mouse or the keyboard explores.
// uPlot (MIT) stands before this file in the bundle and defines `uPlot`.

// Rows of equally long columns; the kernel says how many to keep and which to put after them.
class Rows {
  constructor() {
    this.columns = new Map([["step", []]]);
  }
  get count() {
    return this.columns.get("step").length;
  }
  update(keep, names, buffer) {
    const count = buffer.byteLength / 8 / names.length;
    // A DataView may start anywhere in its buffer, a Float64Array may not: copy.
    const bytes = buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength);
    const numbers = new Float64Array(bytes);
    if (keep === 0) this.columns = new Map();
    names.forEach((name, i) => {
      if (!this.columns.has(name)) this.columns.set(name, new Array(keep).fill(null));
      const column = this.columns.get(name);
      column.length = keep;
      for (let row = 0; row < count; row++) {
        const value = numbers[i * count + row];
        column.push(Number.isNaN(value) ? null : value);
      }
    });
  }
}

// One uPlot with a title, a legend that shows the values under the cursor, and a zoom that updates keep.
class Panel {
  constructor(host, title, height, color, zoom) {
    this.height = height;
    this.color = color;
    this.hidden = new Set();
    this.zoom = zoom; // shared, as the panels zoom together
    this.root = host.appendChild(element("div", "wl-panel"));
    const head = this.root.appendChild(element("div", "wl-panel-head"));
    head.appendChild(element("span", "wl-title", title));
    this.legend = head.appendChild(element("span", "wl-legend"));
    this.tools = head.appendChild(element("span", "wl-tools"));
    this.stage = this.root.appendChild(element("div", "wl-stage"));
    this.stage.tabIndex = 0;
    this.stage.setAttribute("role", "img");
    this.stage.addEventListener("keydown", (event) => this.press(event));
    this.stage.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    this.title = title;
    this.plot = null;
    this.shape = "";
  }
  // entries: [{name, label, color}], data: [steps, ...], series: uPlot series after the first
  draw(entries, series, data, options) {
    const shape = JSON.stringify([entries, options.isLog, [...this.hidden]]);
    if (this.plot === null || shape !== this.shape) {
      this.shape = shape;
      this.build(entries, series, data, options);
    } else {
      this.plot.setData(data, !this.zoom.isOn);
      if (this.zoom.isOn) this.plot.redraw();
    }
    this.latest = options.latest;
    this.label(null);
  }
  build(entries, series, data, options) {
    if (this.plot) this.plot.destroy();
    const axis = {
      stroke: () => this.color("soft"),
      grid: { stroke: () => this.color("line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      values: (_, splits) => splits.map((value) => (value == null ? "" : tickText(value))),
    };
    const every = (_, splits) => splits;
    const logAxis = { splits: (_, __, low, high) => logTicks(low, high), filter: every };
    const range = (_, low, high) => {
      if (low == null) return options.isLog ? [0.1, 1] : [0, 1];
      if (options.isLog) return [low / 1.15, high * 1.15];
      const pad = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
      return [options.hasZero ? 0 : low - pad, high + pad];
    };
    this.plot = new uPlot(
      {
        width: Math.max(120, this.stage.clientWidth),
        height: this.height,
        scales: { x: { time: false }, y: { distr: options.isLog ? 3 : 1, range } },
        padding: [10, 16, 0, 0],
        axes: [
          { ...axis, grid: { show: false }, size: 24, space: 80, label: "step", labelSize: 18 },
          { ...axis, size: 46, space: 34, ...(options.isLog ? logAxis : {}) },
        ],
        series: [{}, ...series],
        legend: { show: false },
        cursor: { sync: { key: options.syncKey }, drag: { x: true, y: false }, points: { show: false } },
        hooks: {
          setCursor: [(plot) => this.label(plot.cursor.idx)],
          setSelect: [(plot) => (this.zoom.isOn ||= plot.select.width > 0)],
          draw: options.drawOver ? [options.drawOver] : [],
        },
      },
      data,
      this.stage,
    );
    this.plot.over.addEventListener("dblclick", () => (this.zoom.isOn = false));
    this.legend.replaceChildren();
    this.values = entries.map(({ name, label, color, isFixed }) => {
      const button = this.legend.appendChild(element("button", "wl-key"));
      const swatch = button.appendChild(element("span", "wl-swatch"));
      swatch.style.background = `var(--wl-${color})`;
      button.appendChild(element("span", null, label));
      button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      button.disabled = Boolean(isFixed);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        options.redraw();
      });
      return [name, button.appendChild(element("span", "wl-value"))];
    });
  }
  label(index) {
    const step = index == null ? this.plot?.data[0].at(-1) : this.plot?.data[0][index];
    const words = [];
    for (const [name, shown] of this.values ?? []) {
      shown.textContent = this.latest(name, index);
      words.push(`${shown.previousSibling.textContent} ${shown.textContent}`);
    }
    const said = `${this.title} at step ${step}: ${words.join(", ")}`;
    this.stage.setAttribute("aria-label", `${said}. Arrow keys move along the curve, Escape shows all of it`);
  }
  // Arrow keys do what a mouse does: move the cursor, whose values the legend shows; Escape ends a zoom.
  press(event) {
    if (!this.plot) return;
    const { data, scales, cursor } = this.plot;
    const steps = data[0];
    const first = steps.findIndex((step) => step >= scales.x.min);
    const last = steps.findLastIndex((step) => step <= scales.x.max);
    const at = cursor.left >= 0 && cursor.idx != null ? cursor.idx : last;
    const stride = Math.max(1, Math.round((last - first) / 50));
    const places = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: first, End: last };
    if (event.key === "Escape") {
      this.zoom.isOn = false;
      this.plot.setData(data);
    } else if (event.key in places) {
      const index = Math.min(last, Math.max(first, places[event.key]));
      this.plot.setCursor({ left: this.plot.valToPos(steps[index], "x"), top: 10 });
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }
  resize() {
    const width = this.stage.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }
}

