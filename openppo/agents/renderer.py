"""Conversations to token ids, whole or as the continuation of recorded ones, and sampled tokens to messages."""

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
_THINK, _THOUGHT = "<think>", "</think>"
SHORT = 2**15
"""Characters that are tokenized in milliseconds, on the event loop."""
_HUGE = 2**20
"""Characters of texts that wait for each other only, and not in front of shorter ones."""


class TooLong(Exception):  # noqa: N818 (the text may be what was wanted)
    """A text has at least ``n_tokens`` tokens, which are too many; it was not tokenized."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(f"a text of at least {n_tokens} tokens is too long")
        self.n_tokens = n_tokens


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its chat template, a parser of tool calls by name, and the ids that end a turn.

    ``vision`` reads images of conversations; None: there are none. Methods get the items of messages as ``media``.
    """

    tokenizer: PreTrainedTokenizerBase
    parser: str
    eos_token_ids: Collection[int]
    vision: Vision | None = None

    async def aside(self, work: Callable[[], T], n_characters: int) -> T:
        """Result of ``work``, which tokenizes about so many characters: many in a thread, so that the loop goes on."""
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
        """Token ids of a conversation up to where the model answers.

        ``ValueError`` if the template refuses it, or leaves out what the model should read; ``TooLong`` as of
        ``encode``.
        """
        require_shown(messages, partial(self.rendered, tools=tools))
        return self.encode(self.rendered(messages, tools), media, most)

    def rendered(
        self, messages: Sequence[Message], tools: Tools = (), for_generation: bool = True
    ) -> str:
        """Text of a conversation; ``ValueError`` if the template refuses it."""
        offered = [dict(tool) for tool in tools] or None

        def render(content: Callable[[Any], Any]) -> str:
            return render_chat(
                messages,
                self.tokenizer,
                for_generation=for_generation,
                tools=offered,
                content=content,
            )

        return render(text_of) if self.vision is None else self.vision.write(messages, render, True)

    def bridge(
        self,
        recorded: Sequence[Message],
        completion: Completion,
        new: Sequence[Message],
        tools: Tools = (),
        media: Media = (),
        most: int = sys.maxsize,
    ) -> list[int] | None:
        """Token ids that follow a ``completion``, the last of ``recorded`` messages, so that ``new`` ones follow it.

        The conversation is rendered with a stand-in for that answer, and cut after the special token that ends it: what
        follows one is tokenized independently of what precedes it. None if there is no such token, or another one was
        sampled, or ``new`` has other answers, so that the conversation must be rendered whole. ``media`` are those of
        ``new``. ``TooLong`` as of ``encode``.
        """
        if any(message["role"] == "assistant" for message in new):
            return None
        *asked, answer = recorded
        for before in (
            asked,
            [{"role": "user", "content": "-"}],
        ):  # the template may refuse what came before
            for stand_in in _stand_ins(answer):
                with suppress(ValueError):
                    text = self.rendered([*before, stand_in, *new], tools)
                    if MARK in text:
                        after, calls = text.rpartition(MARK)[2], "tool_calls" in stand_in
                        return self._continued(
                            after, completion, new, calls=calls, media=media, most=most
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
        """Token ids of ``after``, what follows the stand-in, from where the turn of ``completion`` ended."""
        last = completion.token_ids[-1] if completion.token_ids else None
        ended = last in self.eos_token_ids
        found = self._special.search(after)
        while (
            found and (ended or calls) and found[0] not in self._ends
        ):  # tokens around texts and calls
            found = self._special.search(after, found.end())
        if found is None or not _shows(
            after[found.end() :], new, self.vision.guarded if self.vision else str
        ):
            return None
        end, ids = self.encode(found[0]), self.encode(after[found.start() :], media, most)
        between = "" if calls else self._special.sub("", after[: found.start()])
        if between.strip() or len(end) != 1 or ids[:1] != end or (ended and last != end[0]):
            return None
        return ids[1:] if last == end[0] else ids

    def parse(
        self, text: str, prompt_ids: Sequence[int], tools: Tools, number: int
    ) -> tuple[Message, str | None]:
        """Turn ``number``, sampled after ``prompt_ids``, as a message, and why a tool call could not be read.

        The message is in OpenAI's form, with reasoning apart and calls with ids of their own.
        """
        opened = self.decode(prompt_ids[-16:]).rstrip().endswith(_THINK)
        thoughts, said = split_reasoning(text, opened)
        parsed = PARSERS[self.parser](said, tools) if tools else Parsed(said, [])
        plain = self._structure.sub("", parsed.content).strip()
        message: Message = {"role": "assistant", "content": plain}
        if thoughts is not None:
            message["reasoning_content"] = thoughts
        if parsed.calls:
            message |= {
                "content": plain or None,
                "tool_calls": _in_openai_form(parsed.calls, number),
            }
        return message, parsed.error

    def encode(self, text: str, media: Media = (), most: int = sys.maxsize) -> list[int]:
        """Token ids of a rendered text, which has places for ``media``.

        ``TooLong``, before it is tokenized, for a text so long that it must have ``most`` tokens or more.
        """
        if self.bound is not None and (n_tokens := self.bound.least_tokens(text)) >= most:
            raise TooLong(n_tokens)
        if self.vision is not None and self.vision.reads:
            return self.vision.encode(text, media)
        return encode_bare(self.tokenizer, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def text(self, completion: Completion) -> str:
        """Text of a completion without the token that ended it: EOS, or a special one that the run stops at."""
        ids = completion.token_ids
        ended = ids and (
            ids[-1] in self.eos_token_ids or self._special.fullmatch(self.decode(ids[-1:]))
        )
        return self.decode(
            ids[:-1] if ended and completion.finish_reason is FinishReason.STOP else ids
        )

    @cached_property
    def bound(self) -> TextBound | None:
        """Bound of the tokenizer."""
        return text_bound(self.tokenizer)

    @cached_property
    def _threads(self) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
        """One for long texts, and one for huge ones."""
        self.encode(
            ""
        )  # takes truncation and padding off, which fails while another thread tokenizes
        return ThreadPoolExecutor(1, "long texts"), ThreadPoolExecutor(1, "huge texts")

    @cached_property
    def _ends(self) -> set[str]:
        """Texts of the tokens that end a turn."""
        return {
            str(self.tokenizer.convert_ids_to_tokens(token_id)) for token_id in self.eos_token_ids
        }

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches special tokens."""
        return _any_of(self._special_texts)

    @cached_property
    def _structure(self) -> re.Pattern[str]:
        """Matches special tokens that give a chat its form: a message with one would be read as several."""
        tokenizer, template = self.tokenizer, str(self.tokenizer.chat_template)
        named = {
            tokenizer.bos_token,
            tokenizer.eos_token,
            tokenizer.pad_token,
            tokenizer.unk_token,
            *self._ends,
        }
        return _any_of({text for text in self._special_texts if text in named or text in template})

    @cached_property
    def _special_texts(self) -> set[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return (
            {token.content for token in added if token.special}
            | {*self.tokenizer.all_special_tokens}
            | self._ends
        )


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Matches the longest of the texts that are at a place, and nothing without any."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def split_reasoning(text: str, opened: bool) -> tuple[str | None, str]:
    """Reasoning (None without) and the rest; ``opened``: the prompt ends inside of it. Unclosed, all is reasoning."""
    start = text.lstrip()
    if not opened and not start.startswith(_THINK):
        return None, text
    thoughts, _, said = start.removeprefix(_THINK).partition(_THOUGHT)
    return thoughts.strip(), said.lstrip("\n")


def _in_openai_form(calls: Sequence[ToolCall], turn: int) -> list[dict[str, Any]]:
    """Calls with ids of nine letters and digits, as Mistral's templates demand: the model's own if all are such."""
    ids = [call.id for call in calls if re.fullmatch("[A-Za-z0-9]{9}", call.id or "")]
    if len(set(ids)) < len(calls):
        ids = [f"c{turn:05d}{place:03d}" for place in range(len(calls))]
    texts = [json.dumps(call.arguments, ensure_ascii=False) for call in calls]
    functions = [
        {"name": call.name, "arguments": text} for call, text in zip(calls, texts, strict=True)
    ]
    return [
        {"id": i, "type": "function", "function": made}
        for i, made in zip(ids, functions, strict=True)
    ]


def _stand_ins(answer: Message) -> list[Message]:
    """Answers with the mark as text and in the arguments of calls; with less where the template refuses that much."""
    marked = json.dumps({"mark": MARK})
    calls = [
        {**call, "function": {**call["function"], "arguments": marked}}
        for call in answer.get("tool_calls") or []
    ]
    text = MARK if answer.get("content") else ""
    tried = [(text, calls), ("", calls[-1:])] if calls else []
    plain: Message = {"role": "assistant", "content": MARK}
    return [*(plain | {"content": text, "tool_calls": its} for text, its in tried), plain]


def _shows(text: str, messages: Sequence[Message], written: Callable[[str], str]) -> bool:
    """Whether a rendering has the texts of all messages, as they are ``written`` or in JSON."""
    contents = (message.get("content") for message in messages)
    parts = [content if isinstance(content, list) else [content or ""] for content in contents]
    texts = [
        written(text_of([part])).strip()
        for content in parts
        for part in content
        if not media_kind(part)
    ]
    return all(said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text for said in texts)


def fingerprints(messages: Sequence[Message], tools: Tools) -> list[int]:
    """Hashes of the tools and of each message, equal where they say the same.

    Reasoning and keys of a client's own do not count, nor how arguments are written. A text may be one string, a list
    of parts, or null; an image is its item's key.
    """
    said = [list(tools), *map(_said, messages)]
    return [hash(json.dumps(each, sort_keys=True, default=str)) for each in said]


def _said(message: Message) -> list[Any]:
    role, calls = message["role"], message.get("tool_calls") or []
    text, images = (
        text_of(message.get("content")),
        [media_key(part) for part in media_parts([message])],
    )
    named = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]
    said = [
        [call_id, name, read_arguments(arguments or "{}")] for call_id, name, arguments in named
    ]
    return [role, text.strip() if role == "assistant" else text, said, images]
