// The front end of a live chart: keeps the rows the kernel sends, draws them once per animation frame.
// uplot.js, dom.js and plots.js stand before this file in the bundle.

// Each curve: column, name in the legend, colour.
const LOSSES = [["loss", "total", "blue"], ["video_loss", "video", "orange"], ["action_loss", "action", "green"]];
const SMALL = [
  { title: "samples per second", curves: [["samples_per_s", "samples/s", "blue"]], hasZero: true },
  { title: "step time, ms", isSplit: true },
  {
    title: "step time percentiles, ms",
    curves: [["step_p50", "half", "blue"], ["step_p90", "90 %", "sky"], ["step_p99", "99 %", "orange"]],
    scale: 1000,
  },
  { title: "MFU, %", curves: [["mfu", "MFU", "green"]], scale: 100, hasZero: true },
  { title: "memory, GiB", curves: [["memory_gib", "peak", "purple"]], hasZero: true },
  { title: "gradient norm", curves: [["gradient_norm", "norm", "blue"]], isLog: true },
];

function render({ model, el }) {
  const root = el.appendChild(element("div", "wl-live"));
  root.setAttribute("role", "region");
  root.setAttribute("aria-label", "live chart of a run");
  const head = root.appendChild(element("div", "wl-head"));
  const name = head.appendChild(element("span", "wl-name", "waiting for the kernel"));
  const buttons = head.appendChild(element("span", "wl-buttons"));
  const badge = head.appendChild(element("span", "wl-badge"));
  badge.setAttribute("role", "status");
  const headline = root.appendChild(element("div", "wl-headline"));
  const figures = root.appendChild(element("div", "wl-figures"));
  const grid = root.appendChild(element("div", "wl-grid"));

  let palette = {};
  const readPalette = () => (palette = getComputedStyle(root));
  const color = (role) => palette.getPropertyValue(`--wl-${role}`).trim();
  readPalette();

  const wide = grid.appendChild(element("div", "wl-wide"));
  const zoom = { isOn: false };
  const loss = new Panel(wide, "loss", 240, color, zoom);
  const small = SMALL.map((about) => new Panel(grid, about.title, 170, color, zoom));
  const panels = [loss, ...small];
  const syncKey = `wl-${Math.random()}`;
  const rows = new Rows();
  let evaluations = [];
  let parts = [];
  let isLog = true;

  const toggle = loss.tools.appendChild(element("button", "wl-toggle", "log scale"));
  toggle.setAttribute("aria-pressed", "true");
  toggle.addEventListener("click", () => {
    isLog = !isLog;
    toggle.setAttribute("aria-pressed", String(isLog));
    schedule();
  });

  const drawCurves = (panel, { curves, scale = 1, ...options }) => {
    const steps = rows.columns.get("step");
    const known = curves.filter(([key]) => rows.columns.has(key));
    panel.root.hidden = known.length === 0;
    if (panel.root.hidden) return;
    const shown = known.filter(([key]) => !panel.hidden.has(key));
    const value = (number) => (number == null || (options.isLog && !(number > 0)) ? null : scale * number);
    const line = (role, width, alpha) => ({ stroke: () => color(role), width, alpha, points: { show: false } });
    // A curve with a smoothed twin stands pale behind it.
    const pale = shown.filter(([key]) => rows.columns.has(key + "~"));
    const main = (key) => rows.columns.get(key + "~") ?? rows.columns.get(key);
    const series = [
      ...pale.map(([, , role]) => line(role, 1, 0.3)),
      ...shown.map(([, , role]) => line(role, 2, 1)),
    ];
    const data = [
      steps,
      ...pale.map(([key]) => rows.columns.get(key).map(value)),
      ...shown.map(([key]) => main(key).map(value)),
    ];
    const entries = known.map(([key, label, role]) => ({ name: key, label, color: role }));
    const latest = (key, index) => {
      if (key === "held-out") return short(evaluations.at(-1)?.[1]);
      return short(value(main(key).at(index ?? -1)));
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

  const drawSplit = (panel) => {
    const steps = rows.columns.get("step");
    const known = parts.filter(([key]) => rows.columns.has(key));
    panel.root.hidden = known.length === 0;
    if (panel.root.hidden) return;
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
    drawCurves(loss, { curves: LOSSES, isLog, drawOver: drawEvaluations });
    SMALL.forEach((about, i) => (about.isSplit ? drawSplit(small[i]) : drawCurves(small[i], about)));
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

  let showStill = null;
  let offered = "";
  const offer = (given) => {
    if (JSON.stringify(given) === offered) return; // else the one in focus would lose it
    offered = JSON.stringify(given);
    const hadFocus = buttons.contains(document.activeElement);
    buttons.replaceChildren(
      ...given.map(([wish, label, why]) => {
        const button = element("button", "wl-toggle", label);
        button.title = why;
        button.dataset.wish = wish;
        button.addEventListener("click", () => {
          button.setAttribute("aria-disabled", "true");
          model.send({ kind: "ask", wish });
        });
        return button;
      }),
    );
    if (hadFocus) buttons.firstChild?.focus();
  };
  const showHead = (given) => {
    name.textContent = given.name;
    root.setAttribute("aria-label", `live chart of the run ${given.name}`);
    if (badge.textContent !== given.state) badge.textContent = given.state;
    offer(given.buttons ?? []);
    if (given.has_still) showStill ??= hideStill(el, "nextElementSibling");
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
    for (const panel of panels) panel.plot?.redraw(false, true);
  };
  const sizes = new ResizeObserver(() => panels.forEach((panel) => panel.resize()));
  sizes.observe(root);
  const theme = new MutationObserver(repaint);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", repaint);

  model.send({ kind: "ready" });
  return () => {
    model.off("msg:custom", receive);
    showStill?.();
    sizes.disconnect();
    theme.disconnect();
    scheme.removeEventListener("change", repaint);
    cancelAnimationFrame(frame);
    for (const panel of panels) panel.plot?.destroy();
  };
}

export default { render };
