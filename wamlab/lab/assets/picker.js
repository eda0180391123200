// Items and the details of the chosen one. dom.js stands before this file in the bundle.

function render({ model, el }) {
  const root = el.appendChild(element("section", "wl-live wl-picker"));
  const title = root.appendChild(element("div", "wl-name", "waiting for the kernel"));
  const filter = root.appendChild(element("input", "wl-filter"));
  filter.type = "search";
  filter.placeholder = "filter";
  filter.setAttribute("aria-label", "show only items with these words");
  filter.hidden = true;
  const body = root.appendChild(element("div", "wl-picker-body"));
  const index = body.appendChild(element("div", "wl-index"));
  const detail = body.appendChild(element("div", "wl-detail"));
  detail.setAttribute("aria-live", "polite");
  let items = [];

  const shown = () => items.filter((item) => !item.hasAttribute("hidden"));
  const mark = (number) => {
    for (const item of items) {
      const isChosen = Number(item.dataset.item) === number;
      item.classList.toggle("wl-chosen", isChosen);
      item.setAttribute("aria-pressed", String(isChosen));
    }
    const reachable = shown();
    const entry = reachable.find((item) => Number(item.dataset.item) === number) ?? reachable[0];
    for (const item of items) item.setAttribute("tabindex", item === entry ? "0" : "-1");
    root.dataset.chosen = number ?? "";
  };
  const pick = (item) => {
    const number = Number(item.dataset.item);
    if (root.dataset.chosen === String(number)) return;
    mark(number);
    model.send({ kind: "pick", item: number });
  };
  const move = (event) => {
    const reachable = shown();
    const at = reachable.indexOf(document.activeElement);
    const last = reachable.length - 1;
    const places = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last };
    if (event.key in places && last >= 0) {
      const next = reachable[Math.min(last, Math.max(0, places[event.key]))];
      next.focus();
      pick(next);
    } else if ((event.key === "Enter" || event.key === " ") && at >= 0) {
      pick(reachable[at]);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation(); // else the notebook would move between cells
  };
  index.addEventListener("keydown", move);
  index.addEventListener("click", (event) => {
    const item = event.target.closest("[data-item]");
    if (!item) return;
    item.focus();
    pick(item);
  });
  filter.addEventListener("keydown", (event) => event.stopPropagation());
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const item of items) {
      const label = item.dataset.label.toLowerCase();
      item.toggleAttribute("hidden", !words.every((word) => label.includes(word)));
    }
    mark(root.dataset.chosen === "" ? null : Number(root.dataset.chosen));
  });

  const receive = (message) => {
    if (message.kind === "content") {
      title.textContent = message.title;
      root.setAttribute("aria-label", message.title);
      filter.hidden = !message.has_filter;
      root.classList.toggle("wl-side", !message.is_wide);
      index.innerHTML = message.index;
      items = [...index.querySelectorAll("[data-item]")];
      for (const item of items) {
        item.setAttribute("role", "button");
        item.setAttribute("aria-label", item.dataset.label);
      }
      detail.innerHTML = message.detail;
      mark(message.chosen);
    } else if (message.kind === "detail") {
      detail.innerHTML = message.html;
      mark(message.item);
      detail.dataset.of = message.item;
    }
  };
  model.on("msg:custom", receive);
  const showStill = hideStill(el);
  model.send({ kind: "ready" });
  return () => {
    model.off("msg:custom", receive);
    showStill();
  };
}

export default { render };
