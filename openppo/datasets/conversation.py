"""Conversations with tool calls -> text: messages as any client has them, in the form that a chat template writes."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.templates import Message, render_chat, text_of

MARK = "Zq7markqZ"
"""Stands for what is looked for in a rendering; letters and a digit, which no template changes."""
_SPOILT = ("&#34;", '\\"', "'mark'")
"""Signs that arguments came out in HTML's escapes, as a text within JSON, or as Python writes a dict."""


def render_conversation(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    for_generation: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """``render_chat`` of messages in any of OpenAI's forms.

    Contents are strings or lists of texts, or null; a developer is the system; what is null is left out. Arguments of
    calls are given to the template as objects, or as JSON if that is what it writes well.
    """
    as_text = any(message.get("tool_calls") for message in messages) and _wants_text(tokenizer, _template(tokenizer))
    given = [_message(message, as_text) for message in messages]
    return render_chat(given, tokenizer, for_generation=for_generation, tools=tools)


def writes_calls(tokenizer: PreTrainedTokenizerBase, as_text: bool = False) -> bool:
    """Whether the chat template writes a call with its arguments as JSON, or in tags of its own."""
    call = {"id": "c00000000", "type": "function", "function": {"name": "f", "arguments": {"mark": MARK}}}
    asked = {"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "f", "description": "-", "parameters": {"type": "object"}}}
    try:
        text = render_chat([_message(message, as_text) for message in asked], tokenizer, tools=[tool])
    except ValueError:
        return False
    return MARK in text and not any(sign in text for sign in _SPOILT)


@lru_cache(maxsize=8)
def _wants_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    return not writes_calls(tokenizer) and writes_calls(tokenizer, as_text=True)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.chat_template)


def _message(message: Message, as_text: bool) -> Message:
    """A message with a text as content, and calls with arguments as JSON text or as an object."""
    kept = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    kept |= {"content": text_of(message.get("content"))}
    if kept.get("role") == "developer":
        kept["role"] = "system"
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(call, as_text) for call in calls]
    return kept


def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    try:
        if not as_text and isinstance(arguments, str):
            arguments = json.loads(arguments)
        elif as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass  # a text that is no JSON stays one
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}
