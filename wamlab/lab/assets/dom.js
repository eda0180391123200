// What all front ends share: elements, numbers as text, the still picture that a live view stands for.

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

// A saved notebook holds a still picture beside the view; where the view is alive it is not wanted.
const hideStill = (el, side = "previousElementSibling") => {
  let still = null;
  const frame = requestAnimationFrame(() => {
    still = el.closest(".jp-OutputArea-child")?.[side] ?? null;
    if (still) still.style.display = "none";
  });
  return () => {
    cancelAnimationFrame(frame);
    if (still) still.style.display = "";
  };
};
