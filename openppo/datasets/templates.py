"""Values of data columns -> chat messages, text and token ids.

Training sees what generation sees: the tokens before a response come from ``render_prompt``, and every example ends
with one EOS, as a sampled response does.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets.message_parts import media_kind
from openppo.media import Media
from openppo.user_code import TEMPLATE_ERRORS

Message = dict[str, Any]
"""One turn of a chat: "role" and "content", texts; "content" is None only with "tool_calls".

With images or videos it is a list of parts, of which those are ``media_part`` once they have been read."""


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
    """``ValueError`` for messages with images or videos."""
    if any(isinstance(message["content"], list) for message in messages):
        raise ValueError(
            "not a chat message with a text: images are read here in prompts of rows only. Leave it out."
        )


def not_empty(ids: list[int], value: object) -> list[int]:
    """``ids`` of ``value``, or ``ValueError``."""
    if not ids:
        raise ValueError(
            f"the text {shortened(value)} has no tokens. Remove the row or choose another column."
        )
    return ids


def as_messages(
    value: object, role: str | None = None, input_template: str | None = None
) -> list[Message]:
    """``value`` as chat messages; a text becomes one message of ``role``, put into ``input_template`` first.

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
    """``messages`` with each ``function_call`` as a tool call, and each "function" as the tool that answers it."""
    converted, call_id = [], None
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            converted.append(message)
            continue

        turn = dict(message)
        if function := turn.get("function_call"):
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
    named = isinstance(calls, list) and all(
        isinstance(function_of(call).get("name"), str) for call in calls
    )
    may_lack_text = calls or (role in ("assistant", "tool") and "content" in turn)
    if not named or not isinstance(role, str) or (content is None and not may_lack_text):
        form = 'texts "role" and "content", and in "tool_calls" functions with a "name"'
        raise ValueError(f"not a chat message with {form}: {shortened(message)}.")
    if isinstance(content, list) and any(map(media_kind, content)):
        parts = [
            part if media_kind(part) else {"type": "text", "text": text_of([part])}
            for part in content
        ]
        return {**turn, "content": parts}
    return {**turn, "content": None if content is None and calls else text_of(content)}


def text_of(content: object) -> str:
    """Text of a message's content for people: a string, None (empty), or a list of parts, whose texts are joined.

    An image is ``<image>`` in it. ``ValueError`` for any other content.
    """
    parts = content if isinstance(content, list) else ["" if content is None else content]
    texts = [
        f"<{kind}>"
        if (kind := media_kind(part))
        else part.get("text")
        if isinstance(part, dict) and part.get("type", "text") == "text"
        else part
        for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"not a chat message with a text, or a list of texts, as content: {shortened(content)}."
        )
    return "".join(map(str, texts))


def function_of(call: object) -> dict[str, Any]:
    """Name and arguments of a tool call, in OpenAI's form or flat; empty without."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def fill_template(value: object, input_template: str | None) -> str:
    """``value``, a text that is not empty, put into ``input_template`` at ``{}``."""
    text = as_text(value)
    if not text:
        raise ValueError("the text is empty. Remove the row or choose another column.")
    return text if input_template is None else input_template.replace("{}", text)


def encode_start(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the start of a text: with the tokenizer's special tokens, without an EOS at the end."""
    ids: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
    bare = encode_bare(tokenizer, text)
    if (
        ids and ids[-1] == tokenizer.eos_token_id and ids[-1 - len(bare) : -1] == bare
    ):  # no EOS of the text itself
        ids = ids[:-1]
    front = ids[: len(ids) - len(bare)]
    return (
        bare if front and bare[: len(front)] == front else ids
    )  # text that was rendered before has its BOS


def encode_bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the text alone."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def end_with_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """``ids`` with one EOS at the end; whitespace after an EOS, as of chat templates, is cut."""
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
    """Token ids of ``text`` with a token starting at each of the rising positions ``cuts``, and its place in the ids.

    The ids of the whole text are kept, unless the text before a cut, which is all that generation sees, has other ids
    alone: then both sides of that cut are tokenized apart.
    """
    encode = encode_start if add_special_tokens else encode_bare
    ids, places = encode(tokenizer, text), []
    anchors = [] if add_special_tokens or len(cuts) == 1 else _added_tokens(tokenizer, text)
    rest, done = 0, 0  # the character and the token after which the text is tokenized by itself
    for cut in cuts:
        rest, done = max([(rest, done), *(anchor for anchor in anchors if anchor[0] < cut)])
        head = encode(tokenizer, text[rest:cut])
        places.append(done + len(head))
        if ids[done : places[-1]] != head:
            ids = ids[:done] + head + encode_bare(tokenizer, text[cut:])
            rest = cut
            done = places[-1]
            anchors = []
            encode = encode_bare
    return ids, places


def _added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, int]]:
    """Character and token position of each added token, such as "<|im_start|>": text never merges across one."""
    if not tokenizer.is_fast:
        return []  # without character positions, which only costs time
    added = tokenizer.added_tokens_decoder
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = enumerate(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
    return [(start, place) for place, (token, (start, _)) in pairs if token in added]


def apply_template(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    for_generation: bool = False,
    tools: Tools | None = None,
) -> str:
    """Messages as they are, in the tokenizer's chat template; ``render_chat`` makes them what templates expect.

    Raises ``ValueError`` if there is no template or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "--apply_chat_template: the tokenizer has no chat template. Leave the flag out, or use a model whose "
            "tokenizer has one."
        )
    try:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": for_generation}
        options |= {"tools": tools} if tools else {}  # --chat_template_kwargs may name some
        text = str(tokenizer.apply_chat_template(messages, **options))
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template refuses messages with the roles {roles}: {error}"
        ) from error
    text.encode()  # ValueError for half a surrogate pair
    return text


def as_text(value: object) -> str:
    """``value`` if it is a text that can be encoded; else ``ValueError``."""
    if isinstance(value, list):
        raise ValueError("a list of chat messages needs --apply_chat_template.")
    if not isinstance(value, str):
        what = f"not a text but {type(value).__name__}: {shortened(value)}"
        raise ValueError(f"{what}. Correct or remove the row, or choose another column.")
    value.encode()  # ValueError for half a surrogate pair
    return value


def shortened(value: object) -> str:
    """``value`` for a message, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_tools(value: object, key: str) -> Tools | None:
    """Schemas of tools in column ``key``: a list of objects, or that as JSON text; None for none."""
    given: Any = value
    with suppress(ValueError, RecursionError):
        given = json.loads(value) if isinstance(value, str) else value
    given = given or []
    if not isinstance(given, list) or not all(function_of(tool).get("name") for tool in given):
        what = 'a list of objects like {"type": "function", "function": {"name": ...}}, nor one as JSON text'
        raise ValueError(
            f"the tools in column {key!r} are not {what}: {shortened(value)}. Correct the row."
        )
    return given or None


def check_tools(tools: Tools | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse ``tools`` for a chat template that does not write them."""
    if tools and not re.search(r"\btools\b", str(tokenizer.chat_template or "tools")):
        raise ValueError(
            "the chat template writes no tools. Give one that does with --chat_template."
        )


def shared_start(a: str, b: str) -> str:
    """The common beginning."""
    return "".join(
        x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )
