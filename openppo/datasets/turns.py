"""A prompt with its response, or a whole conversation -> token ids and their loss mask.

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
"""Keys of a message that are 0 or false if it is not trained on."""
_MARK = "\ue000\ue001\ue000"
"""Text that replaces a turn's to find its place: private characters, which no template changes or writes."""


def render_response(
    prompt: object,
    response: object,
    tokenizer: PreTrainedTokenizerBase,
    options: RowsConfig,
    tools: Tools | None = None,
) -> TokenExample:
    """Encode ``prompt`` and the ``response`` to it, ending with EOS; the response and the EOS are targets.

    ``response`` is a text or, with ``--apply_chat_template``, also a list of messages: the turns after the prompt. The
    assistant's turns are targets, and the first of them continues a turn of the assistant that the prompt ends in. The
    ids before the first target come from ``render_prompt``, unless the template writes the prompt differently once a
    response follows. Raises ``ValueError`` for values of other types.
    """
    if options.apply_chat_template:
        messages = as_messages(prompt, "user", options.input_template)
        turns = [{"role": "assistant", "content": ""}]
        if response != "":
            turns = as_messages(response, "assistant")
        return render_turns(join_turns(messages, turns), tokenizer, tools)

    before = fill_template(prompt, options.input_template)
    text = before + as_text(response)
    ids, places = encode_cut(tokenizer, text, [len(before)], add_special_tokens=True)
    return _with_targets(ids, [(places[0], len(ids))], tokenizer)


def render_whole(
    value: object,
    tokenizer: PreTrainedTokenizerBase,
    options: RowsConfig,
    tools: Tools | None = None,
) -> TokenExample:
    """Encode a whole text, ending with EOS, or with ``--apply_chat_template`` a list of messages.

    All tokens of a text are targets. A chat is cut after the assistant's last turn, and all turns of the assistant are
    targets. Raises ``ValueError`` for an empty text, and for a chat without such a turn.
    """
    if options.apply_chat_template:
        if isinstance(value, str):
            raise ValueError(
                "a whole text cannot be split into chat turns. Leave --apply_chat_template out."
            )
        messages = as_messages(value, input_template=options.input_template)
        return render_turns(Chat(messages), tokenizer, tools)

    text = fill_template(value, options.input_template)
    ids = not_empty(encode_start(tokenizer, text), value)
    # The first token may be a BOS that equals EOS.
    return all_targets(ids[:1] + end_with_eos(tokenizer, ids[1:]))


def all_targets(ids: list[int]) -> TokenExample:
    """Make every token a target except the first, which nothing comes before."""
    return TokenExample(ids, [place > 0 for place in range(len(ids))])


@dataclass(frozen=True)
class Chat:
    """Messages of a chat; the assistant's from number ``first`` on are targets.

    ``continued`` is a prompt that ends in a part of turn ``first``, whose other part is the target, or None.
    """

    messages: list[Message]
    first: int = 0
    continued: list[Message] | None = None

    @property
    def prefill(self) -> str:
        """Part of turn ``first`` that is in the prompt."""
        return text_of(self.continued[-1]["content"]) if self.continued else ""


def join_turns(prompt: list[Message], turns: list[Message]) -> Chat:
    """Join a prompt and the turns after it.

    The first turn continues a turn of the assistant that the prompt ends in.
    """
    *before, last = prompt
    following, *others = turns
    if last["role"] != "assistant" or following["role"] != "assistant" or last.get("tool_calls"):
        return Chat([*prompt, *turns], first=len(prompt))

    begun = {name: value for name, value in last.items() if name not in TRAINING_MARKS}
    content = text_of(last["content"]) + text_of(following["content"])
    joined = {**begun, **following, "content": content}
    return Chat([*before, joined, *others], first=len(before), continued=prompt)


def render_turns(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None,
    render: Render | None = None,
    expand: Expand | None = None,
) -> TokenExample:
    """Encode the conversation up to its last assistant turn, with its targets.

    With images ``render`` writes their places, and ``expand`` puts their tokens there.
    """
    trained = _trained_turns(chat)
    messages = chat.messages[: trained[-1] + 1]
    if expand is None:
        require_texts(messages)
    check_tools(tools, tokenizer)
    # A response after a prompt may be empty.
    for number, message in enumerate(messages[: chat.first or None]):
        require_answer(message, number)

    render = render or partial(render_chat, tokenizer=tokenizer, tools=tools)
    text = render(messages)
    require_read(messages, text, render)

    opening = None if chat.continued is None else render_open(chat.continued, render)
    cuts = []
    for number in trained:
        begun = opening if number == chat.first else None
        start, end = _span_of_turn(
            messages, number, text, tokenizer=tokenizer, render=render, begun=begun
        )
        cuts += [start, end]

        answer = messages[number]
        if begun is not None:
            content = text_of(answer["content"])[len(chat.prefill) :]
            require_whole({**answer, "content": content}, number, text[start:end])
        else:
            # The generation prompt is read too, since it may hold "<think>".
            n_before = _length_of_generation_prompt(messages[:number], render)
            require_whole(answer, number, text[max(0, start - n_before) : end])

    if expand is not None:
        text, cuts = expand(text, cuts=cuts)
    ids, places = encode_cut(tokenizer, text, cuts, add_special_tokens=False)
    spans = list(zip(places[::2], places[1::2], strict=True))
    return _with_targets(ids, spans, tokenizer)


def _trained_turns(chat: Chat) -> list[int]:
    """Numbers of the assistant's turns that are targets; ``ValueError`` if there are none."""
    trained = []
    for number, message in enumerate(chat.messages):
        is_answer = number >= chat.first and message["role"] == "assistant"
        if is_answer and _is_trained(message, number):
            trained.append(number)
    if not trained:
        raise ValueError(
            "no turn of the assistant to train on. Remove the row or choose another column."
        )
    return trained


def _length_of_generation_prompt(messages: list[Message], render: Render) -> int:
    """Number of characters that the template adds after ``messages`` for generation."""
    if not messages:
        return 0
    opened = render(messages, for_generation=True)
    closed = render(messages, for_generation=False)
    return len(opened) - len(shared_start(opened, closed))


def _is_trained(message: Message, number: int) -> bool:
    """True if no mark excludes a turn, at place ``number``, from training."""
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
    """Make the tokens in the ``spans`` targets; the last span becomes the end of ``ids``, closed by EOS."""
    last, _ = spans[-1]
    ids = ids[:last] + end_with_eos(tokenizer, ids[last:])

    targets: set[int] = set()
    for start, end in [*spans[:-1], (last, len(ids))]:
        targets.update(range(start, end))
    targets.discard(0)
    return TokenExample(ids, [place in targets for place in range(len(ids))])


def _span_of_turn(
    messages: list[Message],
    number: int,
    text: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    render: Render,
    begun: str | None,
) -> tuple[int, int]:
    """Find start and end of turn ``number`` of the assistant in ``text``, the rendering of ``messages``.

    ``begun`` is the text up to where a turn that the prompt begins is continued.
    """
    is_last = number == len(messages) - 1
    prompt = begun
    if prompt is None:
        prompt = render(messages[:number], for_generation=True) if number > 0 else ""
    continues = prompt != "" and text.startswith(prompt)
    if begun is not None and not continues:
        raise ValueError(
            f"the chat template writes turn {number + 1} otherwise once it is whole, so the assistant's turn that the "
            "prompt ends in cannot be continued. Remove it from the prompt, or use another template."
        )
    if continues and is_last:
        return len(prompt), len(text)

    before, mark, after = _around(messages, number, render)
    is_around = text.startswith(before) and text.endswith(after)
    if not mark or not is_around or len(before) + len(after) > len(text):
        require_whole(messages[number], number, text)
        raise ValueError(
            f"the chat template's text around turn {number + 1} depends on its text, or the turn is left out, so its "
            "tokens cannot be found. Leave --apply_chat_template out and use --input_template, or another template."
        )

    if continues:
        start = len(prompt)
    elif _only_calls(messages[number]):
        # The mark is inside the call.
        start = len(shared_start(prompt, text))
    else:
        # The response begins with the whitespace that the prompt does not end in.
        start = len(before)
        spaces = _trailing_space(before)
        prompt_spaces = _trailing_space(prompt)
        if prompt and spaces.startswith(prompt_spaces):
            start -= len(spaces) - len(prompt_spaces)

    end = len(text)
    if not is_last:
        end -= len(after)
        end += _length_of_end(messages, number, after, tokenizer=tokenizer, render=render)
    return start, end


def _trailing_space(text: str) -> str:
    return text[len(text.rstrip()) :]


def _around(messages: list[Message], number: int, render: Render) -> tuple[str, str, str]:
    """Divide the template's text at the mark of turn ``number``: before, the mark (if it is there), and after.

    The mark replaces the text of the turn, or the name of the first tool of a turn that only calls tools.
    """
    turn = messages[number]
    marked = {**turn, "content": _MARK}
    if _only_calls(turn):
        first, *others = turn["tool_calls"]
        marked = {**turn, "tool_calls": [renamed(first, _MARK), *others]}
    rendered = render([*messages[:number], marked, *messages[number + 1 :]])
    return rendered.partition(_MARK)


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
    # A token may be shared in part: "<|end|><|" by "<|end|><|user|>" and "<|end|><|endoftext|>".
    head = encode_bare(tokenizer, after[:length])
    while head != ids[: len(head)]:
        length -= 1
        head = encode_bare(tokenizer, after[:length])
    return len(after[:length].rstrip()) or length
