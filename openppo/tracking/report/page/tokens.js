// A response, each token coloured by one of its numbers.

const MEASURES = {
  advantage: { name: "advantage", middle: 0, about: "as trained on (normalized where the run normalizes)" },
  kl: { name: "KL", middle: 0, about: "log-prob less the reference's: k1, in nats" },
  value: { name: "value", middle: 0, about: "what the critic expects from here on" },
  reward: { name: "reward", middle: 0, about: "KL penalty, and on the last token the score" },
  return: { name: "return", middle: 0, about: "what the critic is trained towards" },
  log_prob: { name: "log-prob", below: true, about: "under the policy that sampled" },
  ratio: { name: "ratio", middle: 1, about: "probability when last trained on over that before this step" },
  entropy: { name: "entropy", about: "of the policy in this step, in nats" },
};
const UP = [214, 92, 20], DOWN = [38, 108, 214];

// Limits of the colours: 98 of 100 tokens of all samples lie within, so colours mean the same everywhere.
const limits = {};
for (const measure of Object.keys(MEASURES)) {
  const { middle = 0 } = MEASURES[measure];
  const sizes = RUNS.flatMap((run) => run.samples).flatMap((sample) => sample.tokens?.[measure] || [])
    .filter((value) => value != null).map((value) => Math.abs(value - middle)).sort((a, b) => a - b);
  if (sizes.length) limits[measure] = quantile(sizes, 0.98) || sizes[sizes.length - 1] || 1;
}

function tint(measure, value) {
  if (value == null || !(measure in limits)) return "";
  const { middle = 0, below } = MEASURES[measure];
  const part = Math.min(1, Math.abs(value - middle) / limits[measure]);
  const [r, g, b] = value < middle && !below ? DOWN : UP;
  return `rgba(${r}, ${g}, ${b}, ${(0.75 * part).toFixed(3)})`;
}

function scaleOf(measure) {
  if (!(measure in limits)) return null;
  const { middle = 0, below, about } = MEASURES[measure], limit = limits[measure];
  const signed = "middle" in MEASURES[measure];
  const stops = signed ? [-1, -0.5, 0, 0.5, 1].map((part) => middle + part * limit)
    : [0, 0.25, 0.5, 0.75, 1].map((part) => (below ? -1 : 1) * part * limit);
  return el("span", { class: "scale" }, short(stops[0]),
    stops.map((stop) => { const box = el("i"); box.style.background = tint(measure, stop); return box; }),
    short(stops[4]), ` ${about}`);
}

function tokenNode(tokens, i, measure) {
  const text = tokens.texts[i], trained = !tokens.trained || tokens.trained[i];
  const node = el("span", { class: trained ? "token" : "token untrained", "data-i": i });
  if (trained) node.style.background = tint(measure, tokens[measure]?.[i]);
  if (text === "") node.append(el("span", { class: "mark" }, "·"));
  for (const [n, line] of visible(text).split("\n").entries()) {
    if (n) node.append(el("span", { class: "mark" }, "⏎"), "\n");
    node.append(line);
  }
  return node;
}

const gap = (n) => el("span", { class: "gap" }, `… ${n} tokens are not logged …`);

// The response of a sample, of an agent's its whole conversation.
function responseNode(sample, measure) {
  if (sample.messages) return conversationNode(sample, measure);
  if (!sample.tokens) return el("div", { class: "text response", tabindex: 0 }, visible(sample.response));
  const skipped = sample.tokens.n_tokens - sample.tokens.texts.length;
  return tokenBox(sample, measure, (nodes) => (skipped > 0 ? [nodes.slice(0, nodes.length / 2), gap(skipped), nodes.slice(nodes.length / 2)] : nodes));
}

const FOLDED = 4;

// Of many equal tokens in a row that are not trained on, such as those of an image, only the first is shown.
function fold(tokens, nodes) {
  const same = (i, j) => j < nodes.length && tokens.ids[j] === tokens.ids[i] && tokens.trained && !tokens.trained[j];
  for (let start = 0, stop; start < nodes.length; start = stop) {
    for (stop = start + 1; same(start, stop) && same(start, start);) stop += 1;
    if (stop - start < FOLDED) continue;
    nodes[start].append(el("span", { class: "mark" }, ` × ${stop - start}`));
    for (const node of nodes.slice(start + 1, stop)) node.hidden = true;
  }
}

// The tokens of a prompt, each with its place and id in a tooltip.
function promptTokens({ first, prompt_ids: ids, prompt_texts: texts, images }) {
  const nodes = texts.map((_, i) => tokenNode({ texts }, i, null)), skipped = first - ids.length, half = ids.length / 2;
  for (const [i, node] of nodes.entries()) node.title = `token ${i + 1 + (i >= half ? skipped : 0)} · id ${ids[i]}`;
  if (images) fold({ ids, trained: ids.map(() => 0) }, nodes);
  return skipped > 0 ? [nodes.slice(0, half), gap(skipped), nodes.slice(half)] : nodes;
}

// A box of all logged tokens, as ``arrange`` lays them out; arrows move from token to token where it has the focus.
function tokenBox(sample, measure, arrange) {
  const tokens = sample.tokens, nodes = tokens.texts.map((_, i) => tokenNode(tokens, i, measure));
  fold(tokens, nodes);
  const box = el("div", { class: "text response", tabindex: 0, role: "group", "aria-label": "Response. Left and right arrows read single tokens." }, arrange(nodes));
  let active = null;
  const show = (i) => {
    if (active != null) nodes[active].classList.remove("active");
    active = i;
    if (i == null) return hideTooltip();
    nodes[i].classList.add("active");
    describeToken(sample, i, measure, nodes[i].getClientRects()[0] || nodes[i].getBoundingClientRect());
  };
  box.addEventListener("pointerover", (event) => {
    const node = event.target.closest(".token");
    if (node) show(Number(node.dataset.i));
  });
  box.addEventListener("pointerleave", () => show(null));
  box.addEventListener("blur", () => show(null));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") return show(null);
    if (!step || !nodes.length) return;
    event.preventDefault();
    let next = active == null ? 0 : active + step;
    while (nodes[next]?.hidden) next += step;
    show(Math.min(nodes.length - 1, Math.max(0, next)));
    nodes[active].scrollIntoView({ block: "nearest" });
  });
  return box;
}

function describeToken(sample, i, measure, box) {
  const tokens = sample.tokens, skipped = tokens.n_tokens - tokens.texts.length;
  const place = i + 1 + (skipped > 0 && i >= tokens.texts.length / 2 ? skipped : 0);
  const trained = !tokens.trained || tokens.trained[i];
  const text = tokens.texts[i] === "" ? "(part of a character)" : JSON.stringify(visible(tokens.texts[i]));
  const lines = Object.keys(MEASURES).filter((key) => tokens[key]?.[i] != null).map((key) => {
    const line = row(MEASURES[key].name, String(tokens[key][i]), key === measure ? "▸ " : "");
    line.dataset.measure = key;
    return line;
  });
  showTooltip(box, el("div", { class: "headline" }, `${text} · token ${place} of ${tokens.n_tokens} · id ${tokens.ids[i]}`),
    ...(trained ? lines : [el("div", {}, "Not trained: written by a tool or environment, or left out of the loss.")]));
}
