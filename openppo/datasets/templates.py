"""Values of data columns -> text and token ids, by template.

Training sees what generation sees: the tokens before a response come from ``render_prompt``, and every example ends
with one EOS, as a sampled response does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from openppo.user_code import TEMPLATE_ERRORS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS_PER_TOKEN = 16
"""More than texts have on average."""
_LARGE = 2**20
"""Characters above which the length of a row is checked before it is rendered."""

Message = dict[str, Any]
"""One turn of a chat: "role" and "content", texts; "content" is None only with "tool_calls"."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's reasoning in data."""
_CAN_BE_WITHOUT_TEXT = ("assistant", "tool")


@dataclass(frozen=True)
class TokenExample:
    """Equally long lists: ``loss_mask[t]`` says that token t is a target of the loss.

    The first token is never a target, because nothing comes before it to predict it from.
    """

    token_ids: list[int]
    loss_mask: list[bool]

    def __post_init__(self) -> None:
        lengths = len(self.token_ids), len(self.loss_mask)
        assert lengths[0] == lengths[1], f"lists of unequal length {lengths}"


def render_prompt(
    value: object,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_template: str | None,
    apply_chat_template: bool,
) -> tuple[str, list[int]]:
    """Text and token ids of a prompt, as generation starts from them: no EOS after it, one BOS at most.

    ``value`` is a text (put into ``input_template`` at ``{}``) or, with ``apply_chat_template``, also a list of chat
    messages. Raises ``ValueError`` for any other value, an empty one, or one that renders to no tokens.
    """
    if apply_chat_template:
        messages = as_messages(value, "user", input_template)
        if not any(message["content"] or message.get("tool_calls") for message in messages):
            raise ValueError("all chat messages are empty. Remove the row or choose another column.")
        text = render_chat(messages, tokenizer, for_generation=True)
        ids = encode_bare(tokenizer, text)
    else:
        text = fill_template(value, input_template)
        ids = encode_start(tokenizer, text)
    if not ids:
        raise ValueError(f"the prompt {shortened(value)} has no tokens. Remove the row or choose another column.")
    return text, ids


def render_whole(
    value: object,
    tokenizer: PreTrainedTokenizerBase,
    *,
    input_template: str | None,
    apply_chat_template: bool,
) -> list[int]:
    """Token ids of a whole text or, with ``apply_chat_template``, of a whole conversation; they end with EOS."""
    if apply_chat_template:
        if isinstance(value, str):
            raise ValueError(
                "a whole text cannot be split into chat turns. Leave --apply_chat_template out, or give a list of "
                "messages."
            )
        messages = as_messages(value)
        text = render_chat(messages, tokenizer)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                require_whole(message, number, text)
        ids = encode_bare(tokenizer, text)
    else:
        ids = encode_start(tokenizer, fill_template(value, input_template))
    if not ids:
        raise ValueError(f"the text {shortened(value)} has no tokens. Remove the row or choose another column.")
    return ids[:1] + end_with_eos(tokenizer, ids[1:])  # the first token may be a BOS that equals EOS


def as_messages(value: object, role: str | None = None, input_template: str | None = None) -> list[Message]:
    """``value`` as chat messages; a text becomes one message of ``role``, put into ``input_template`` first.

    Raises ``ValueError`` for anything but a text (where ``role`` is given) or a list of messages.
    """
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": fill_template(value, input_template)}]
    if not isinstance(value, list):
        raise ValueError(
            f"neither a text nor a list of chat messages but {type(value).__name__}: {shortened(value)}. Correct or "
            "remove the row, or choose another column."
        )
    if not value:
        raise ValueError("the list of chat messages is empty. Remove the row or choose another column.")
    if input_template is not None:
        raise ValueError("--input_template goes around a text, and this is a list of chat messages. Leave it out.")
    return [_as_message(message) for message in value]


def _as_message(message: object) -> Message:
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise ValueError(f'not a chat message with texts "role" and "content": {shortened(message)}.')
    calls = message.get("tool_calls") or []
    if not (isinstance(calls, list) and all(isinstance(tool_name(call), str) for call in calls)):
        raise ValueError(
            'not a chat message with "tool_calls" like [{"function": {"name": "add", "arguments": {"a": 1}}}]: '
            f"{shortened(message)}."
        )
    content = message.get("content")
    if isinstance(content, list):
        content = text_of(content)
    may_be_null = calls or (message["role"] in _CAN_BE_WITHOUT_TEXT and "content" in message)
    if not (isinstance(content, str) or (content is None and may_be_null)):
        raise ValueError(f'not a chat message with texts "role" and "content": {shortened(message)}.')
    message = {**message, "content": "" if content is None and not calls else content}
    for text in (message["role"], *_texts(message)):
        _require_encodable(text)
    return message


def text_of(content: object) -> str:
    """Text of a message's content: a string, None (empty), or a list of parts, whose texts are joined.

    ``ValueError`` for any other content, and for a part without text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"not a chat message with a text or list of parts as content: {shortened(content)}.")
    return "".join(map(_text_of_part, content))


def _text_of_part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise ValueError(f"not a chat message with text only: its content has the part {shortened(part)}.")
    return text


def tool_name(call: object) -> object:
    """Name in a tool call, in OpenAI's form or flat; None without."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _texts_of_calls(message: Message) -> Iterator[str]:
    """Names of called tools, and texts among their arguments."""
    for call in message.get("tool_calls") or []:
        yield str(tool_name(call))
        arguments = call.get("function", call).get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError):  # not JSON: one text
                arguments = json.loads(arguments)
        yield from _texts(arguments, of_chats=False)


def same_turn(a: Message, b: Message) -> bool:
    """Whether role, content and tool calls are equal."""
    return all(a.get(part) == b.get(part) for part in ("role", "content", "tool_calls"))


def require_whole(message: Message, number: int, rendered: str) -> None:
    """Refuse a rendering that lacks content, reasoning or tool calls of ``message``; blanks do not count."""
    squeezed = "".join(rendered.split())
    said = [message.get(name) or "" for name in ("content", *_REASONING)]
    for text in [*filter(lambda text: isinstance(text, str), said), *_texts_of_calls(message)]:
        if not any("".join(form.split()) in squeezed for form in (text, json.dumps(text, ensure_ascii=False)[1:-1])):
            raise ValueError(
                f"the chat template leaves out part of turn {number + 1}, {shortened(text)}, so it would not be "
                "trained on. Use another template, or leave --apply_chat_template out and use --input_template."
            )


def fill_template(value: object, input_template: str | None) -> str:
    """``value``, a text that is not empty, put into ``input_template`` at ``{}``."""
    text = as_text(value)
    if not text:
        raise ValueError("the text is empty. Remove the row or choose another column.")
    return text if input_template is None else input_template.replace("{}", text)


def require_tokenizer(tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool, eos: bool) -> None:
    """Raise ``ValueError`` if the tokenizer lacks a chat template or EOS token in use."""
    if apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            "--apply_chat_template: the tokenizer of --pretrain has no chat template. Leave the flag out, or use a "
            "model whose tokenizer has one."
        )
    if eos and tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer of --pretrain has no EOS token, so a model could not learn to stop. Set eos_token in its "
            "tokenizer_config.json."
        )


def encode_start(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the start of a text: with the tokenizer's special tokens, without an EOS at the end."""
    ids: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
    bare = encode_bare(tokenizer, text)
    if ids and ids[-1] == tokenizer.eos_token_id and ids[-1 - len(bare) : -1] == bare:  # no EOS of the text itself
        ids = ids[:-1]
    front = ids[: len(ids) - len(bare)]
    return bare if front and bare[: len(front)] == front else ids  # text that was rendered before has its BOS


def encode_bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the text alone."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def head_of(tokenizer: PreTrainedTokenizerBase, text: str, n_tokens: int) -> str:
    """A start of ``text`` with more than ``n_tokens`` tokens, or all of it: megabytes take seconds to tokenize."""
    size = _CHARACTERS_PER_TOKEN * n_tokens
    while size < len(text) and len(encode_bare(tokenizer, text[:size])) <= n_tokens:
        size *= 4
    return text[:size]


def is_far_longer(values: list[Any], tokenizer: PreTrainedTokenizerBase, max_len: int) -> bool:
    """Whether texts and chats of more than a megabyte start with more than 4 ``max_len`` tokens.

    Four, because a row may repeat a text. Raises ``ValueError`` for texts that cannot be encoded.
    """
    texts = list(_texts(values))
    if sum(map(len, texts)) <= _LARGE:
        return False
    text = as_text("".join(texts))
    return len(head_of(tokenizer, text, 4 * max_len)) < len(text)


def _texts(value: object, of_chats: bool = True) -> Iterator[str]:
    """Texts in nested values, keys too; ``of_chats``: of chat messages only what templates write."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        written = map(value.get, ("content", "reasoning_content", "tool_calls"))
        yield from _texts([*written] if of_chats and "role" in value else [*value, *value.values()], of_chats)
    elif isinstance(value, list):
        yield from chain.from_iterable(_texts(part, of_chats) for part in value)


def end_with_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """``ids`` with one EOS at the end; whitespace after an EOS, as of chat templates, is cut."""
    eos: int = tokenizer.eos_token_id
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
        if ids[done : done + len(head)] == head:
            places.append(done + len(head))
            continue
        ids = ids[:done] + head + encode_bare(tokenizer, text[cut:])
        rest, done, anchors, encode = cut, done + len(head), [], encode_bare
        places.append(done)
    return ids, places


def _added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[int, int]]:
    """Character and token position of each added token, such as "<|im_start|>": text never merges across one."""
    if not tokenizer.is_fast:
        return []  # without character positions, which only costs time
    added = tokenizer.added_tokens_decoder
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [(start, place) for place, (token, (start, _)) in enumerate(pairs) if token in added]


def render_chat(messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, for_generation: bool = False) -> str:
    """The conversation, BOS included, in the tokenizer's chat template; ``for_generation`` opens the assistant's turn.

    Raises ``ValueError`` if the template refuses the messages.
    """
    require_tokenizer(tokenizer, apply_chat_template=True, eos=False)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=for_generation))
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template refuses messages with the roles {roles}: {error}") from error


def as_text(value: object) -> str:
    """``value`` if it is a text that can be encoded; else ``ValueError``."""
    if isinstance(value, list):
        raise ValueError("a list of chat messages needs --apply_chat_template.")
    if not isinstance(value, str):
        raise ValueError(
            f"not a text but {type(value).__name__}: {shortened(value)}. Correct or remove the row, or choose another "
            "column."
        )
    _require_encodable(value)
    return value


def _require_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"half of a surrogate pair, U+{ord(text[error.start]):04X}, is not a character: {shortened(text)}. It "
            "remains where a text was cut inside a character; correct or remove the row."
        ) from error


def shortened(value: object) -> str:
    """``value`` for a message, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
