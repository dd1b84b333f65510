"""Checks of what a chat template writes, so that nothing is trained or sampled without what was in the data."""

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


def require_read(messages: Sequence[Message], rendered: str, render: Render) -> None:
    """Refuse a chat whose text ``rendered`` lacks a message: its text, or a tool that it calls.

    A template may skip roles that it does not know. In a second rendering a mark stands for each text and each called
    tool, so that no message is taken for another; an assistant's thoughts, which many templates drop from earlier
    turns, do not count.
    """
    squeezed = _squeezed(rendered)
    witness = _with_marks(messages, render)
    for number, message in enumerate(messages):
        texts = _texts(message)
        names = [function_of(call)["name"] for call in message.get("tool_calls") or []]
        if witness is None:
            lost_texts = [text for text in texts if not _occurs(text, squeezed)]
            lost_calls = [name for name in names if not _occurs(name, squeezed)]
        else:
            lost_texts = texts if _text_mark(number) not in witness else []
            lost_calls = [
                name for place, name in enumerate(names) if _call_mark(number, place) not in witness
            ]
            if message["role"] != "assistant":
                lost_texts = lost_texts or [text for text in texts if not _occurs(text, squeezed)]

        if lost_texts:
            raise _left_out(message, number, lost_texts[0])
        if lost_calls:
            raise ValueError(
                f"the chat template leaves out what {_turn(message, number)}, calls: {shortened(lost_calls[0])}. Give "
                "a template that writes calls of tools with --chat_template."
            )


def require_shown(messages: Sequence[Message], render: Render) -> None:
    """Refuse a request of which the template skips a message that is not the assistant's."""
    witness = _with_marks(messages, render)
    for number, message in enumerate(messages):
        texts = _texts(message)
        if (
            message["role"] != "assistant"
            and texts
            and witness is not None
            and _text_mark(number) not in witness
        ):
            raise _left_out(message, number, texts[0])


def _left_out(message: Message, number: int, text: str) -> ValueError:
    return ValueError(
        f"the chat template leaves out {_turn(message, number)}: {shortened(text)}. Use a role that it writes (most "
        "write system, user, assistant and tool), or another template with --chat_template."
    )


def _turn(message: Message, number: int) -> str:
    return f"turn {number + 1}, of the role {message['role']!r}"


def _with_marks(messages: Sequence[Message], render: Render) -> str | None:
    """The chat with a mark for each text and each called tool; None if the template reads them, and refuses marks."""
    try:
        return render([_marked(message, number) for number, message in enumerate(messages)])
    except ValueError:
        return None


def require_answer(message: Message, number: int) -> None:
    """Refuse a turn of the assistant with neither a text nor a call."""
    has_thoughts = any(message.get(name) for name in _REASONING)
    if message["role"] == "assistant" and not (
        message.get("content") or message.get("tool_calls") or has_thoughts
    ):
        raise ValueError(
            f"turn {number + 1}, of the assistant, has neither a text nor a call. Remove it or the row."
        )


def require_whole(message: Message, number: int, rendered: str) -> None:
    """Refuse a rendering that lacks content, reasoning or a called tool of ``message``; blanks do not count."""
    values = (message.get(name) for name in ("content", *_REASONING))
    parts = [value for value in values if isinstance(value, str)]
    parts += [function_of(call)["name"] for call in message.get("tool_calls") or []]
    squeezed = _squeezed(rendered)
    for text in parts:
        if not _occurs(text, squeezed):
            raise ValueError(
                f"the chat template leaves out part of turn {number + 1}, {shortened(text)}, so it would not be "
                "trained on. Use another template, or leave --apply_chat_template out and use --input_template."
            )


def left_out(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Those of "tools", "calls" and "results" that the chat template does not write; all if it refuses them."""
    result = {"role": "tool", "content": f"{MARK} result", "tool_call_id": "c00000000"}
    with suppress(ValueError):
        messages = [*example_call(f"{MARK} call"), result]
        text = render_chat(messages, tokenizer, tools=[example_tool(f"{MARK} tool")])
        return {f"{part}s" for part in ("tool", "call", "result") if f"{MARK} {part}" not in text}
    return {"tools", "calls", "results"}


def name_rendered(
    prompts: Iterable[object], tokenizer: PreTrainedTokenizerBase, source: str
) -> None:
    """Warn, once, if texts among ``prompts`` begin as the chat template begins, which is applied to them again."""
    beginnings = _beginnings(tokenizer)
    rendered = [
        text for text in prompts if isinstance(text, str) and text.lstrip().startswith(beginnings)
    ]
    if rendered:
        logger.warning(
            "%s: %d prompts are rendered already, such as %s, and the chat template is applied to them again: leave "
            "--apply_chat_template out",
            *(source, len(rendered), shortened(rendered[0])),
        )


def _beginnings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Beginnings of what the chat template writes: all before a user's text, and each token in front of that."""
    try:
        text, _, _ = render_chat([{"role": "user", "content": MARK}], tokenizer).partition(MARK)
    except ValueError:
        return ()
    beginnings = [text.strip()]
    added = sorted(
        (token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True
    )
    while token := next((token for token in added if text.startswith(token)), None):
        beginnings.append(token)
        text = text.removeprefix(token).lstrip()
    return tuple(filter(None, beginnings))


def _marked(message: Message, number: int) -> Message:
    """``message`` with marks for its text and the names of the tools that it calls; images stay."""
    marked = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        images = [part for part in content if media_kind(part)]
        text = [{"type": "text", "text": _text_mark(number)}] if _texts(message) else []
        marked["content"] = [*images, *text]
    elif content:
        marked["content"] = _text_mark(number)
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            renamed(call, _call_mark(number, place)) for place, call in enumerate(calls)
        ]
    return marked


def renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    """``call`` of a tool called ``name``."""
    function = {**function_of(call), "name": name}
    return {**call, "function": function} if "function" in call else function


def _text_mark(number: int) -> str:
    return f"{MARK}{number}t"


def _call_mark(number: int, place: int) -> str:
    return f"{MARK}{number}c{place}t"


def _texts(message: Message) -> list[str]:
    """Texts of a message, those between images apart, without blank ones."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [text_of([part]) for part in parts if part is not None and not media_kind(part)]
    return [text for text in texts if text.strip()]


def _occurs(text: str, squeezed: str) -> bool:
    """Test for ``text``, as it is or in JSON, in a rendering without blanks."""
    return any(
        _squeezed(form) in squeezed for form in (text, json.dumps(text, ensure_ascii=False)[1:-1])
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())
