// A clip's frames and the moment in its actions. dom.js stands before this file in the bundle.

function render({ model, el }) {
  const root = el.appendChild(element("section", "wl-live wl-clip"));
  const title = root.appendChild(element("div", "wl-name", "waiting for the kernel"));
  const grid = root.appendChild(element("div", "wl-clip-grid"));
  const bar = root.appendChild(element("div", "wl-clip-bar"));
  const play = bar.appendChild(element("button", "wl-toggle", "Play"));
  const slider = bar.appendChild(element("input"));
  const time = bar.appendChild(element("span", "wl-time"));
  const compare = bar.appendChild(element("button", "wl-toggle", "difference"));
  const drawing = root.appendChild(element("div"));
  slider.type = "range";
  slider.min = 0;
  slider.step = 1;
  slider.value = 0;
  slider.setAttribute("aria-label", "frame");
  compare.title = "lay real frames over predicted ones: black where they agree";
  compare.setAttribute("aria-pressed", "false");
  play.setAttribute("aria-pressed", "false");

  let clip = null;
  let urls = [];
  let images = []; // [image, number of its first frame]
  let timer = 0;

  const show = () => {
    const frame = Number(slider.value);
    for (const [image, first] of images) image.src = urls[first + frame];
    const text = `${frame + 1} / ${clip.num_frames}, ${(frame / clip.fps).toFixed(2)} s`;
    time.textContent = text;
    slider.setAttribute("aria-valuetext", `frame ${frame + 1} of ${clip.num_frames}`);
    root.dataset.frame = frame;
    const moment = drawing.querySelector(".wl-moment");
    if (moment) {
      const width = drawing.querySelector("svg").viewBox.baseVal.width - clip.left - 8;
      const share = clip.num_frames > 1 ? frame / (clip.num_frames - 1) : 0;
      moment.setAttribute("transform", `translate(${(share * width).toFixed(1)} 0)`);
    }
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  };
  const start = () => {
    if (Number(slider.value) === clip.num_frames - 1) slider.value = 0;
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    timer = setInterval(() => {
      if (Number(slider.value) >= clip.num_frames - 1) return stop();
      slider.value = Number(slider.value) + 1;
      show();
    }, 1000 / clip.fps);
    show();
  };
  play.addEventListener("click", () => (timer ? stop() : clip && start()));
  slider.addEventListener("input", () => {
    stop();
    if (clip) show();
  });
  // The browser moves the slider by arrow keys; the notebook must not move between cells by them.
  slider.addEventListener("keydown", (event) => event.stopPropagation());
  compare.addEventListener("click", () => {
    const isOn = compare.getAttribute("aria-pressed") === "false";
    compare.setAttribute("aria-pressed", String(isOn));
    for (const over of grid.querySelectorAll(".wl-over")) over.hidden = !isOn;
  });

  const picture = (place, row, zoom) => {
    const image = element("img");
    image.width = place.width * zoom;
    image.height = place.height * zoom;
    image.alt = `${row} frames of ${clip.views[place.view]}`;
    images.push([image, place.first]);
    return image;
  };
  const receive = (message, buffers) => {
    if (message.kind !== "content") return;
    stop();
    clip = message;
    urls.forEach((url) => URL.revokeObjectURL(url));
    urls = buffers.map((buffer) => URL.createObjectURL(new Blob([buffer])));
    images = [];
    title.textContent = clip.title;
    root.setAttribute("aria-label", clip.title);
    grid.style.gridTemplateColumns = `repeat(${clip.views.length}, max-content)`;
    const find = (row, view) => clip.places.find((place) => place.row === row && place.view === view);
    const figures = clip.rows.flatMap((row) =>
      clip.views.map((name, view) => {
        const figure = element("figure");
        const place = find(row, view);
        if (!place) return figure;
        figure.append(element("figcaption", null, clip.rows.length > 1 ? `${name}, ${row}` : name));
        const frame = figure.appendChild(element("div", "wl-clip-frame"));
        frame.appendChild(picture(place, row, clip.zoom));
        if (row === "predicted") {
          const over = frame.appendChild(picture(find("real", view), "real", clip.zoom));
          over.className = "wl-over";
          over.hidden = true;
          over.alt = "";
        }
        return figure;
      }),
    );
    grid.replaceChildren(...figures);
    compare.hidden = clip.rows.length < 2;
    compare.setAttribute("aria-pressed", "false");
    drawing.innerHTML = clip.actions;
    slider.max = clip.num_frames - 1;
    show();
    root.dataset.ready = "yes";
  };
  model.on("msg:custom", receive);
  const showStill = hideStill(el);
  model.send({ kind: "ready" });
  return () => {
    model.off("msg:custom", receive);
    stop();
    showStill();
    urls.forEach((url) => URL.revokeObjectURL(url));
  };
}

export default { render };
