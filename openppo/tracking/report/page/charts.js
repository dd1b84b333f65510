// Curves as inline SVG. All charts share the x axis, the zoom, and the place of the crosshair.

const HEIGHT = 185, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;
const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3"];
const color = (index) => `var(--c${index % 8})`;
const longest = Math.max(...RUNS.map((run) => run.curves.steps.length), 0);
const view = { x: "steps", smoothing: longest > 40 ? 0.6 : 0, range: null, hidden: new Set(), about: true };
const charts = [];

// Exponential moving average without the bias towards its start, as TensorBoard smooths.
function smoothed(values, beta) {
  let average = 0, weight = 0;
  return values.map((value) => {
    if (value == null || beta === 0) return value;
    average = beta * average + (1 - beta) * value;
    weight = beta * weight + (1 - beta);
    return average / weight;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) found.push(Number(tick.toPrecision(12)));
  return found;
}

function quantile(sorted, share) {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];
}

// From the first to the last report of any run: the same for all charts.
function wholeRange() {
  const xs = RUNS.flatMap((run) => [run.curves, run.evaluations]).flatMap((table) => table[view.x]).filter((x) => x != null);
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  return xs.length === 0 ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// The one value that every run has of all metrics of a chart at all times; null where anything changes.
function constant(spec) {
  const values = RUNS.flatMap((run) => spec.metrics.flatMap((metric) => known(metric.startsWith("eval") ? run.evaluations : run.curves, metric)));
  return values.length > 2 && values.every((value) => value === values[0]) ? values[0] : null;
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.full = false;
    this.log = false;
    this.fullButton = el("button", { type: "button", hidden: true, onclick: () => this.toggle("full", this.fullButton) }, "all values");
    this.logButton = el("button", { type: "button", title: "Logarithmic axis; values of 0 and below are left out", "aria-pressed": "false", onclick: () => this.toggle("log", this.logButton) }, "log");
    this.legend = el("div", { class: "legend" });
    this.svg = svg("svg", { tabindex: 0, role: "img" });
    this.aboutText = el("p", { class: "about" }, spec.about);
    this.node = el("div", { class: "chart card", "data-chart": spec.title },
      el("div", { class: "head" }, el("strong", {}, spec.title), this.fullButton, this.logButton),
      spec.about ? this.aboutText : null, this.legend, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.onMove(event));
    this.svg.addEventListener("pointerdown", (event) => { this.dragFrom = this.xAt(event); this.svg.setPointerCapture(event.pointerId); });
    this.svg.addEventListener("pointerup", (event) => this.onUp(event));
    this.svg.addEventListener("pointerleave", () => leave());
    this.svg.addEventListener("blur", () => leave());
    this.svg.addEventListener("dblclick", () => zoom(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
    charts.push(this);
  }

  toggle(name, button) {
    this[name] = !this[name];
    button.setAttribute("aria-pressed", this[name]);
    this.draw();
  }

  lines() {
    const lines = [];
    RUNS.forEach((run, r) => {
      if (view.hidden.has(r)) return;
      this.spec.metrics.forEach((metric, m) => {
        const table = metric.startsWith("eval") ? run.evaluations : run.curves;
        const all = table.values[metric];
        if (!all) return;
        const points = all.map((y, i) => ({ x: table[view.x][i], y, step: table.steps[i], hours: table.hours[i] })).filter((p) => p.y != null && p.x != null);
        const smooth = smoothed(points.map((p) => p.y), metric.startsWith("eval") ? 0 : view.smoothing);
        points.forEach((p, i) => { p.smooth = smooth[i]; });
        const alone = RUNS.length === 1;
        lines.push({ metric, run, points, color: color(alone ? m : r), dash: alone ? "" : DASHES[m % DASHES.length],
          label: alone ? metric : this.spec.metrics.length === 1 ? run.name : `${run.name}: ${metric}` });
      });
    });
    return lines;
  }

  domain(lines) {
    const inside = lines.map((line) => line.points.filter((p) => !view.range || (p.x >= view.range[0] && p.x <= view.range[1])));
    const all = inside.flat().flatMap((p) => (view.smoothing ? [p.y, p.smooth] : [p.y])).concat(this.targets().map(([target]) => target));
    this.logButton.hidden = !all.some((y) => y > 0);
    this.logarithmic = this.log && !this.logButton.hidden;
    const values = all.filter((y) => this.drawn(y)).sort((a, b) => a - b);
    let [low, high] = [values[0] ?? 0, values[values.length - 1] ?? 1];
    const inner = [quantile(values, 0.06) ?? 0, quantile(values, 0.94) ?? 1], spread = inner[1] - inner[0];
    const cut = !this.logarithmic && spread > 0 && high - low > 3 * spread && values.length > 12;
    this.fullButton.hidden = !cut;
    if (cut && !this.full) [low, high] = [Math.max(low, inner[0] - 0.5 * spread), Math.min(high, inner[1] + 0.5 * spread)];
    if (high - low < 1e-12) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    const margin = this.logarithmic ? 0 : 0.06 * (high - low);
    return [low - margin, high + margin];
  }

  // Whether the axis has a place for a value.
  drawn(y) {
    return !this.logarithmic || y > 0;
  }

  // [target, colour] of each different one; of several the colour is that of the first run that has it.
  targets() {
    const found = new Map();
    RUNS.forEach((run, r) => {
      const value = this.spec.target && !view.hidden.has(r) ? run.config[this.spec.target] : null;
      if (value != null && !found.has(Number(value))) found.set(Number(value), color(r));
    });
    return found.size > 1 ? [...found] : [...found.keys()].map((value) => [value, "var(--warn)"]);
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const lines = this.lines();
    this.range = view.range || wholeRange();
    const [low, high] = this.domain(lines);
    const scale = this.logarithmic ? Math.log10 : (y) => y;
    const x = (value) => LEFT + ((value - this.range[0]) / (this.range[1] - this.range[0])) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (scale(value) - scale(low)) / (scale(high) - scale(low) || 1)) * (HEIGHT - TOP - BOTTOM);
    Object.assign(this, { x, y, width, shown: lines });
    const id = `clip${charts.indexOf(this)}`;
    const layer = svg("g", { "clip-path": `url(#${id})` });
    const parts = [svg("clipPath", { id }, svg("rect", { x: LEFT, y: TOP - 3, width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 6 }))];
    const yTicks = this.logarithmic
      ? Array.from({ length: 12 }, (_, i) => 10 ** (Math.ceil(Math.log10(low)) + i)).filter((t) => t <= high)
      : ticks(low, high, 4);
    for (const tick of yTicks.length ? yTicks : [low, high]) {
      parts.push(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
        svg("text", { x: LEFT - 5, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
    }
    for (const tick of ticks(...this.range, Math.max(2, Math.floor(width / 90)))) {
      if (view.x === "steps" && tick !== Math.round(tick)) continue;
      parts.push(svg("text", { x: x(tick), y: HEIGHT - 5, "text-anchor": "middle" }, view.x === "hours" ? `${short(tick)} h` : short(tick)));
    }
    parts.push(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
    this.shades(layer);
    for (const [target, stroke] of this.targets().filter(([value]) => this.drawn(value))) {
      layer.append(svg("line", { class: "target", "data-target": target, stroke, x1: LEFT, x2: width - RIGHT, y1: y(target), y2: y(target) }));
    }
    const path = (points, key) => points.map((p, i) => {
      if (!this.drawn(p[key])) return "";
      return `${i && this.drawn(points[i - 1][key]) ? "L" : "M"}${x(p.x).toFixed(1)} ${y(p[key]).toFixed(1)}`;
    }).join("");
    for (const line of lines) {
      if (view.smoothing && !line.metric.startsWith("eval")) layer.append(svg("path", { class: "raw", d: path(line.points, "y"), stroke: line.color }));
      layer.append(svg("path", { d: path(line.points, "smooth"), stroke: line.color, "stroke-dasharray": line.dash, "data-metric": line.metric, "data-run": line.run.name }));
      if (line.points.length < 25) line.points.filter((p) => this.drawn(p.smooth)).forEach((p) => layer.append(svg("circle", { cx: x(p.x), cy: y(p.smooth), r: 2.2, fill: line.color })));
    }
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.brush = svg("rect", { class: "brush", y: TOP, height: HEIGHT - TOP - BOTTOM, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts, layer, this.cross, this.brush);
    this.describe(lines);
  }

  shades(layer) {
    RUNS.forEach((run, r) => {
      if (view.hidden.has(r)) return;
      const table = run.curves, at = (step) => view.x === "steps" ? step : table.hours[table.steps.findIndex((s) => s >= step)];
      for (const finding of run.findings) {
        if (!finding.metrics.slice(0, 1).some((metric) => this.spec.metrics.includes(metric))) continue;
        const from = this.x(at(finding.since) ?? this.range[0]), to = this.x(at(finding.last) ?? this.range[1]);
        layer.append(svg("rect", { class: "shade", x: from, width: Math.max(2, to - from), y: TOP, height: HEIGHT - TOP - BOTTOM }));
      }
    });
  }

  describe(lines) {
    // Of several runs the colour says which, and the dashes say which metric.
    const dashed = (dash) => {
      const mark = swatch("var(--soft)");
      if (dash) mark.style.background = `repeating-linear-gradient(90deg, var(--soft) 0 ${dash.split(" ")[0]}px, transparent 0 ${Number(dash.split(" ")[0]) + 2}px)`;
      return mark;
    };
    const first = (key) => [...new Map(lines.map((line) => [line[key], line]).reverse()).values()].reverse();
    const runs = RUNS.length > 1 ? first("run").map((line) => el("span", {}, swatch(line.color), line.run.name)) : [];
    const metrics = first("metric").map((line) => el("span", {}, RUNS.length > 1 ? dashed(line.dash) : swatch(line.color), line.metric));
    const needed = metrics.length > 1 || (RUNS.length === 1 && lines.some((line) => line.metric !== this.spec.title.toLowerCase()));
    this.legend.replaceChildren(...runs, ...(needed ? metrics : []),
      ...this.targets().map(([target, stroke], _, all) => el("span", {}, all.length > 1 ? swatch(stroke) : null, `target ${short(target)}`)));
    this.aboutText.hidden = !view.about;
    const said = lines.map((line) => line.points.length
      ? `${line.label} from ${short(line.points[0].y)} to ${short(line.points[line.points.length - 1].y)}` : "");
    this.svg.setAttribute("aria-label", `${this.spec.title}: ${said.join("; ")}. Left and right arrows read single values.`);
  }

  xAt(event) {
    const place = event.clientX - this.svg.getBoundingClientRect().left;
    return this.range[0] + ((place - LEFT) / (this.width - LEFT - RIGHT)) * (this.range[1] - this.range[0]);
  }

  onMove(event) {
    if (!this.range) return;
    const at = this.xAt(event);
    if (this.dragFrom != null && Math.abs(this.x(at) - this.x(this.dragFrom)) > 4) {
      const [from, to] = [this.x(this.dragFrom), this.x(at)].sort((a, b) => a - b);
      this.brush.setAttribute("x", from);
      this.brush.setAttribute("width", to - from);
      this.brush.setAttribute("visibility", "visible");
    }
    this.read(at, { left: event.clientX, right: event.clientX, top: event.clientY });
  }

  onUp(event) {
    const from = this.dragFrom, to = this.xAt(event);
    this.dragFrom = null;
    if (from != null && Math.abs(this.x(to) - this.x(from)) > 8) zoom([Math.min(from, to), Math.max(from, to)]);
  }

  onKey(event) {
    const xs = [...new Set((this.shown || []).flatMap((line) => line.points.map((p) => p.x)))].sort((a, b) => a - b);
    const now = this.at == null ? -1 : xs.findIndex((value) => value >= this.at - 1e-9);
    const next = { ArrowRight: Math.min(xs.length - 1, now + 1), ArrowLeft: now < 0 ? xs.length - 1 : Math.max(0, now - 1), Home: 0, End: xs.length - 1 }[event.key];
    if (event.key === "Escape") { zoom(null); return leave(); }
    if (next == null || !xs.length) return;
    event.preventDefault();
    const box = this.svg.getBoundingClientRect(), place = box.left + this.x(xs[next]);
    this.read(xs[next], { left: place, right: place, top: box.top });
  }

  // Crosshair on all charts at the nearest point, and the values of this one.
  read(at, box) {
    const nearest = (points) => points.reduce((best, p) => (Math.abs(p.x - at) < Math.abs(best.x - at) ? p : best), points[0]);
    const found = (this.shown || []).filter((line) => line.points.length).map((line) => [line, nearest(line.points)]);
    if (!found.length) return;
    const closest = found.map(([, p]) => p).reduce((best, p) => (Math.abs(p.x - at) < Math.abs(best.x - at) ? p : best));
    this.at = closest.x;
    for (const chart of charts) {
      if (!chart.cross) continue;
      chart.cross.setAttribute("visibility", "visible");
      chart.cross.setAttribute("x1", chart.x(closest.x));
      chart.cross.setAttribute("x2", chart.x(closest.x));
    }
    const time = closest.hours == null ? "" : ` · ${short(closest.hours * 60)} min`;
    showTooltip(box, el("div", { class: "headline" }, `step ${closest.step}${time}`),
      ...found.map(([line, p]) => row(line.label + (p.step === closest.step ? "" : ` (step ${p.step})`), String(p.y), swatch(line.color))));
  }
}

function leave() {
  hideTooltip();
  for (const chart of charts) { chart.cross?.setAttribute("visibility", "hidden"); chart.at = null; }
}

function zoom(range) {
  view.range = range;
  byId("unzoom").hidden = !range;
  redraw();
}

const redraw = () => charts.forEach((chart) => chart.draw());

function drawCurves() {
  const body = byId("curves").querySelector(".body");
  const slider = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: view.smoothing, id: "smoothing", oninput: () => { view.smoothing = Number(slider.value); redraw(); } });
  const about = el("input", { type: "checkbox", checked: true, onchange: () => { view.about = about.checked; redraw(); } });
  const every = Math.max(...RUNS.map((run) => run.curves.every));
  body.append(el("div", { class: "tools" },
    choice("Over", [["steps", "steps"], ["hours", "hours"]], view.x, (value) => { view.x = value; zoom(null); }),
    el("label", {}, "Smoothing ", slider), el("label", {}, about, " explanations"),
    el("button", { type: "button", id: "unzoom", hidden: true, onclick: () => zoom(null) }, "Whole run"),
    el("span", { class: "note" }, "Drag to zoom. Shaded: where a rule warns.",
      every > 1 ? ` Each point is the mean of ${every} reports (of _max metrics the maximum).` : "")));
  const groups = new Map();
  for (const spec of DATA.charts) groups.set(spec.group, [...(groups.get(spec.group) || []), spec]);
  for (const [group, specs] of groups) {
    const still = specs.filter((spec) => constant(spec) != null), moving = specs.filter((spec) => constant(spec) == null);
    body.append(el("h3", {}, group));
    if (moving.length) body.append(el("div", { class: "charts" }, moving.map((spec) => new Chart(spec).node)));
    if (still.length) body.append(el("p", { class: "note still" }, "The same all the time: ", still.map((spec) => `${spec.metrics.join(", ")} ${short(constant(spec))}`).join("; "), "."));
  }
}
