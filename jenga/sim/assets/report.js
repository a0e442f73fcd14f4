"use strict";

const charts = JSON.parse(document.getElementById("numbers").textContent);
const tip = document.getElementById("tip");
const boxes = [...document.querySelectorAll(".chooser input")];

// Selection of runs. All elements of run i have the class "run-i".
function show() {
  for (const box of boxes) {
    for (const element of document.querySelectorAll("." + box.value)) {
      element.classList.toggle("hidden", !box.checked);
    }
  }
  // A heading is hidden if all bars below it are hidden.
  for (const group of document.querySelectorAll(".model")) {
    const bars = [...group.querySelectorAll(".bar")];
    group.classList.toggle("hidden", bars.every((bar) => bar.classList.contains("hidden")));
  }
}

for (const box of boxes) box.addEventListener("change", show);
for (const button of document.querySelectorAll(".chooser button")) {
  button.addEventListener("click", () => {
    for (const box of boxes) box.checked = button.value === "all";
    show();
  });
}
show();

// Values at the mouse pointer.
function isChosen(series) {
  const box = boxes.find((each) => each.value === series.cssClass);
  return !box || box.checked;
}

function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return xs[high] - x < x - xs[low] ? high : low;
}

function row(cells) {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const element = document.createElement("td");
    element.append(cell);
    line.append(element);
  }
  return line;
}

function chip(colour) {
  const element = document.createElement("span");
  element.className = "chip";
  element.style.background = colour;
  return element;
}

function point(event, svg, chart) {
  const box = svg.getBoundingClientRect();
  const scale = svg.viewBox.baseVal.width / box.width;
  const across = (event.clientX - box.left) * scale;
  const share = (across - chart.left) / (chart.right - chart.left);
  if (share < 0 || share > 1) return leave(svg);

  const x = share * chart.xMax;
  const shown = chart.series.filter((series) => isChosen(series) && series.x.length);
  if (!shown.length) return leave(svg);
  const reached = shown.filter((series) => x <= series.x[series.x.length - 1]);
  const indices = new Map(reached.map((series) => [series, nearest(series.x, x)]));
  if (!indices.size) return leave(svg);
  const table = document.createElement("table");
  const [first, at] = indices.entries().next().value;
  table.append(row([chart.xLabel, first.x[at].toLocaleString("en")]));
  for (const [series, index] of indices) {
    const name = document.createElement("span");
    name.append(chip(series.colour), series.name);
    const value = series.y[index].toLocaleString("en", { maximumSignificantDigits: 4 });
    table.append(row([name, value + " " + chart.unit]));
  }
  tip.replaceChildren(table);
  tip.style.visibility = "visible";
  const right = event.clientX + 16 + tip.offsetWidth > window.innerWidth;
  tip.style.left = (right ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16) + "px";
  tip.style.top = Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight) + "px";

  const cursor = svg.querySelector(".cursor");
  cursor.setAttribute("transform", "translate(" + across + " 0)");
  cursor.style.visibility = "visible";
}

function leave(svg) {
  tip.style.visibility = "hidden";
  svg.querySelector(".cursor").style.visibility = "hidden";
}

for (const [name, chart] of Object.entries(charts)) {
  const svg = document.getElementById(name);
  svg.addEventListener("mousemove", (event) => point(event, svg, chart));
  svg.addEventListener("mouseleave", () => leave(svg));
}
