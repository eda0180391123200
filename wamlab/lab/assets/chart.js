// The front end of a live chart: keeps the rows the kernel sends, draws them once per animation frame.
// uPlot (MIT) stands before this file in the bundle and defines `uPlot`.

const CURVES = [["loss", "total"], ["video_loss", "video"], ["action_loss", "action"]];

const tickText = (value) => {
  for (const [unit, suffix] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= unit) return +(value / (suffix === "k" ? 1e3 : unit)).toPrecision(6) + suffix;
  }
  return String(+value.toPrecision(6));
};
// Round numbers between the ends of a logarithmic axis: decades, or finer where there are few.
const logTicks = (low, high) => {
  let ticks = [];
  for (const mantissas of [[1], [1, 3], [1, 2, 5]]) {
    ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      ticks.push(...mantissas.map((m) => m * 10 ** power).filter((tick) => tick >= low && tick <= high));
    }
    if (ticks.length >= 3) break;
  }
  return ticks;
};
const short = (value) => (value == null ? "–" : String(+value.toPrecision(3)));
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text != null) made.textContent = text;
  return made;
};

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
    for (const [name, shown] of this.values ?? []) shown.textContent = this.latest(name, index);
  }
  resize() {
    const width = this.stage.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }
}

function render({ model, el }) {
  const root = el.appendChild(element("div", "wl-live"));
  const head = root.appendChild(element("div", "wl-head"));
  const name = head.appendChild(element("span", "wl-name", "waiting for the kernel"));
  const badge = head.appendChild(element("span", "wl-badge"));
  const headline = root.appendChild(element("div", "wl-headline"));
  const figures = root.appendChild(element("div", "wl-figures"));
  const grid = root.appendChild(element("div", "wl-grid"));

  let palette = {};
  const readPalette = () => (palette = getComputedStyle(root));
  const color = (role) => palette.getPropertyValue(`--wl-${role}`).trim();
  readPalette();

  const wide = grid.appendChild(element("div", "wl-wide"));
  const zoom = { isOn: false };
  const panels = {
    loss: new Panel(wide, "loss", 240, color, zoom),
    speed: new Panel(grid, "samples per second", 190, color, zoom),
    split: new Panel(grid, "step time, ms", 190, color, zoom),
  };
  const syncKey = `wl-${Math.random()}`;
  const rows = new Rows();
  let evaluations = [];
  let parts = [];
  let isLog = true;

  const toggle = panels.loss.tools.appendChild(element("button", "wl-toggle", "log scale"));
  toggle.setAttribute("aria-pressed", "true");
  toggle.addEventListener("click", () => {
    isLog = !isLog;
    toggle.setAttribute("aria-pressed", String(isLog));
    schedule();
  });

  const drawCurves = (panel, curves, options) => {
    const steps = rows.columns.get("step");
    const known = curves.filter(([key]) => rows.columns.has(key));
    const shown = known.filter(([key]) => !panel.hidden.has(key));
    const positive = (key) => {
      const column = rows.columns.get(key);
      return options.isLog ? column.map((value) => (value > 0 ? value : null)) : column;
    };
    const colors = { loss: "blue", video_loss: "orange", action_loss: "green", samples_per_s: "blue" };
    const line = (key, width, alpha) => ({ stroke: () => color(colors[key]), width, alpha, points: { show: false } });
    const series = [
      ...shown.map(([key]) => line(key, 1, 0.3)),
      ...shown.map(([key]) => line(key, 2, 1)),
    ];
    const data = [steps, ...shown.map(([key]) => positive(key)), ...shown.map(([key]) => positive(key + "~"))];
    const entries = known.map(([key, label]) => ({ name: key, label, color: colors[key] }));
    const latest = (key, index) => {
      if (key === "held-out") return short(evaluations.at(-1)?.[1]);
      return short((rows.columns.get(key + "~") ?? []).at(index ?? -1));
    };
    if (options.drawOver && evaluations.length) {
      entries.push({ name: "held-out", label: "held-out", color: "purple", isFixed: true });
    }
    panel.draw(entries, series, data, { ...options, syncKey, latest, redraw: schedule });
  };

  // Held-out losses have steps of their own: dots over the finished plot.
  const drawEvaluations = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = color("purple");
    ctx.strokeStyle = color("paper");
    ctx.lineWidth = devicePixelRatio;
    for (const [step, loss] of evaluations) {
      if (!(loss > 0) && isLog) continue;
      ctx.beginPath();
      ctx.arc(plot.valToPos(step, "x", true), plot.valToPos(loss, "y", true), 4 * devicePixelRatio, 0, 2 * Math.PI);
      ctx.fill();
      ctx.stroke();
    }
    ctx.restore();
  };

  const drawSplit = () => {
    const panel = panels.split;
    const steps = rows.columns.get("step");
    const known = parts.filter(([key]) => rows.columns.has(key));
    const shown = known.filter(([key]) => !panel.hidden.has(key));
    let below = new Array(steps.length).fill(0);
    const layers = shown.map(([key]) => (below = below.map((sum, i) => sum + 1000 * (rows.columns.get(key)[i] ?? 0))));
    // The tallest is painted first, so that each layer covers all but its own band.
    const fill = (role) => ({ fill: () => color(role), width: 0, points: { show: false } });
    const series = shown.map(([, , role]) => fill(role)).reverse();
    const entries = known.map(([key, label, role]) => ({ name: key, label, color: role }));
    const latest = (key, index) => {
      const column = rows.columns.get(key) ?? [];
      if (index != null) return short(1000 * column[index]);
      const recent = column.slice(-20);
      return short((1000 * recent.reduce((sum, value) => sum + (value ?? 0), 0)) / Math.max(1, recent.length));
    };
    panel.draw(entries, series, [steps, ...layers.reverse()], { hasZero: true, syncKey, latest, redraw: schedule });
  };

  const draw = () => {
    if (rows.count === 0) return;
    drawCurves(panels.loss, CURVES, { isLog, drawOver: drawEvaluations });
    drawCurves(panels.speed, [["samples_per_s", "samples/s"]], { hasZero: true });
    drawSplit();
    root.dataset.drawn = root.dataset.records;
  };
  let frame = 0;
  function schedule() {
    if (!frame) {
      frame = requestAnimationFrame(() => {
        frame = 0;
        draw();
      });
    }
  }

  const showHead = (given) => {
    name.textContent = given.name;
    badge.textContent = given.state;
    badge.style.setProperty("--wl-state", `var(--wl-${given.state_color})`);
    headline.textContent = given.headline;
    figures.replaceChildren(
      ...given.figures.map(([title, value, remark]) => {
        const tile = element("div", "wl-figure");
        tile.append(element("div", "wl-soft", title), element("div", "wl-big", value), element("div", "wl-soft", remark));
        return tile;
      }),
    );
    root.dataset.state = given.state;
  };

  const receive = (message, buffers) => {
    if (message.kind !== "update") return;
    // A view that missed rows asks for all of them.
    if (message.keep > rows.count) return model.send({ kind: "ready" });
    if (buffers?.length) rows.update(message.keep, message.names, buffers[0]);
    evaluations = message.evaluations;
    parts = message.parts;
    root.dataset.records = message.num_records;
    root.dataset.rows = rows.count;
    showHead(message.head);
    schedule();
  };
  model.on("msg:custom", receive);

  const repaint = () => {
    readPalette();
    for (const panel of Object.values(panels)) panel.plot?.redraw(false, true);
  };
  const sizes = new ResizeObserver(() => Object.values(panels).forEach((panel) => panel.resize()));
  sizes.observe(root);
  const theme = new MutationObserver(repaint);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", repaint);

  model.send({ kind: "ready" });
  return () => {
    model.off("msg:custom", receive);
    sizes.disconnect();
    theme.disconnect();
    scheme.removeEventListener("change", repaint);
    cancelAnimationFrame(frame);
    for (const panel of Object.values(panels)) panel.plot?.destroy();
  };
}

export default { render };
