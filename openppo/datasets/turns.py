"""Prompt with response, or a whole conversation -> token ids and their loss mask.

The whole rendering is tokenized. A turn of the assistant begins where a generation prompt ends, and includes its end:
the EOS or another token of the template, without whitespace after it. Comparing renderings finds these places exactly
for any chat template that puts the text of a turn in one place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from openppo.config import RowsConfig
from openppo.datasets.conversation import Render, render_chat, render_open
from openppo.datasets.template_checks import renamed, require_answer, require_read, require_whole
from openppo.datasets.templates import (
    Message,
    TokenExample,
    Tools,
    as_messages,
    as_text,
    check_tools,
    encode_bare,
    encode_cut,
    encode_start,
    end_with_eos,
    fill_template,
    not_empty,
    require_texts,
    shared_start,
    shortened,
    text_of,
)

Expand = Callable[..., tuple[str, list[int]]]
"""``Vision.expanded`` with the images of a row."""

TRAINING_MARKS = ("weight", "train", "trainable", "loss_mask")
"""Keys of a message that are 0 or false where it is not trained."""
_MARK = "\ue000\ue001\ue000"
"""Replaces a turn's text to find its place: private characters, which no template changes or writes."""


def render_response(
    prompt: object,
    response: object,
    tokenizer: PreTrainedTokenizerBase,
    options: RowsConfig,
    tools: Tools | None = None,
) -> TokenExample:
    """Token ids of ``prompt`` and the ``response`` to it, ending with EOS; the response and the EOS are targets.

    ``response`` is a text or, with ``--apply_chat_template``, also a list of messages: the turns after the prompt, of
    which the assistant's are targets, the first of them continuing a turn of the assistant that the prompt ends in. The
    ids before the first target come from ``render_prompt``, unless the template writes the prompt differently once a
    response follows. Raises ``ValueError`` for values of other types.
    """
    if options.apply_chat_template:
        asked = as_messages(prompt, "user", options.input_template)
        turns = (
            as_messages(response, "assistant")
            if response != ""
            else [{"role": "assistant", "content": ""}]
        )
        return render_turns(join_turns(asked, turns), tokenizer, tools)
    before = fill_template(prompt, options.input_template)
    ids, (start,) = encode_cut(
        tokenizer, before + as_text(response), [len(before)], add_special_tokens=True
    )
    return _with_targets(ids, [(start, len(ids))], tokenizer)


def render_whole(
    value: object,
    tokenizer: PreTrainedTokenizerBase,
    options: RowsConfig,
    tools: Tools | None = None,
) -> TokenExample:
    """Token ids of a whole text, ending with EOS, or with ``--apply_chat_template`` of a list of messages.

    All of a text are targets; of a chat, which is cut after the assistant's last turn, all turns of the assistant.
    Raises ``ValueError`` for an empty text, and for a chat without such a turn.
    """
    if options.apply_chat_template:
        if isinstance(value, str):
            raise ValueError(
                "a whole text cannot be split into chat turns. Leave --apply_chat_template out."
            )
        return render_turns(
            Chat(as_messages(value, input_template=options.input_template)), tokenizer, tools
        )
    ids = not_empty(encode_start(tokenizer, fill_template(value, options.input_template)), value)
    return all_targets(
        ids[:1] + end_with_eos(tokenizer, ids[1:])
    )  # the first token may be a BOS that equals EOS


def all_targets(ids: list[int]) -> TokenExample:
    """Every token is a target except the first, which nothing comes before."""
    return TokenExample(ids, [t > 0 for t in range(len(ids))])


@dataclass(frozen=True)
class Chat:
    """Messages, of which the assistant's from number ``first`` on are targets.

    ``continued`` is the prompt that ends in a part of turn ``first``, whose other part is the target; None: there is
    none.
    """

    messages: list[Message]
    first: int = 0
    continued: list[Message] | None = None

    @property
    def prefill(self) -> str:
        """The part of turn ``first`` that is in the prompt."""
        return text_of(self.continued[-1]["content"]) if self.continued else ""


def join_turns(asked: list[Message], turns: list[Message]) -> Chat:
    """A prompt and the turns after it; the first continues a turn of the assistant that the prompt ends in."""
    *before, last = asked
    following, *others = turns
    if last["role"] != "assistant" or following["role"] != "assistant" or last.get("tool_calls"):
        return Chat([*asked, *turns], first=len(asked))
    begun = {name: value for name, value in last.items() if name not in TRAINING_MARKS}
    joined = {
        **begun,
        **following,
        "content": text_of(last["content"]) + text_of(following["content"]),
    }
    return Chat([*before, joined, *others], first=len(before), continued=asked)


def render_turns(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None,
    render: Render | None = None,
    expand: Expand | None = None,
) -> TokenExample:
    """The conversation up to its last assistant turn, with its targets.

    With images ``render`` writes their places, and ``expand`` puts their tokens there.
    """
    answers = [
        i for i in range(chat.first, len(chat.messages)) if chat.messages[i]["role"] == "assistant"
    ]
    chosen = [i for i in answers if _is_trained(chat.messages[i], i)]
    if not chosen:
        raise ValueError(
            "no turn of the assistant to train on. Remove the row or choose another column."
        )
    messages = chat.messages[: chosen[-1] + 1]
    if expand is None:
        require_texts(messages)
    check_tools(tools, tokenizer)
    for number, message in enumerate(
        messages[: chat.first or None]
    ):  # a response after a prompt may be empty
        require_answer(message, number)

    render = render or partial(render_chat, tokenizer=tokenizer, tools=tools)
    text = render(messages)
    require_read(messages, text, render)
    opening = None if chat.continued is None else render_open(chat.continued, render)
    spans = []
    for i in chosen:
        begun = opening if i == chat.first else None
        start, end = _span_of_turn(
            messages, i, text, tokenizer=tokenizer, render=render, begun=begun
        )
        spans.append((start, end))
        if begun is not None:
            answer = text_of(messages[i]["content"])[len(chat.prefill) :]
            require_whole({**messages[i], "content": answer}, i, text[start:end])
            continue
        before = messages[:i]
        asked, closed = (render(before, for_generation=g) if before else "" for g in (True, False))
        opened = len(asked) - len(
            shared_start(asked, closed)
        )  # the generation prompt, which may hold "<think>"
        require_whole(messages[i], i, text[max(0, start - opened) : end])

    cuts = [border for span in spans for border in span]
    text, cuts = (text, cuts) if expand is None else expand(text, cuts=cuts)
    ids, places = encode_cut(tokenizer, text, cuts, add_special_tokens=False)
    return _with_targets(ids, list(zip(places[::2], places[1::2], strict=True)), tokenizer)


def _is_trained(message: Message, number: int) -> bool:
    """Test for a turn, at place ``number``, that no mark excludes from training."""
    values = {name: message[name] for name in TRAINING_MARKS if message.get(name) is not None}
    for name, value in values.items():
        if not isinstance(value, (int, float)) or value not in (0, 1):
            raise ValueError(
                f"{name!r} of turn {number + 1} is neither 0 nor 1: {shortened(value)}. Correct the row."
            )
    return all(values.values())


def _with_targets(
    ids: list[int], spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> TokenExample:
    """``ids``, of which the last span becomes the end, closed by EOS; the tokens in the spans are targets."""
    last, _ = spans[-1]
    ids = ids[:last] + end_with_eos(tokenizer, ids[last:])
    targets = {t for start, end in [*spans[:-1], (last, len(ids))] for t in range(start, end)}
    return TokenExample(ids, [t in targets and t > 0 for t in range(len(ids))])


def _span_of_turn(
    messages: list[Message],
    number: int,
    text: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    render: Render,
    begun: str | None,
) -> tuple[int, int]:
    """Start and end of turn ``number`` of the assistant in ``text``, the rendering of ``messages``.

    ``begun`` is the text up to where a turn that the prompt begins is continued.
    """
    is_last = number == len(messages) - 1
    asked = begun
    if asked is None:
        asked = render(messages[:number], for_generation=True) if number > 0 else ""
    continues = asked != "" and text.startswith(asked)
    if begun is not None and not continues:
        raise ValueError(
            f"the chat template writes turn {number + 1} otherwise once it is whole, so the assistant's turn that the "
            "prompt ends in cannot be continued. Remove it from the prompt, or use another template."
        )
    if continues and is_last:
        return len(asked), len(text)

    before, mark, after = _around(messages, number, render)
    if not (
        mark
        and text.startswith(before)
        and text.endswith(after)
        and len(before) + len(after) <= len(text)
    ):
        require_whole(messages[number], number, text)
        raise ValueError(
            f"the chat template's text around turn {number + 1} depends on its text, or the turn is left out, so its "
            "tokens cannot be found. Leave --apply_chat_template out and use --input_template, or another template."
        )
    if continues:
        start = len(asked)
    elif _only_calls(messages[number]):
        start = len(shared_start(asked, text))  # the mark is inside the call
    else:
        start = len(before)
        spaces, known = before[len(before.rstrip()) :], asked[len(asked.rstrip()) :]
        if asked and spaces.startswith(known):
            start -= len(spaces) - len(known)  # the response begins with the rest of the whitespace
    end = (
        len(text)
        if is_last
        else len(text)
        - len(after)
        + _length_of_end(messages, number, after, tokenizer=tokenizer, render=render)
    )
    return start, end


def _around(messages: list[Message], number: int, render: Render) -> tuple[str, str, str]:
    """The template's text before and after turn ``number``, and the mark between if it is there.

    The mark replaces the text of the turn, or the name of the first tool of a turn that only calls tools.
    """
    turn = messages[number]
    marked = {**turn, "content": _MARK}
    if _only_calls(turn):
        first, *others = turn["tool_calls"]
        marked = {**turn, "tool_calls": [renamed(first, _MARK), *others]}
    return render([*messages[:number], marked, *messages[number + 1 :]]).partition(_MARK)


def _only_calls(message: Message) -> bool:
    return not message["content"] and bool(message.get("tool_calls"))


def _length_of_end(
    messages: list[Message],
    number: int,
    after: str,
    tokenizer: PreTrainedTokenizerBase,
    render: Render,
) -> int:
    """Length of the beginning of ``after`` that ends turn ``number``, in whole tokens.

    It is the common beginning of ``after`` and the end of a conversation that stops here.
    """
    _, _, at_the_end = _around(messages[: number + 1], number, render)
    ids = encode_bare(tokenizer, after[: len(at_the_end) + 64])
    length = len(shared_start(after, at_the_end))
    while (head := encode_bare(tokenizer, after[:length])) != ids[: len(head)]:
        length -= 1  # "<|end|><|" may be in common, of "<|end|><|user|>" and "<|end|><|endoftext|>"
    return len(after[:length].rstrip()) or length
