"""Checks of a chat template, so that nothing in the data is left out of training or sampling."""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.datasets.conversation import MARK, Render, example_call, example_tool, render_chat
from openppo.datasets.message_parts import media_kind
from openppo.datasets.templates import Message, function_of, shortened, text_of

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's thoughts."""


def require_read(messages: Sequence[Message], rendered: str, render: Render) -> None:
    """Refuse a chat whose text ``rendered`` lacks a message: its text, or a tool that it calls.

    A template may skip roles that it does not know. In a second rendering a mark stands for each text and each called
    tool, so that no message is taken for another; an assistant's thoughts, which many templates drop from earlier
    turns, do not count.
    """
    squeezed = _squeezed(rendered)
    with_marks = _with_marks(messages, render)
    for number, message in enumerate(messages):
        texts = _texts(message)
        names = _called(message)
        if with_marks is None:
            lost_texts = _missing(texts, squeezed)
            lost_calls = _missing(names, squeezed)
        else:
            lost_texts = texts if _text_mark(number) not in with_marks else []
            if message["role"] != "assistant":
                lost_texts = lost_texts or _missing(texts, squeezed)
            lost_calls = [
                name
                for place, name in enumerate(names)
                if _call_mark(number, place) not in with_marks
            ]

        if lost_texts:
            raise _left_out(message, number, lost_texts[0])
        if lost_calls:
            raise ValueError(
                f"the chat template leaves out what {_turn(message, number)}, calls: {shortened(lost_calls[0])}. Give "
                "a template that writes calls of tools with --chat_template."
            )


def require_shown(messages: Sequence[Message], render: Render) -> None:
    """Refuse a request of which the template skips a message that is not the assistant's."""
    with_marks = _with_marks(messages, render)
    for number, message in enumerate(messages):
        texts = _texts(message)
        if message["role"] == "assistant" or not texts or with_marks is None:
            continue
        if _text_mark(number) not in with_marks:
            raise _left_out(message, number, texts[0])


def _left_out(message: Message, number: int, text: str) -> ValueError:
    return ValueError(
        f"the chat template leaves out {_turn(message, number)}: {shortened(text)}. Use a role that it writes (most "
        "write system, user, assistant and tool), or another template with --chat_template."
    )


def _turn(message: Message, number: int) -> str:
    return f"turn {number + 1}, of the role {message['role']!r}"


def _with_marks(messages: Sequence[Message], render: Render) -> str | None:
    """Render the chat with a mark for each text and each called tool; None if the template refuses marks."""
    try:
        return render([_marked(message, number) for number, message in enumerate(messages)])
    except ValueError:
        return None


def require_answer(message: Message, number: int) -> None:
    """Refuse a turn of the assistant with neither a text nor a call."""
    keys = ("content", "tool_calls", *_REASONING)
    if message["role"] == "assistant" and not any(message.get(key) for key in keys):
        raise ValueError(
            f"turn {number + 1}, of the assistant, has neither a text nor a call. Remove it or the row."
        )


def require_whole(message: Message, number: int, rendered: str) -> None:
    """Refuse a rendering that lacks content, reasoning or a called tool of ``message``; blanks do not count."""
    values = (message.get(name) for name in ("content", *_REASONING))
    texts = [value for value in values if isinstance(value, str)]
    squeezed = _squeezed(rendered)
    for text in [*texts, *_called(message)]:
        if not _occurs(text, squeezed):
            raise ValueError(
                f"the chat template leaves out part of turn {number + 1}, {shortened(text)}, so it would not be "
                "trained on. Use another template, or leave --apply_chat_template out and use --input_template."
            )


def left_out(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Set of "tools", "calls" and "results", as far as the chat template leaves them out; all if it refuses them."""
    result = {"role": "tool", "content": f"{MARK} result", "tool_call_id": "c00000000"}
    with suppress(ValueError):
        messages = [*example_call(f"{MARK} call"), result]
        text = render_chat(messages, tokenizer, tools=[example_tool(f"{MARK} tool")])
        return {f"{part}s" for part in ("tool", "call", "result") if f"{MARK} {part}" not in text}
    return {"tools", "calls", "results"}


def name_rendered(
    prompts: Iterable[object], tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    """Warn, once, of texts among ``prompts`` that the chat template has written already."""
    beginnings = _beginnings(tokenizer)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    rendered = [text for text in texts if text.lstrip().startswith(beginnings)]
    if rendered:
        logger.warning(
            "%s: %d prompts are rendered already, such as %s, and the chat template is applied to them again: leave "
            "--apply_chat_template out",
            source,
            len(rendered),
            shortened(rendered[0]),
        )


def _beginnings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Beginnings of a rendered chat: all text before a user's, and each token in front of it."""
    try:
        rendered = render_chat([{"role": "user", "content": MARK}], tokenizer)
    except ValueError:
        return ()
    text, _, _ = rendered.partition(MARK)
    beginnings = [text.strip()]

    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    added.sort(key=len, reverse=True)
    while True:
        token = next((token for token in added if text.startswith(token)), None)
        if not token:
            break
        beginnings.append(token)
        text = text.removeprefix(token).lstrip()
    return tuple(filter(None, beginnings))


def _marked(message: Message, number: int) -> Message:
    """Put marks for the text of ``message`` and the names of the tools that it calls; images stay."""
    marked = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        images = [part for part in content if media_kind(part)]
        text = [{"type": "text", "text": _text_mark(number)}] if _texts(message) else []
        marked["content"] = [*images, *text]
    elif content:
        marked["content"] = _text_mark(number)

    calls = message.get("tool_calls")
    if calls:
        marks = (_call_mark(number, place) for place in range(len(calls)))
        marked["tool_calls"] = list(map(renamed, calls, marks))
    return marked


def renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    """Make ``call`` one of a tool ``name``."""
    function = {**function_of(call), "name": name}
    return {**call, "function": function} if "function" in call else function


def _called(message: Message) -> list[str]:
    """Names of the tools that a message calls."""
    return [function_of(call)["name"] for call in message.get("tool_calls") or []]


def _text_mark(number: int) -> str:
    return f"{MARK}{number}t"


def _call_mark(number: int, place: int) -> str:
    return f"{MARK}{number}c{place}t"


def _texts(message: Message) -> list[str]:
    """Texts of a message, those between images apart, without blank ones."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    parts = [part for part in parts if part is not None and not media_kind(part)]
    texts = [text_of([part]) for part in parts]
    return [text for text in texts if text.strip()]


def _missing(texts: Sequence[str], squeezed: str) -> list[str]:
    """List the ``texts`` that are not in a rendering without blanks."""
    return [text for text in texts if not _occurs(text, squeezed)]


def _occurs(text: str, squeezed: str) -> bool:
    """True if ``text``, as it is or in JSON, is in a rendering without blanks."""
    if _squeezed(text) in squeezed:
        return True
    in_json = json.dumps(text, ensure_ascii=False)[1:-1]
    return _squeezed(in_json) in squeezed


def _squeezed(text: str) -> str:
    """Remove all blanks."""
    return "".join(text.split())
