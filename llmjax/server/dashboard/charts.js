// Charts as SVG in the page's own colours, redrawn from their numbers. Knows nothing of servers.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 44, right: 8, top: 20, bottom: 20 };

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Three significant digits, thousands apart, never an exponent.
function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 1e6) return short(value / 1e6) + " M";
  if (Math.abs(value) >= 1e5) return short(value / 1e3) + " k";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return String(Number(value.toPrecision(value && Math.abs(value) < 1 ? 2 : 3)));
}

// The next of these steps times a power of ten, so that halves are round.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * (1 - 1e-12)) * power;
}

function frame(place, label, top) {
  const width = Math.max(200, place.clientWidth), height = place.clientHeight;
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const bottom = height - MARGIN.bottom, right = width - MARGIN.right;
  const y = (value) => bottom - (value / top) * (bottom - MARGIN.top);
  for (const part of [0, 0.5, 1]) {
    const at = y(top * part);
    svg.append(node("line", { class: "grid", x1: MARGIN.left, x2: right, y1: at, y2: at }));
    svg.append(node("text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, short(top * part)));
  }
  return { svg, width, height, bottom, right, y };
}

// Lines over time. `points` are [seconds, ...], `lines` are {name, colour, at}: the place of the value in a point; null is a gap.
function lineChart(place, label, points, lines, { limit = 0 } = {}) {
  const values = points.flatMap((point) => lines.map((line) => point[line.at])).filter((value) => value !== null);
  const { svg, bottom, right, y } = frame(place, label, limit || roundUp(Math.max(0, ...values)));
  const end = points.length ? points[points.length - 1][0] : 0;
  const span = [60, 120].find((seconds) => !points.length || end - points[0][0] <= seconds) || 300;
  const x = (time) => right - ((end - time) / span) * (right - MARGIN.left);
  for (const [ago, text, anchor] of [[span, `${span / 60} min ago`, "start"], [0, "now", "end"]]) {
    svg.append(node("text", { x: x(end - ago), y: bottom + 15, "text-anchor": anchor }, text));
  }
  let legend = MARGIN.left;
  for (const line of lines) {
    let path = "", before = null;
    for (const point of points) {
      const value = point[line.at];
      if (value === null || end - point[0] > span) { before = null; continue; }
      const joined = before !== null && point[0] - before < 5;
      path += `${joined ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(value).toFixed(1)}${joined ? "" : "h.01"}`;
      before = point[0];
    }
    svg.append(node("path", { d: path || "M0 0", fill: "none", stroke: `var(${line.colour})`, "stroke-width": 2, "stroke-linejoin": "round", "stroke-linecap": "round" }));
    svg.append(node("rect", { x: legend, y: 3, width: 10, height: 10, rx: 2, fill: `var(${line.colour})` }));
    const last = points.length ? points[points.length - 1][line.at] : null;
    const text = `${line.name} ${short(last)}`;
    svg.append(node("text", { class: "mark", x: legend + 14, y: 12 }, text));
    legend += 30 + 6.4 * Math.max(text.length, line.name.length + 6);
  }
  place.replaceChildren(svg);
}

// Bars of [upper bound, count].
function barChart(place, label, bars) {
  const most = Math.max(0, ...bars.map((bar) => bar[1]));
  const { svg, bottom, right, y } = frame(place, label, roundUp(most));
  const step = (right - MARGIN.left) / Math.max(bars.length, 4);
  const every = Math.ceil(44 / step);
  bars.forEach(([bound, count], index) => {
    const left = MARGIN.left + step * index, top = y(count);
    const bar = node("rect", { x: left + 1, y: top, width: Math.max(1, step - 2), height: bottom - top, rx: 2, fill: "var(--c0)" });
    bar.append(node("title", {}, `${count} up to ${bound}`));
    svg.append(bar);
    if (index % every === 0) svg.append(node("text", { x: left + step / 2, y: bottom + 15, "text-anchor": "middle" }, `≤\u202f${short(bound)}`));
  });
  if (!bars.length) svg.append(node("text", { x: (MARGIN.left + right) / 2, y: y(0) / 2 + 14, "text-anchor": "middle" }, "none yet"));
  place.replaceChildren(svg);
}

// Cells of the page map, one symbol each; colours by symbol.
function pageMap(canvas, cells, colourOf) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  const size = Math.min(26, Math.max(8, Math.floor(Math.sqrt((width * 176) / cells.length)))), columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(cells.length / columns) * size;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const draw = canvas.getContext("2d");
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, height);
  for (let index = 0; index < cells.length; index++) {
    draw.fillStyle = colourOf(cells[index]);
    draw.fillRect((index % columns) * size, Math.floor(index / columns) * size, size - 2, size - 2);
  }
}
