"""Conversations to token ids, whole or continuing recorded ones, and sampled tokens to messages."""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from openppo.agents.parsers import PARSERS, Parsed, ToolCall, Tools
from openppo.datasets.conversation import MARK, read_arguments, render_chat
from openppo.datasets.message_parts import media_key, media_kind, media_parts
from openppo.datasets.template_checks import require_shown
from openppo.datasets.templates import Message, encode_bare, text_of
from openppo.datasets.text_bound import TextBound, text_bound
from openppo.datasets.vision import Vision
from openppo.media import Media
from openppo.types import Completion, FinishReason

T = TypeVar("T")
_THINK = "<think>"
_THOUGHT = "</think>"
SHORT = 2**15
"""Most characters to tokenize on the event loop: it takes milliseconds."""
_HUGE = 2**20
"""Longer texts have a thread of their own, so that shorter ones need not wait for them."""


class TooLong(Exception):  # noqa: N818 (the text may be as intended)
    """A text has at least ``n_tokens`` tokens, which are too many; it was not tokenized."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"a text of at least {n_tokens} tokens is too long")
        self.n_tokens = n_tokens


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its chat template, a parser by name, and the ids that end a turn.

    ``vision`` reads images of conversations; None: there are none. Methods get the images of messages as ``media``.
    """

    tokenizer: PreTrainedTokenizerBase
    parser: str
    eos_token_ids: Collection[int]
    vision: Vision | None = None

    async def aside(self, work: Callable[[], T], n_characters: int) -> T:
        """Return the result of ``work``, which tokenizes ``n_characters``: many in a thread, beside the event loop."""
        if n_characters <= SHORT:
            return work()
        thread = self._threads[n_characters > _HUGE]
        return await asyncio.get_running_loop().run_in_executor(thread, work)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        media: Media = (),
        most: int = sys.maxsize,
    ) -> list[int]:
        """Return the token ids of a conversation up to where the model answers.

        ``ValueError`` if the template refuses it, or leaves out what the model should read; ``TooLong`` as in
        ``encode``.
        """
        require_shown(messages, partial(self.rendered, tools=tools))
        return self.encode(self.rendered(messages, tools), media, most)

    def rendered(
        self, messages: Sequence[Message], tools: Tools = (), for_generation: bool = True
    ) -> str:
        """Return the text of a conversation; ``ValueError`` if the template refuses it."""
        offered = [dict(tool) for tool in tools] or None

        def render(content: Callable[[Any], Any]) -> str:
            return render_chat(
                messages,
                self.tokenizer,
                for_generation=for_generation,
                tools=offered,
                content=content,
            )

        if self.vision is None:
            return render(text_of)
        return self.vision.write(messages, render, True)

    def bridge(
        self,
        recorded: Sequence[Message],
        completion: Completion,
        new: Sequence[Message],
        tools: Tools = (),
        media: Media = (),
        most: int = sys.maxsize,
    ) -> list[int] | None:
        """Return the token ids that add ``new`` messages after ``completion``, the last of ``recorded`` messages.

        The conversation is rendered with a stand-in for that answer, and cut after the special token that ends it: the
        text after such a token is tokenized independently of the text before. None if there is no such token, another
        one was sampled, or ``new`` has other answers; the conversation must then be rendered whole. ``media`` are the
        images of ``new``. ``TooLong`` as in ``encode``.
        """
        if any(message["role"] == "assistant" for message in new):
            return None

        *history, answer = recorded
        minimal: list[Message] = [{"role": "user", "content": "-"}]
        for before in (history, minimal):  # the template may refuse the history
            for stand_in in _stand_ins(answer):
                with suppress(ValueError):
                    text = self.rendered([*before, stand_in, *new], tools)
                    if MARK not in text:
                        continue
                    return self._continued(
                        text.rpartition(MARK)[2],
                        completion,
                        new,
                        calls="tool_calls" in stand_in,
                        media=media,
                        most=most,
                    )
        return None

    def _continued(
        self,
        after: str,
        completion: Completion,
        new: Sequence[Message],
        calls: bool,
        media: Media,
        most: int,
    ) -> list[int] | None:
        """Token ids of ``after``, the text behind the stand-in, from where the turn of ``completion`` ended."""
        last = completion.token_ids[-1] if completion.token_ids else None
        has_end = last in self.eos_token_ids

        end = self._special.search(after)
        if has_end or calls:
            while end and end[0] not in self._ends:  # tokens around texts and calls
                end = self._special.search(after, end.end())
        if end is None:
            return None
        written = self.vision.guarded if self.vision else str
        if not _shows(after[end.end() :], new, written):
            return None

        end_ids = self.encode(end[0])
        ids = self.encode(after[end.start() :], media, most)
        if len(end_ids) != 1 or ids[:1] != end_ids:
            return None
        if has_end and last != end_ids[0]:
            return None
        between = self._special.sub("", after[: end.start()]).strip()
        if between and not calls:
            return None
        return ids[1:] if last == end_ids[0] else ids

    def parse(
        self, text: str, prompt_ids: Sequence[int], tools: Tools, number: int
    ) -> tuple[Message, str | None]:
        """Return the message of turn ``number``, sampled after ``prompt_ids``, and the error in its calls, or None.

        The message is in OpenAI's form, with separate reasoning and an id for each call.
        """
        opened = self.decode(prompt_ids[-16:]).rstrip().endswith(_THINK)
        reasoning, answer = split_reasoning(text, opened)
        parsed = PARSERS[self.parser](answer, tools) if tools else Parsed(answer, [])

        content = self._structure.sub("", parsed.content).strip()
        message: Message = {"role": "assistant", "content": content}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if parsed.calls:
            message["content"] = content or None
            message["tool_calls"] = _in_openai_form(parsed.calls, number)
        return message, parsed.error

    def encode(self, text: str, media: Media = (), most: int = sys.maxsize) -> list[int]:
        """Return the token ids of a rendered text, which has places for ``media``.

        ``TooLong``, without tokenizing, for a text so long that it must have ``most`` tokens or more.
        """
        if self.bound is not None:
            n_tokens = self.bound.least_tokens(text)
            if n_tokens >= most:
                raise TooLong(n_tokens)

        if self.vision is not None and self.vision.reads:
            return self.vision.encode(text, media)
        return encode_bare(self.tokenizer, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def text(self, completion: Completion) -> str:
        """Return the text of a completion without its stop token: EOS, or another special one."""
        ids = completion.token_ids
        if ids and completion.finish_reason is FinishReason.STOP:
            is_eos = ids[-1] in self.eos_token_ids
            if is_eos or self._special.fullmatch(self.decode(ids[-1:])):
                return self.decode(ids[:-1])
        return self.decode(ids)

    @cached_property
    def bound(self) -> TextBound | None:
        """Bound of the tokenizer."""
        return text_bound(self.tokenizer)

    @cached_property
    def _threads(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """One thread for long texts, and one for huge ones."""
        # Turns truncation and padding off, which fails while another thread tokenizes.
        self.encode("")
        return ThreadPoolExecutor(1, "long texts"), ThreadPoolExecutor(1, "huge texts")

    @cached_property
    def _ends(self) -> set[str]:
        """Texts of the tokens that end a turn."""
        to_token = self.tokenizer.convert_ids_to_tokens
        return {str(to_token(token_id)) for token_id in self.eos_token_ids}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Pattern of special tokens."""
        return _any_of(self._special_texts)

    @cached_property
    def _structure(self) -> re.Pattern[str]:
        """Pattern of special tokens that structure a chat: a message with one would be read as several."""
        tokenizer = self.tokenizer
        template = str(tokenizer.chat_template)
        structural = {
            tokenizer.bos_token,
            tokenizer.eos_token,
            tokenizer.pad_token,
            tokenizer.unk_token,
            *self._ends,
        }
        in_template = {text for text in self._special_texts if text in template}
        return _any_of(in_template | (self._special_texts & structural))

    @cached_property
    def _special_texts(self) -> set[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        return special | {*self.tokenizer.all_special_tokens} | self._ends


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Pattern of the longest of ``texts`` at a place; it matches nothing if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def split_reasoning(text: str, opened: bool) -> tuple[str | None, str]:
    """Split a text into reasoning (None without) and answer.

    ``opened``: the prompt ends inside of the reasoning. All of a text belongs to reasoning that is not closed.
    """
    start = text.lstrip()
    if not opened and not start.startswith(_THINK):
        return None, text
    reasoning, _, answer = start.removeprefix(_THINK).partition(_THOUGHT)
    return reasoning.strip(), answer.lstrip("\n")


def _in_openai_form(calls: Sequence[ToolCall], turn: int) -> list[dict[str, Any]]:
    """Format calls, with ids of nine letters and digits, as Mistral's templates demand.

    The model's ids are kept if all of them have that form.
    """
    ids = [call.id for call in calls if re.fullmatch("[A-Za-z0-9]{9}", call.id or "")]
    if len(set(ids)) < len(calls):
        ids = [f"c{turn:05d}{place:03d}" for place in range(len(calls))]

    formatted = []
    for call_id, call in zip(ids, calls, strict=True):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        formatted.append({"id": call_id, "type": "function", "function": function})
    return formatted


def _stand_ins(answer: Message) -> list[Message]:
    """Answers with the mark as text and in the arguments of calls.

    The later ones have fewer marks, in case the template refuses the first.
    """
    plain: Message = {"role": "assistant", "content": MARK}
    arguments = json.dumps({"mark": MARK})
    calls = []
    for call in answer.get("tool_calls") or []:
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    if not calls:
        return [plain]

    text = MARK if answer.get("content") else ""
    all_calls = plain | {"content": text, "tool_calls": calls}
    last_call = plain | {"content": "", "tool_calls": calls[-1:]}
    return [all_calls, last_call, plain]


def _shows(text: str, messages: Sequence[Message], written: Callable[[str], str]) -> bool:
    """True if a rendering has the texts of all messages, processed by ``written`` or in JSON."""
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content or ""]
        for part in parts:
            if media_kind(part):
                continue
            part_text = written(text_of([part])).strip()
            if part_text not in text and _json_inside(part_text) not in text:
                return False
    return True


def _json_inside(text: str) -> str:
    """JSON of a text, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def fingerprints(messages: Sequence[Message], tools: Tools) -> list[int]:
    """Hashes of the tools and of each message, equal for equal content.

    They leave out reasoning, keys of a client's own, and the format of arguments. A text may be one string, a list of
    parts, or null; an image counts by its item's key.
    """
    contents = [list(tools), *map(_hashed_content, messages)]
    return [hash(json.dumps(content, sort_keys=True, default=str)) for content in contents]


def _hashed_content(message: Message) -> list[Any]:
    """Role, text, calls and images of a message."""
    role = message["role"]
    text = text_of(message.get("content"))
    if role == "assistant":
        text = text.strip()

    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        arguments = read_arguments(function["arguments"] or "{}")
        calls.append([call.get("id"), function["name"], arguments])
    images = [media_key(part) for part in media_parts([message])]
    return [role, text, calls, images]
