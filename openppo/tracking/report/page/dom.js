// Small things that everything below uses. Text from the run goes into the page as text nodes only.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) node.setAttribute(name, String(value));
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child != null));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function swatch(color) {
  const node = el("span", { class: "swatch" });
  node.style.background = color;
  return node;
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const known = (table, name) => (table.values[name] || []).filter((value) => value != null);

// Three digits, as a person writes them.
function short(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return String(Math.round(value));
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

// Control characters, and those that change the direction of text, as what they are.
function visible(text) {
  return text.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, (c) => {
    const code = c.codePointAt(0);
    if (code === 9) return "⇥\t";
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// Small pictures that a run has logged, as data URLs.
const pictures = (urls) => (urls.length ? [el("div", { class: "pictures" }, urls.map((src) => el("img", { src, alt: "an image that the model reads" })))] : []);

const tooltip = byId("tooltip");
function showTooltip(box, ...children) {
  tooltip.replaceChildren(...children);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const right = box.right + 14 + width < window.innerWidth;
  tooltip.style.left = `${Math.max(4, right ? box.right + 14 : box.left - 14 - width)}px`;
  tooltip.style.top = `${Math.max(4, Math.min(box.top + 14, window.innerHeight - height - 4))}px`;
}
const hideTooltip = () => { tooltip.hidden = true; };
const row = (label, value, mark) =>
  el("div", { class: "row" }, el("span", {}, mark, label), el("span", { class: "number" }, value));

function choice(label, options, value, change) {
  const select = el("select", { onchange: () => change(select.value) },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return el("label", {}, `${label} `, select);
}
