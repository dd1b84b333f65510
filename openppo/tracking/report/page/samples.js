// A browser of samples: filter and sort on the left, one sample, or one prompt at several steps, on the right.

const SAMPLES = RUNS.flatMap((run, r) => run.samples.map((sample) => ({ ...sample, run: r })));
const FIELDS = {
  step: ["step", (s) => s.step],
  reward: ["reward", (s) => s.reward],
  length: ["length", (s) => s.response_length],
  kl: ["KL", (s) => s.kl],
};
const available = Object.keys(MEASURES).filter((measure) => measure in limits);
const browse = { measure: available[0], run: "all", kind: "all", step: "all", finish: "all", text: "", sort: "step", down: true,
  field: "reward", from: "", to: "", current: null, sides: false, read: null };
if (SAMPLES.some((sample) => !sample.evaluation)) browse.kind = "training";

function chosenSamples() {
  const value = FIELDS[browse.field][1], by = FIELDS[browse.sort][1], sign = browse.down ? -1 : 1;
  const wanted = browse.text.toLowerCase();
  return SAMPLES.filter((s) =>
    (browse.run === "all" || s.run === Number(browse.run))
    && (browse.kind === "all" || (browse.kind === "evaluation") === Boolean(s.evaluation))
    && (browse.step === "all" || s.step === Number(browse.step))
    && (browse.finish === "all" || endOf(s) === browse.finish)
    && (browse.from === "" || (value(s) != null && value(s) >= Number(browse.from)))
    && (browse.to === "" || (value(s) != null && value(s) <= Number(browse.to)))
    && (!wanted || `${s.prompt}\n${s.response}`.toLowerCase().includes(wanted)),
  ).sort((a, b) => sign * ((by(a) ?? -Infinity) - (by(b) ?? -Infinity)) || a.run - b.run || (a.sample ?? 0) - (b.sample ?? 0));
}

// How a response ended, or an agent's episode.
const endOf = (sample) => sample.ending ?? sample.finish_reason;
const fact = (key, value) => el("span", {}, el("span", { class: "key" }, `${key} `), el("b", {}, value));

function facts(sample) {
  const parts = Object.entries(sample.rewards || {}).filter(([name, value]) => name !== "reward" || value !== sample.reward);
  return el("div", { class: "facts" },
    RUNS.length > 1 ? fact("run", RUNS[sample.run].name) : null,
    fact(sample.evaluation ? "evaluation at step" : "step", sample.step), sample.reward == null ? null : fact("reward", short(sample.reward)),
    parts.map(([name, value]) => fact(name, short(value))),
    sample.kl == null ? null : fact("KL", `${short(sample.kl)} nats`),
    sample.response_length == null ? null : fact("length", `${sample.response_length} tokens`),
    fact("ended by", endOf(sample) === "length" ? "length (cut)" : endOf(sample)),
    sample.turns == null ? null : fact("turns", sample.turns),
    sample.error ? fact("error", visible(sample.error)) : null, sample.output ? fact("output", visible(sample.output)) : null,
    sample.label == null ? null : fact("label", visible(String(typeof sample.label === "object" ? JSON.stringify(sample.label) : sample.label))));
}

// What a sample is coloured by: held-out samples have no advantage, a run without a critic no values.
const measureOf = (sample) => (sample.tokens?.[browse.measure] ? browse.measure : available.find((measure) => sample.tokens?.[measure]));

function missing(sample) {
  const measure = measureOf(sample);
  if (measure === browse.measure || sample.tokens?.n_tokens === 0) return null;
  const kind = sample.evaluation ? "a held-out sample" : "this sample", lacks = browse.measure ? MEASURES[browse.measure].name : "numbers";
  return el("p", { class: "note missing" }, measure ? `There is no ${lacks} of ${kind}: coloured by ${MEASURES[measure].name}.` : `Nothing was logged of the tokens of ${kind}.`);
}

// Of a prompt with images those of other steps, whose tokens may not be logged, count as the same.
const imagesOf = (sample) => (sample.tokens ? Object.keys(sample.tokens.images || {}).join() : null);
const sameImages = (one, other) => [imagesOf(one), imagesOf(other)].includes(null) || imagesOf(one) === imagesOf(other);
const samePrompt = (sample) => SAMPLES.filter((other) => other.prompt === sample.prompt && sameImages(other, sample) && Boolean(other.evaluation) === Boolean(sample.evaluation))
  .sort((a, b) => a.step - b.step || a.run - b.run || (a.sample ?? 0) - (b.sample ?? 0));

// What the model read before it wrote: of an agent's episode on demand, beside the messages that people wrote.
function readNode(sample) {
  const { tokens, messages } = sample, hasTokens = Boolean(tokens?.prompt_texts);
  const text = sample.rendered_prompt ?? (messages ? null : sample.prompt);
  if (text == null) return [];
  const wanted = browse.read ?? (messages ? "" : "text"), form = wanted === "tokens" && !hasTokens ? "text" : wanted;
  const button = (name) => el("button", { type: "button", "aria-pressed": form === name, disabled: name === "tokens" && !hasTokens,
    onclick: () => { browse.read = form === name ? null : name; drawDetail(); } }, `as ${name}`);
  const count = tokens == null ? "" : `${tokens.first} token${tokens.first === 1 ? "" : "s"}`;
  const title = messages ? `The model read ${count} before its first turn` : `Prompt${count && ` of ${count}`}`;
  return [
    el("div", { class: "tools", id: "read" }, el("span", { class: "note" }, title), button("text"), button("tokens")),
    form ? el("div", { class: "text prompt", tabindex: 0 }, form === "text" ? visible(text) : promptTokens(tokens)) : null,
    ...(messages ? [] : pictures(Object.values(tokens?.images || {}))),
  ].filter(Boolean);
}

function drawDetail() {
  const detail = byId("sample-detail"), sample = browse.current;
  if (!sample) return detail.replaceChildren(el("p", { class: "note" }, "No sample passes these filters."));
  const others = samePrompt(sample);
  const button = el("button", { type: "button", id: "same-prompt", "aria-pressed": browse.sides, disabled: others.length < 2,
    onclick: () => { browse.sides = !browse.sides; drawDetail(); } },
  others.length < 2 ? "This prompt was logged once" : `This prompt, ${others.length} times side by side`);
  const prompt = readNode(sample);
  if (browse.sides && others.length > 1) {
    detail.replaceChildren(el("div", { class: "tools" }, button, missing(sample) ?? ""), ...prompt,
      el("div", { class: "sides" }, others.map((other) => el("div", {}, facts(other), responseNode(other, measureOf(other))))));
  } else {
    detail.replaceChildren(el("div", { class: "tools" }, button, missing(sample) ?? ""), facts(sample), ...prompt,
      el("span", { class: "note" }, sample.messages ? "Conversation" : "Response"), responseNode(sample, measureOf(sample)));
  }
}

function drawList() {
  const list = byId("sample-list"), chosen = chosenSamples();
  if (!chosen.includes(browse.current)) browse.current = chosen[0] || null;
  byId("sample-count").textContent = `${chosen.length} of ${SAMPLES.length} samples`;
  list.replaceChildren(...chosen.map((sample) => el("button", { type: "button", role: "option", "aria-selected": sample === browse.current,
    tabindex: sample === browse.current ? 0 : -1, onclick: () => { browse.current = sample; drawList(); focusChosen(); } },
  el("div", { class: "line" }, RUNS.length > 1 ? swatch(color(sample.run)) : null,
    el("b", {}, `step ${sample.step}`), browse.kind === "all" && sample.evaluation ? "held out" : "", sample.reward == null ? "" : el("span", { class: "number" }, `reward ${short(sample.reward)}`),
    sample.kl == null ? "" : el("span", { class: "number" }, `KL ${short(sample.kl)}`),
    sample.response_length == null ? "" : el("span", { class: "number" }, `${sample.response_length} tokens`)),
  el("div", { class: "excerpt" }, visible(sample.prompt).slice(-90)))));
  drawDetail();
}

function onListKey(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const chosen = chosenSamples(), next = chosen[chosen.indexOf(browse.current) + step];
  if (!next) return;
  browse.current = next;
  drawList();
  focusChosen();
}

// The list is made anew when another sample is chosen; keys continue from there.
const focusChosen = () => byId("sample-list").querySelector('[aria-selected="true"]').focus();

function drawSamples() {
  const section = byId("samples"), body = section.querySelector(".body");
  if (!SAMPLES.length) return section.remove();
  const set = (name) => (value) => { browse[name] = value; drawList(); };
  const distinct = (get) => [...new Set(SAMPLES.map(get))];
  const scale = el("span", { id: "scale" });
  const colours = () => { scale.replaceChildren(...[scaleOf(browse.measure)].filter(Boolean)); };
  const measure = choice("Colour by", available.map((key) => [key, MEASURES[key].name]), browse.measure, (value) => { browse.measure = value; colours(); drawDetail(); });
  measure.querySelector("select").id = "measure";
  const kind = choice("Of", [["training", "training prompts"], ["evaluation", "held-out prompts"], ["all", "all prompts"]], browse.kind, set("kind"));
  kind.querySelector("select").id = "kind";
  const number = (name, text) => el("input", { type: "number", step: "any", "aria-label": text, placeholder: text, oninput: (event) => { browse[name] = event.target.value; drawList(); } });
  const order = choice("Sort by", Object.entries(FIELDS).map(([key, [name]]) => [key, name]), browse.sort, set("sort"));
  order.querySelector("select").id = "sort";
  const direction = el("button", { type: "button", id: "direction", title: "Turn the order round", onclick: () => { browse.down = !browse.down; direction.textContent = browse.down ? "↓ largest first" : "↑ smallest first"; drawList(); } }, "↓ largest first");
  const shortened = RUNS.filter((run) => run.sample_steps < run.all_sample_steps);
  fill(body, {}, [
    el("div", { class: "tools" }, available.length ? measure : null, scale),
    el("div", { class: "tools" },
      RUNS.length > 1 ? choice("Run", [["all", "all"], ...RUNS.map((run, r) => [r, run.name])], "all", set("run")) : null,
      distinct((s) => Boolean(s.evaluation)).length > 1 ? kind : null,
      choice("Step", [["all", "all"], ...distinct((s) => s.step).sort((a, b) => a - b).map((step) => [step, step])], "all", set("step")),
      distinct(endOf).length > 1 ? choice("Ended by", [["all", "all"], ...distinct(endOf).map((reason) => [reason, reason])], "all", set("finish")) : null,
      order, direction,
      choice("With", Object.entries(FIELDS).map(([key, [name]]) => [key, name]), browse.field, set("field")), number("from", "from"), number("to", "to"),
      el("input", { type: "search", placeholder: "text", "aria-label": "Text in prompt or response", oninput: (event) => { browse.text = event.target.value; drawList(); } }),
      el("span", { class: "note", id: "sample-count" })),
    shortened.length ? el("p", { class: "note" }, shortened.map((run) => `${run.name}: samples of ${run.sample_steps} of the ${run.all_sample_steps} logged steps are on this page, evenly spread, to keep it small; all are in logs/samples.jsonl and logs/tokens.jsonl. `)) : null,
    el("div", { class: "browser" },
      el("div", { class: "list card", id: "sample-list", role: "listbox", "aria-label": "Samples", onkeydown: onListKey }),
      el("div", { class: "detail card", id: "sample-detail" }))]);
  if (browse.measure) colours();
  drawList();
}
