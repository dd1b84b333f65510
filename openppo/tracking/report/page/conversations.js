// An episode of an agent: a box for each turn of the model, with its tokens, and one for what was written in between.

const said = (message) => {
  const content = message.content ?? "", text = typeof content === "string" ? content : content.map((part) => part.text ?? "🖼").join("");
  const calls = (message.tool_calls || []).map((call) => { const { name, arguments: given } = call.function || call; return `→ ${name}(${typeof given === "string" ? given : JSON.stringify(given)})`; });
  return [message.reasoning_content && `(thinking) ${message.reasoning_content}`, text, ...calls].filter(Boolean).join("\n");
};

// Pictures of the images in messages.
const shown = (sample, messages) => pictures(messages.flatMap(({ content }) => (Array.isArray(content) ? content : []))
  .map((part) => sample.tokens?.images?.[part.image_url?.url ?? part.video_url?.url]).filter(Boolean));

// Places in the response, of which the middle is not logged where it is long.
const placeOf = (tokens, i) => i + (i >= tokens.texts.length / 2 ? tokens.n_tokens - tokens.texts.length : 0);

function part(kind, title, ...content) {
  return el("div", { class: `turn ${kind}` }, el("div", { class: "role" }, title), content);
}

// [title, whether it is trained on, start, end, messages] of each stretch of tokens after the prompt, from its messages.
function stretches(sample, asked) {
  const { turns: spans, n_tokens: total } = sample.tokens, made = [], between = [[]];
  for (const message of sample.messages.slice(asked)) {
    if (message.role === "assistant") between.push([]);
    else between[between.length - 1].push(message);
  }
  const rolesOf = (messages = []) => messages.map((message) => message.role).join(", ") || "template";
  let end = 0;
  spans.forEach(([start, stop], n) => {
    if (start > end) made.push([rolesOf(between[n]), false, end, start, between[n]]);
    made.push([`turn ${sample.turns - spans.length + n + 1} of the model`, true, start, stop, []]);
    end = stop;
  });
  if (end < total) made.push([rolesOf(between[spans.length]), false, end, total, between[spans.length] || []]);
  return made;
}

function conversationNode(sample, measure) {
  const { messages, tokens } = sample, spans = tokens?.turns || [];
  // The last turns of the model are those of the tokens: what lies before them was read.
  const places = messages.flatMap((message, i) => (message.role === "assistant" ? [i] : []));
  const asked = spans.length ? places[places.length - spans.length] ?? 0 : messages.length;
  const read = messages.slice(0, asked).map((message) => part(message.role === "assistant" && !spans.length ? "model" : "other", message.role,
    el("div", { class: "said" }, visible(said(message))), shown(sample, [message])));
  if (!spans.length) return el("div", { class: "conversation" }, read);
  return el("div", { class: "conversation" }, read, tokenBox(sample, measure, (nodes) => stretches(sample, asked).map(([title, trained, start, end, messages]) => {
    const mine = nodes.filter((_, i) => placeOf(tokens, i) >= start && placeOf(tokens, i) < end), lacking = end - start - mine.length;
    return part(trained ? "model" : "other", [title, el("span", { class: "note" }, trained ? ` · ${end - start} token${end - start === 1 ? "" : "s"}` : " · not trained")],
      el("div", { class: "said" }, mine, lacking > 0 ? gap(lacking) : null), shown(sample, messages));
  })));
}
