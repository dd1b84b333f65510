"""Conversations with tool calls -> text: messages as any client has them, in the form that a chat template writes."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.templates import Message, Tools, render_chat, text_of

MARK = "Zq7markqZ"
"""Stands for what is looked for in a rendering; letters and a digit, which no template changes."""
_SPOILT = ("&#34;", '\\"', "'mark'")
"""Signs that arguments came out in HTML's escapes, as a text within JSON, or as Python writes a dict."""


def render_conversation(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    for_generation: bool = False,
    tools: Tools | None = None,
    content: Callable[[Any], Any] = text_of,
) -> str:
    """``render_chat`` of messages in any of OpenAI's forms.

    Contents are strings or lists of texts, or null, of which ``content`` makes what the template gets. A developer is
    the system; what is null is left out. Arguments of calls are given to the template as objects, or as JSON if that is
    what it writes well.
    """
    as_text = any(message.get("tool_calls") for message in messages) and _wants_text(
        tokenizer, str(tokenizer.chat_template)
    )
    given = [_message(message, as_text, content) for message in messages]
    return render_chat(given, tokenizer, for_generation=for_generation, tools=tools)


def left_out(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """What of "tools", "calls" and "results" the chat template does not write; all if it refuses them."""
    result = {"role": "tool", "content": f"{MARK} result", "tool_call_id": "c00000000"}
    with suppress(ValueError):
        text = render_conversation([*_calling(f"{MARK} call"), result], tokenizer, tools=[_tool(f"{MARK} tool")])
        return {f"{what}s" for what in ("tool", "call", "result") if f"{MARK} {what}" not in text}
    return {"tools", "calls", "results"}


def _calling(argument: str) -> list[Message]:
    call = {"id": "c00000000", "type": "function", "function": {"name": "f", "arguments": {"mark": argument}}}
    return [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _tool(description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"mark": {"type": "string"}}}
    return {"type": "function", "function": {"name": "f", "description": description, "parameters": parameters}}


@lru_cache(maxsize=8)
def _wants_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the template writes arguments as JSON, or in tags of its own, only if they are texts."""
    written = []
    for as_text in (False, True):
        with suppress(ValueError):
            text = render_chat(
                [_message(message, as_text) for message in _calling(MARK)], tokenizer, tools=[_tool("-")]
            )
            if MARK in text and not any(sign in text for sign in _SPOILT):
                written.append(as_text)
    return written == [True]


def _message(message: Message, as_text: bool, content: Callable[[Any], Any] = text_of) -> Message:
    """A message with a text as content, and calls with arguments as JSON text or as an object."""
    kept = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    kept |= {"content": content(message.get("content"))}
    if kept.get("role") == "developer":
        kept["role"] = "system"
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(call, as_text) for call in calls]
    return kept


def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not as_text:
        arguments = read_arguments(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def read_arguments(arguments: Any) -> Any:
    """Arguments of a call as what they are in JSON; a text that is no JSON stays one."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
