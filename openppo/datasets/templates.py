"""Values of data columns -> chat messages, text and token ids.

Training sees what generation sees: the tokens before a response come from ``render_prompt``, and every example ends
with one EOS, as a sampled response does.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.message_parts import media_kind
from openppo.media import Media
from openppo.user_code import TEMPLATE_ERRORS

Message = dict[str, Any]
"""One turn of a chat: "role" and "content", texts; "content" is None only with "tool_calls".

With images or videos "content" is a list of parts; once read, a ``media_part`` stands for each of them.
"""

Tools = list[dict[str, Any]]
"""Schemas of the tools that a template offers."""


@dataclass(frozen=True)
class TokenExample:
    """Equally long lists: ``loss_mask[t]`` says that token t is a target of the loss.

    The first token is never a target, because nothing comes before it to predict it from. ``media`` as in ``Prompt``.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    media: Media = field(default=(), repr=False)


def require_texts(messages: Sequence[Message]) -> None:
    """Raise ``ValueError`` for messages with images or videos."""
    if any(isinstance(message["content"], list) for message in messages):
        raise ValueError(
            "not a chat message with a text: images are read here in prompts of rows only. Leave it out."
        )


def not_empty(ids: list[int], value: object) -> list[int]:
    """Return the ``ids`` of ``value``; ``ValueError`` if there are none."""
    if not ids:
        raise ValueError(
            f"the text {shortened(value)} has no tokens. Remove the row or choose another column."
        )
    return ids


def as_messages(
    value: object, role: str | None = None, input_template: str | None = None
) -> list[Message]:
    """Read ``value`` as chat messages; a text becomes one message of ``role``, put into ``input_template`` first.

    OpenAI's older ``function_call`` and role "function" become tool calls and their results. Raises ``ValueError`` for
    anything but a text (where ``role`` is given) or a list of messages.
    """
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": fill_template(value, input_template)}]

    if not isinstance(value, list):
        problem = f"neither a text nor a list of chat messages but {type(value).__name__}: {shortened(value)}"
        raise ValueError(f"{problem}. Correct or remove the row, or choose another column.")
    if not value:
        raise ValueError(
            "the list of chat messages is empty. Remove the row or choose another column."
        )
    if input_template is not None:
        raise ValueError(
            "--input_template goes around a text, and this is a list of chat messages. Leave it out."
        )
    return [_as_message(message) for message in _with_tool_calls(value)]


def _with_tool_calls(messages: list[Any]) -> list[Any]:
    """Convert each ``function_call`` to a tool call, and each "function" to the tool that answers it."""
    converted = []
    call_id = None
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            converted.append(message)
            continue

        turn = dict(message)
        function = turn.get("function_call")
        if function:
            if turn.get("tool_calls"):
                raise ValueError(
                    'a message has both "function_call" and "tool_calls". Keep the latter.'
                )
            turn["tool_calls"] = [
                {"id": f"c{number:08d}", "type": "function", "function": function}
            ]
            turn.setdefault("content", None)
            del turn["function_call"]

        calls = turn.get("tool_calls")
        if isinstance(calls, list) and calls and isinstance(calls[-1], dict):
            call_id = calls[-1].get("id")
        if turn.get("role") == "function":
            turn["role"] = "tool"
            if call_id is not None:
                turn.setdefault("tool_call_id", call_id)
        converted.append(turn)
    return converted


def _as_message(message: object) -> Message:
    turn = message if isinstance(message, dict) else {}
    calls = turn.get("tool_calls") or []
    content = turn.get("content")
    role = turn.get("role")
    are_named = isinstance(calls, list) and all(map(_has_name, calls))
    may_lack_text = calls or (role in ("assistant", "tool") and "content" in turn)
    if not are_named or not isinstance(role, str) or (content is None and not may_lack_text):
        form = 'texts "role" and "content", and in "tool_calls" functions with a "name"'
        raise ValueError(f"not a chat message with {form}: {shortened(message)}.")

    if content is None and calls:
        return {**turn, "content": None}
    if isinstance(content, list) and any(map(media_kind, content)):
        parts = []
        for part in content:
            is_media = media_kind(part) is not None
            parts.append(part if is_media else {"type": "text", "text": text_of([part])})
        return {**turn, "content": parts}
    return {**turn, "content": text_of(content)}


def _has_name(call: object) -> bool:
    return isinstance(function_of(call).get("name"), str)


def text_of(content: object) -> str:
    """Text of a message's content for people.

    A content is a string, None (empty), or a list of parts, whose texts are joined; an image becomes ``<image>``.
    Raises ``ValueError`` for any other content.

    >>> text_of([{"type": "image"}, {"type": "text", "text": "Who is it?"}])
    '<image>Who is it?'
    """
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    texts = list(map(_text_of_part, parts))
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"not a chat message with a text, or a list of texts, as content: {shortened(content)}."
        )
    return "".join(map(str, texts))


def _text_of_part(part: object) -> object:
    """Text of a part; the part itself if it has none."""
    kind = media_kind(part)
    if kind is not None:
        return f"<{kind}>"
    if isinstance(part, dict) and part.get("type", "text") == "text":
        return part.get("text")
    return part


def function_of(call: object) -> dict[str, Any]:
    """Name and arguments of a tool call, in OpenAI's form or flat; empty for anything else."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def fill_template(value: object, input_template: str | None) -> str:
    """Put ``value``, a text that is not empty, into ``input_template`` at ``{}``.

    >>> fill_template("2 + 2?", "Question: {}")
    'Question: 2 + 2?'
    """
    text = as_text(value)
    if not text:
        raise ValueError("the text is empty. Remove the row or choose another column.")
    return text if input_template is None else input_template.replace("{}", text)


def encode_start(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode the start of a text: with the tokenizer's special tokens, without an EOS at the end."""
    ids: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
    bare = encode_bare(tokenizer, text)

    # An EOS that the text itself ends in stays.
    ends_in_eos = bool(ids) and ids[-1] == tokenizer.eos_token_id
    if ends_in_eos and ids[-1 - len(bare) : -1] == bare:
        ids = ids[:-1]

    # Text that was rendered before has its BOS.
    front = ids[: len(ids) - len(bare)]
    has_front = len(front) > 0 and bare[: len(front)] == front
    return bare if has_front else ids


def encode_bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode the text alone, without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def end_with_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """End ``ids`` with one EOS; whitespace after an EOS, as chat templates write it, is cut."""
    eos: int | None = tokenizer.eos_token_id
    if eos is None:
        raise ValueError(
            "the tokenizer of --pretrain has no EOS token. Set eos_token in its tokenizer_config.json."
        )
    if eos in ids:
        end = len(ids) - ids[::-1].index(eos)
        if not str(tokenizer.decode(ids[end:])).strip():
            return ids[:end]
    return [*ids, eos]


def encode_cut(
    tokenizer: PreTrainedTokenizerBase, text: str, cuts: Sequence[int], *, add_special_tokens: bool
) -> tuple[list[int], list[int]]:
    """Encode ``text`` so that a token starts at each of the rising positions ``cuts``.

    Returns the ids, and the places of these tokens. The ids of the whole text are kept, unless the text before a
    cut, which is all that generation sees, has other ids alone: then both sides of that cut are tokenized apart.
    """
    encode = encode_start if add_special_tokens else encode_bare
    ids = encode(tokenizer, text)
    places = []

    # The text is tokenized by itself from a start: its position in the text, and in the ids.
    start = (0, 0)
    anchors = []
    if not add_special_tokens and len(cuts) > 1:
        anchors = _added_tokens(tokenizer, text)

    for cut in cuts:
        start = max([start, *(anchor for anchor in anchors if anchor[0] < cut)])
        position, n_before = start
        head = encode(tokenizer, text[position:cut])
        place = n_before + len(head)
        places.append(place)
        if ids[n_before:place] != head:
            ids = ids[:n_before] + head + encode_bare(tokenizer, text[cut:])
            start = (cut, place)
            anchors = []
            encode = encode_bare
    return ids, places


def _added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, int]]:
    """Character and token position of each added token, such as "<|im_start|>": text never merges across one."""
    if not tokenizer.is_fast:
        # There are no character positions; encoding from the start only costs time.
        return []

    added = tokenizer.added_tokens_decoder
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    tokens = zip(encoded["input_ids"], starts, strict=True)
    return [(start, place) for place, (token, start) in enumerate(tokens) if token in added]


def apply_template(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    for_generation: bool = False,
    tools: Tools | None = None,
) -> str:
    """Write messages as they are by the tokenizer's chat template; ``render_chat`` adapts them to it first.

    Raises ``ValueError`` if there is no template or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "--apply_chat_template: the tokenizer has no chat template. Leave the flag out, or use a model whose "
            "tokenizer has one."
        )

    try:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": for_generation}
        # Without tools those of --chat_template_kwargs count, if it names some.
        if tools:
            options["tools"] = tools
        text = str(tokenizer.apply_chat_template(messages, **options))
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template refuses messages with the roles {roles}: {error}"
        ) from error

    text.encode()  # ValueError for half a surrogate pair
    return text


def as_text(value: object) -> str:
    """Return ``value`` if it is a text that can be encoded; else raise ``ValueError``."""
    if isinstance(value, list):
        raise ValueError("a list of chat messages needs --apply_chat_template.")
    if not isinstance(value, str):
        raise ValueError(
            f"not a text but {type(value).__name__}: {shortened(value)}. Correct or remove the row, or choose "
            "another column."
        )
    value.encode()  # ValueError for half a surrogate pair
    return value


def shortened(value: object) -> str:
    """Write ``value`` for a message, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_tools(value: object, key: str) -> Tools | None:
    """Read the schemas of tools in column ``key``: a list of objects, or that as JSON text; None for none."""
    tools: Any = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            tools = json.loads(value)
    if not tools:
        return None

    if not isinstance(tools, list) or not all(function_of(tool).get("name") for tool in tools):
        form = 'a list of objects like {"type": "function", "function": {"name": ...}}, nor one as JSON text'
        raise ValueError(
            f"the tools in column {key!r} are not {form}: {shortened(value)}. Correct the row."
        )
    return tools


def check_tools(tools: Tools | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse ``tools`` for a chat template that does not write them."""
    if tools and not re.search(r"\btools\b", str(tokenizer.chat_template or "tools")):
        raise ValueError(
            "the chat template writes no tools. Give one that does with --chat_template."
        )


def shared_start(a: str, b: str) -> str:
    """Return the common beginning of two texts.

    >>> shared_start("tokens", "tools")
    'to'
    """
    length = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        length += 1
    return a[:length]
