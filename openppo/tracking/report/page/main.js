// The rest of the page: summary, warnings, tables.

// [name, at the start, now] of each headline; means over a tenth of the run at either end, evaluations as they are.
const HEADLINES = [
  ["Reward", "reward"], ["Held-out reward", "eval_reward"], ["Held-out pass@1", "eval_pass@1"], ["Loss", "loss"], ["Held-out loss", "eval_loss"], ["Accuracy", "accuracy"],
  ["KL per token", "kl"], ["Held-out KL", "eval_kl"], ["Entropy", "entropy"], ["Clip fraction", "clip_fraction"], ["Explained variance", "explained_variance"],
  ["Turns per episode", "agent/turns"], ["Response length", "response_length"], ["Truncated", "truncated_fraction"], ["Seconds a step", "time/step_s"],
];
const shares = new Set(["eval_pass@1", "accuracy", "clip_fraction", "truncated_fraction"]);

function ends(run, name) {
  const evaluation = name.startsWith("eval"), values = known(evaluation ? run.evaluations : run.curves, name);
  if (!values.length) return null;
  const n = evaluation ? 1 : Math.max(1, Math.min(10, Math.floor(values.length / 10)));
  return [mean(values.slice(0, n)), mean(values.slice(-n)), n];
}
const written = (name, value) => (shares.has(name) ? `${short(100 * value)} %` : short(value));

function drawSummary() {
  const section = byId("summary");
  const found = HEADLINES.filter(([, name]) => RUNS.some((run) => (ends(run, name) || []).slice(0, 2).some((value) => value !== 0)));
  if (RUNS.length > 1) {
    section.append(el("div", { class: "runs" }, RUNS.map((run, r) => {
      const button = el("button", { type: "button", "aria-pressed": "true", title: `Show or hide ${run.folder}`, onclick: () => {
        view.hidden.has(r) ? view.hidden.delete(r) : view.hidden.add(r);
        button.setAttribute("aria-pressed", !view.hidden.has(r));
        redraw();
      } }, swatch(color(r)), run.name);
      return button;
    })));
    section.append(el("div", { class: "card scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, "Start to now"), RUNS.map((run, r) => el("th", { class: "number" }, swatch(color(r)), run.name)))),
      el("tbody", {}, found.map(([label, name]) => el("tr", {}, el("td", {}, label), RUNS.map((run) => {
        const pair = ends(run, name);
        const once = name.startsWith("eval") && known(run.evaluations, name).length === 1;
        return el("td", { class: "number" }, pair ? [once ? "" : `${written(name, pair[0])} → `, el("b", {}, written(name, pair[1]))] : "–");
      })))))));
    return;
  }
  section.append(el("div", { class: "tiles" }, found.map(([label, name]) => {
    const [start, now, n] = ends(RUNS[0], name);
    const span = name.startsWith("eval") ? "first and last evaluation" : n > 1 ? `means of the first and last ${n} reports` : "first and last report";
    const once = name.startsWith("eval") && known(RUNS[0].evaluations, name).length === 1;
    return el("div", { class: "tile card", title: `${name}: ${once ? "the only evaluation" : span}` }, el("div", { class: "name" }, label),
      el("div", { class: "now number" }, written(name, now)), el("div", { class: "before number" }, once ? "one evaluation" : `from ${written(name, start)}`));
  })));
}

// A sentence with its flags set apart, so that no line ends within one.
const withFlags = (text) => text.split(/(--[a-z_]+)/).map((part, i) => (i % 2 ? el("code", {}, part) : part));

function drawWarnings() {
  const body = byId("warnings").querySelector(".body");
  const all = RUNS.flatMap((run) => run.findings.map((finding) => ({ run, finding }))).sort((a, b) => a.finding.ended - b.finding.ended);
  if (!all.length) return body.append(el("p", { class: "note" }, "None of the rules of health found anything to warn about."));
  body.append(...all.map(({ run, finding }) => {
    const { since, last, ended, text, rule } = finding;
    const when = ended || last < run.last_step ? (since === last ? `step ${since}` : `steps ${since} to ${last}`) : `since step ${since}`;
    return el("div", { class: ended ? "warning past" : "warning", "data-rule": rule },
      el("span", { class: "when" }, RUNS.length > 1 ? `${run.name}, ${when}` : when), el("p", {}, withFlags(text)));
  }));
}

function drawEvaluation() {
  const section = byId("evaluation"), names = [...new Set(RUNS.flatMap((run) => Object.keys(run.evaluations.values)))].sort();
  if (!names.length) return section.remove();
  // Scores of rejected answers, and so the mean of all scores of a reward model, are not better for being higher.
  const good = (name) => (/loss|truncated|errors|eval_kl/.test(name) ? -1 : /reward|pass|accuracy/.test(name) && !/std|rejected|reward_mean/.test(name) ? 1 : 0);
  const head = RUNS.map((run, r) => {
    const steps = run.evaluations.steps, title = RUNS.length > 1 ? [swatch(color(r)), run.name, el("br")] : [];
    if (steps.length === 1) return el("th", { class: "number", colspan: 4 }, title, `step ${steps[0]}`);
    return steps.length ? [el("th", { class: "number" }, title, `step ${steps[0]}`), el("th", { class: "number" }, `step ${steps[steps.length - 1]}`), el("th", { class: "number" }, "change"), el("th", { class: "number" }, "best")]
      : el("th", { colspan: 4 }, title, "no evaluation");
  });
  const cells = (run, name) => {
    const values = known(run.evaluations, name);
    if (!values.length) return el("td", { colspan: 4 }, "–");
    if (run.evaluations.steps.length === 1) return el("td", { class: "number", colspan: 4 }, short(values[0]));
    const [first, last] = [values[0], values[values.length - 1]], gain = good(name) * (last - first);
    const best = good(name) ? short(good(name) > 0 ? Math.max(...values) : Math.min(...values)) : "";
    return [short(first), short(last)].map((text) => el("td", { class: "number" }, text)).concat(
      el("td", { class: `number ${gain > 0 ? "better" : gain < 0 ? "worse" : ""}` }, `${last > first ? "+" : ""}${short(last - first)}`), el("td", { class: "number" }, best));
  };
  const once = RUNS.some((run) => run.evaluations.steps.length === 1) ? el("p", { class: "note" }, withFlags("A run was evaluated once only, so nothing shows what changed: --eval_before_training and --eval_steps add evaluations.")) : null;
  fill(section.querySelector(".body"), {}, [once, el("div", { class: "card scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "Metric"), head)),
    el("tbody", {}, names.map((name) => el("tr", {}, el("td", {}, name), RUNS.map((run) => cells(run, name)))))))]);
}

// Share of each ending of an agent's episodes, at the start and now.
const ENDINGS = ["completed", "max_turns", "episode_length", "context_full", "env_truncated", "timeout", "agent_error", "tool_error", "cancelled"];
function drawEndings() {
  const section = byId("endings"), percent = (value) => `${short(100 * value)} %`;
  if (!RUNS.some((run) => ends(run, "agent/completed"))) return section.remove();
  const rows = ENDINGS.map((ending) => [ending, RUNS.map((run) => ends(run, `agent/${ending}`))]).filter(([, of]) => of.some((pair) => pair && (pair[0] || pair[1])));
  fill(section.querySelector(".body"), {}, [el("div", { class: "card scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "Ended as"), RUNS.map((run, r) => [RUNS.length > 1 ? el("th", { class: "number" }, swatch(color(r)), run.name) : el("th", { class: "number" }, "start"), el("th", { class: "number" }, "now")]))),
    el("tbody", {}, rows.map(([ending, of]) => el("tr", {}, el("td", {}, ending), of.map((pair) => [0, 1].map((n) => el("td", { class: "number" }, pair ? percent(pair[n]) : "–"))))))))]);
}

const plain = (value) => (value == null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));

function drawOptions() {
  const section = byId("options"), names = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))];
  if (!names.length) return section.remove();
  const differs = (name) => new Set(RUNS.map((run) => plain(run.config[name]))).size > 1;
  const state = { text: "", different: RUNS.length > 1 };
  const table = el("tbody");
  const draw = () => table.replaceChildren(...names.filter((name) => name.includes(state.text) && (!state.different || differs(name)))
    .map((name) => el("tr", { class: RUNS.length > 1 && differs(name) && !state.different ? "differs" : "" }, el("td", {}, `--${name}`),
      RUNS.map((run) => el("td", { class: "value" }, visible(plain(run.config[name])))))));
  const box = el("input", { type: "checkbox", checked: state.different, id: "only-different", onchange: () => { state.different = box.checked; draw(); } });
  fill(section.querySelector(".body"), {}, [
    el("div", { class: "tools" }, el("input", { type: "search", placeholder: "option", "aria-label": "Name of an option", oninput: (event) => { state.text = event.target.value.replace(/^-+/, ""); draw(); } }),
      RUNS.length > 1 ? el("label", {}, box, " only what differs") : null),
    el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Option"), RUNS.map((run, r) => el("th", {}, RUNS.length > 1 ? swatch(color(r)) : null, RUNS.length > 1 ? run.name : "Value")))), table))]);
  draw();
}

function drawEnvironment() {
  const section = byId("environment");
  const described = RUNS.map((run) => {
    const { packages = {}, ranks = [], ...rest } = run.environment, counts = new Map();
    for (const { host, ...device } of ranks) {
      const text = `${host}: ${Object.entries(device).map(([key, value]) => (key === "device" ? value : `${key} ${value}`)).join(", ")}`;
      counts.set(text, (counts.get(text) || 0) + 1);
    }
    const places = [...counts].map(([text, n]) => (n > 1 ? `${n} × ${text}` : text)).join("\n");
    return { folder: run.folder, ...rest, ...packages, ...(places ? { ranks: places } : {}) };
  });
  const names = [...new Set(described.flatMap((found) => Object.keys(found)))];
  section.querySelector(".body").append(el("div", { class: "card scroll" }, el("table", {}, el("tbody", {},
    names.map((name) => el("tr", {}, el("td", {}, name), described.map((found) => el("td", { class: "value" }, visible(plain(found[name]))))))))));
}

function drawStatus() {
  const when = new Date(DATA.written * 1000).toLocaleString();
  const bad = RUNS.reduce((sum, run) => sum + run.unreadable, 0);
  byId("title").textContent = RUNS.length > 1 ? `${RUNS.length} runs` : RUNS[0].name;
  document.title = RUNS.length > 1 ? `${RUNS.length} runs · OpenPPO` : `${RUNS[0].name} · OpenPPO`;
  const steps = RUNS.map((run) => `${RUNS.length > 1 ? `${run.name}: ` : ""}${run.last_step} steps`).join(", ");
  byId("status").append(`${steps}. Written ${when} by OpenPPO ${DATA.version}.`,
    DATA.running ? " The run went on then: load this page again for newer numbers." : "",
    bad ? ` ${bad} lines of the logs could not be read and are left out.` : "");
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement, now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
for (const draw of [drawStatus, drawSummary, drawWarnings, drawCurves, drawEvaluation, drawEndings, drawSamples, drawOptions, drawEnvironment]) draw();
byId("nav").append(...[...document.querySelectorAll("main section[id]:not(#summary)")].map((section) =>
  el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
// What is jumped to lies below the bar, which has several lines on a phone.
const bar = document.querySelector("header");
new ResizeObserver(() => {
  document.documentElement.style.scrollPaddingTop = `${bar.offsetHeight + 8}px`;
}).observe(bar);
