"""Conversations -> text: messages of any client or data set in a tokenizer's chat template."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.templates import (
    Message,
    Tools,
    apply_template,
    shared_start,
    shortened,
    text_of,
)

MARK = "Zq7markqZ"
"""Stand-in for a text that is looked for in a rendering; letters and a digit, which no template changes."""
_SPOILT = ("&#34;", '\\"', "'mark'")
"""Signs of arguments in HTML's escapes, as a text within JSON, or as Python writes a dict."""
_THINK = "<think>"

Render = Callable[..., str]
"""``render_chat`` with its tokenizer and tools."""


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    for_generation: bool = False,
    tools: Tools | None = None,
    content: Callable[[Any], Any] = text_of,
) -> str:
    """Write a conversation in the tokenizer's chat template, BOS included.

    Messages have any of OpenAI's forms. ``for_generation`` opens the assistant's turn. ``content`` converts contents,
    which are strings, lists of texts or null, for the template. The role "developer" becomes "system"; keys that are
    null are left out. The template gets arguments of calls as objects, or as JSON text if it writes only that well, and
    ids of calls as they are, or short ones if it demands them. ``tools`` are offered in OpenAI's form. Raises
    ``ValueError`` if there is no template or it refuses the messages.
    """
    as_text = False
    template = str(tokenizer.chat_template)
    if any(message.get("tool_calls") for message in messages):
        as_text = _wants_text(tokenizer, template)
        if _wants_short_ids(tokenizer, template):
            messages = _with_short_ids(messages)
    written = [_message(message, as_text, content) for message in messages]
    return apply_template(written, tokenizer, for_generation=for_generation, tools=tools)


def render_open(messages: Sequence[Message], render: Render) -> str:
    """Write ``messages`` up to where the model continues: in a new turn, or in the assistant's that they end in.

    Nothing follows the text of such a turn (a prefill), as with ``continue_final_message`` of transformers. If the
    template writes a thought before one that the prefill begins, only the latter stays. ``ValueError`` names a turn
    that the template cannot leave open.
    """
    *before, last = messages
    if last["role"] != "assistant":
        return render(messages, for_generation=True)
    if last.get("tool_calls"):
        raise ValueError(
            f"turn {len(messages)} calls a tool, and no result follows. Add the result or remove the turn."
        )

    prefill = text_of(last.get("content"))
    text, mark, _ = render([*before, {**last, "content": prefill + MARK}]).rpartition(MARK)
    start = text.removesuffix(prefill.lstrip())
    if not mark or (start == text and prefill.strip()):
        raise ValueError(
            f"the chat template cannot leave turn {len(messages)} open, {shortened(prefill)}, for the model to go on. "
            "Remove the turn, or give another template with --chat_template."
        )

    closed = render(before) if before else ""
    thought = start.find(_THINK, len(shared_start(closed, start)))
    if thought >= 0 and prefill.lstrip().startswith(_THINK):
        return start[:thought] + prefill
    return text


def with_answer(messages: Sequence[Message], text: str) -> list[Message]:
    """Add the assistant's ``text``; it continues a turn of the assistant that ``messages`` end in."""
    if messages and messages[-1]["role"] == "assistant":
        *before, last = messages
        return [*before, {**last, "content": text_of(last.get("content")) + text}]
    return [*messages, {"role": "assistant", "content": text}]


@lru_cache(maxsize=8)
def _wants_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """True if the template writes arguments as JSON, or in tags of its own, only if they are texts."""
    tool = example_tool("-")
    written = []
    for as_text in (False, True):
        with suppress(ValueError):
            messages = [_message(message, as_text) for message in example_call(MARK)]
            text = apply_template(messages, tokenizer, tools=[tool])
            if MARK in text and not any(sign in text for sign in _SPOILT):
                written.append(as_text)
    return written == [True]


@lru_cache(maxsize=8)
def _wants_short_ids(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """True if a template, such as Mistral's, refuses ids of calls but those of nine letters and digits."""
    as_text = _wants_text(tokenizer, template)
    accepted = []
    for call_id in ("call_0", _short_id(0)):
        result = {"role": "tool", "content": "-", "tool_call_id": call_id}
        messages = [*example_call("-", call_id), result]
        with suppress(ValueError):
            apply_template([_message(message, as_text) for message in messages], tokenizer)
            accepted.append(call_id)
    return accepted == [_short_id(0)]


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Shorten the ids of calls and of their results.

    Results without an id answer the open calls in order.
    """
    short_ids: dict[Any, str] = {}
    shortened_turns = []
    open_ids: list[str] = []
    for number, message in enumerate(messages):
        turn = dict(message)

        calls = message.get("tool_calls")
        if calls:
            turn["tool_calls"] = []
            for place, call in enumerate(calls):
                call_id = call.get("id")
                new_id = call_id if _is_short(call_id) else _short_id(1000 * number + place)
                short_ids[call_id] = new_id
                open_ids.append(new_id)
                turn["tool_calls"].append({**call, "id": new_id})
        elif message.get("role") == "tool" and open_ids:
            call_id = message.get("tool_call_id")
            new_id = open_ids[0] if call_id is None else short_ids.get(call_id, call_id)
            turn["tool_call_id"] = new_id
            open_ids = [open_id for open_id in open_ids if open_id != new_id]

        shortened_turns.append(turn)
    return shortened_turns


def _is_short(call_id: Any) -> bool:
    return isinstance(call_id, str) and re.fullmatch("[A-Za-z0-9]{9}", call_id) is not None


def _short_id(number: int) -> str:
    return f"c{number:08d}"


def example_call(argument: str, call_id: str = "c00000000") -> list[Message]:
    """A question, and a call of a tool with ``argument``."""
    function = {"name": "f", "arguments": {"mark": argument}}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def example_tool(description: str) -> dict[str, Any]:
    """Schema of the tool that ``example_call`` calls."""
    parameters = {"type": "object", "properties": {"mark": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": "f", "description": description, "parameters": parameters},
    }


def _message(message: Message, as_text: bool, content: Callable[[Any], Any] = text_of) -> Message:
    """Convert a message's content, and the arguments of its calls to JSON text or to objects."""
    converted = {}
    for name, value in message.items():
        if value is not None and name != "tool_calls":
            converted[name] = value

    converted["content"] = content(message.get("content"))
    if converted.get("role") == "developer":
        converted["role"] = "system"
    calls = message.get("tool_calls")
    if calls:
        converted["tool_calls"] = [_call(call, as_text) for call in calls]
    return converted


def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}  # OpenAI's clients write "" for none, Arrow null
    if not as_text:
        arguments = read_arguments(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def read_arguments(arguments: Any) -> Any:
    """Read the arguments of a call from JSON text; anything else stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
