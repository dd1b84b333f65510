"""Conversations -> text: messages as any client or data set has them, in the form that a chat template writes."""

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
"""Stands for what is looked for in a rendering; letters and a digit, which no template changes."""
_SPOILT = ("&#34;", '\\"', "'mark'")
"""Signs that arguments came out in HTML's escapes, as a text within JSON, or as Python writes a dict."""
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
    """The conversation in the tokenizer's chat template, BOS included; ``for_generation`` opens the assistant's turn.

    Messages have any of OpenAI's forms. Contents are strings or lists of texts, or null, of which ``content`` makes
    what the template gets. A developer is the system; what is null is left out. Arguments of calls are given to the
    template as objects, or as JSON if that is what it writes well; ids of calls as they are, or short if it demands
    that. ``tools`` are offered in OpenAI's form. Raises ``ValueError`` if there is no template or it refuses the
    messages.
    """
    as_text, template = False, str(tokenizer.chat_template)
    if any(message.get("tool_calls") for message in messages):
        as_text = _wants_text(tokenizer, template)
        messages = _with_short_ids(messages) if _wants_short_ids(tokenizer, template) else messages
    written = [_message(message, as_text, content) for message in messages]
    return apply_template(written, tokenizer, for_generation=for_generation, tools=tools)


def render_open(messages: Sequence[Message], render: Render) -> str:
    """Text of ``messages`` up to where the model goes on: in a new turn, or in the assistant's that they end in.

    Nothing follows the text of such a turn (a prefill), as with ``continue_final_message`` of transformers; where the
    template writes a thought of its own before one that the prefill begins, only the latter stays. ``ValueError``
    names a turn that the template cannot leave open.
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
    """``messages`` with the assistant's ``text``, which continues a turn of the assistant that they end in."""
    if messages and messages[-1]["role"] == "assistant":
        *before, last = messages
        return [*before, {**last, "content": text_of(last.get("content")) + text}]
    return [*messages, {"role": "assistant", "content": text}]


@lru_cache(maxsize=8)
def _wants_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the template writes arguments as JSON, or in tags of its own, only if they are texts."""
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
    """Test for a template, such as Mistral's, that refuses ids of calls but those of nine letters and digits."""
    as_text = _wants_text(tokenizer, template)
    accepted = []
    for call_id in ("call_0", _short_id(0)):
        result = {"role": "tool", "content": "-", "tool_call_id": call_id}
        with suppress(ValueError):
            apply_template(
                [_message(each, as_text) for each in (*example_call("-", call_id), result)],
                tokenizer,
            )
            accepted.append(call_id)
    return accepted == [_short_id(0)]


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """``messages`` in which calls have short ids, and results those of their calls; without an id, in their order."""
    short: dict[Any, str] = {}
    renamed, open_ids = [], list[str]()
    for number, message in enumerate(messages):
        turn = dict(message)
        if calls := message.get("tool_calls"):
            turn["tool_calls"] = []
            for place, call in enumerate(calls):
                call_id = call.get("id")
                is_short = (
                    isinstance(call_id, str) and re.fullmatch("[A-Za-z0-9]{9}", call_id) is not None
                )
                new_id = call_id if is_short else _short_id(1000 * number + place)
                short[call_id] = new_id
                open_ids.append(new_id)
                turn["tool_calls"].append({**call, "id": new_id})
        elif message.get("role") == "tool" and open_ids:
            asked_id = message.get("tool_call_id")
            new_id = open_ids[0] if asked_id is None else short.get(asked_id, asked_id)
            turn["tool_call_id"] = new_id
            open_ids = [each for each in open_ids if each != new_id]
        renamed.append(turn)
    return renamed


def _short_id(number: int) -> str:
    return f"c{number:08d}"


def example_call(argument: str, call_id: str = "c00000000") -> list[Message]:
    """A question and a call of a tool with ``argument``."""
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": "f", "arguments": {"mark": argument}},
    }
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
    """A message with a text as content, and calls with arguments as JSON text or as an object."""
    kept = {
        name: value for name, value in message.items() if value is not None and name != "tool_calls"
    }
    kept |= {"content": content(message.get("content"))}
    if kept.get("role") == "developer":
        kept["role"] = "system"
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [_call(call, as_text) for call in calls]
    return kept


def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}  # OpenAI's clients write "" for none, Arrow null
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
