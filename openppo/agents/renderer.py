"""Conversations to token ids, whole or as the continuation of recorded ones, and sampled tokens to messages."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.agents.parsers import PARSERS
from openppo.datasets.templates import Message, encode_bare, render_conversation, text_of
from openppo.types import Completion, FinishReason

_MARK = "Zq7markqZ"
"""Stands for the text of an answer in a rendering; letters and a digit, which no template changes."""
_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class Answer:
    """A sampled turn as a message in OpenAI's form; ``error`` says why a tool call could not be read."""

    message: Message
    error: str | None = None


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with its chat template, a parser of tool calls by name, and the ids that end a turn."""

    tokenizer: PreTrainedTokenizerBase
    parser: str
    eos_token_ids: Collection[int]

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation up to where the model answers; ``ValueError`` if the template refuses it."""
        return self.encode(self.rendered(messages, tools))

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), for_generation: bool = True
    ) -> str:
        """Text of a conversation; ``ValueError`` if the template refuses it."""
        offered = [dict(tool) for tool in tools] or None
        return render_conversation(messages, self.tokenizer, for_generation=for_generation, tools=offered)

    def bridge(
        self,
        answer: Message,
        completion: Completion,
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int] | None:
        """Token ids that follow a recorded ``completion`` so that ``new`` messages follow its ``answer``.

        The rendering of a stand-in conversation is cut after the special token that ends the stand-in's answer: what
        follows a special token is tokenized independently of what precedes it. None if the template has no such place,
        so that the conversation must be rendered whole.
        """
        last = completion.token_ids[-1] if completion.token_ids else None
        ended = completion.finish_reason is FinishReason.STOP and last in self.eos_token_ids
        ends = [self._token_text(last)] if ended and last is not None else self._special_texts()
        for stand_in in _stand_ins(answer, new):
            try:
                text = self.rendered([{"role": "user", "content": "-"}, stand_in, *new], tools)
            except ValueError:
                continue
            if _MARK not in text:
                continue
            after = text[text.rindex(_MARK) + len(_MARK) :]
            places = [(after.index(end), -len(end), end) for end in ends if end in after]
            if not places:
                continue
            start, _, end = min(places)
            rest = after[start + len(end) :]
            if not all(_shows(rest, message) for message in new):
                continue
            ids = self.encode(end + rest)
            if self.encode(end) != ids[:1]:
                continue
            return ids[1:] if ended else ids
        return None

    def parse(self, text: str, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]], number: int) -> Answer:
        """Turn ``number``, sampled after ``prompt_ids``, as a message: reasoning apart, calls with ids of their own."""
        opened = self.decode(prompt_ids[-8:]).rstrip().endswith(_THINK)
        thoughts, said = split_reasoning(text, opened)
        parsed = PARSERS[self.parser](said, tools) if tools else None
        content = said if parsed is None else parsed.content
        message: Message = {"role": "assistant", "content": self._plain(content)}
        if thoughts is not None:
            message["reasoning_content"] = thoughts
        if parsed is not None and parsed.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": f"c{number:05d}{i:03d}",  # nine letters and digits, as Mistral's templates demand
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for i, call in enumerate(parsed.calls)
            ]
        return Answer(message, None if parsed is None else parsed.error)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        return encode_bare(self.tokenizer, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return str(self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def text(self, completion: Completion) -> str:
        """Text of a completion without the token that ended it."""
        ids = completion.token_ids
        return self.decode(ids[:-1] if ids and ids[-1] in self.eos_token_ids else ids)

    def _token_text(self, token_id: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token_id))

    def _special_texts(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return sorted({token.content for token in added if token.special} | set(self.tokenizer.all_special_tokens))

    def _plain(self, text: str) -> str:
        """``text`` without special tokens and blanks around it."""
        specials = "|".join(map(re.escape, self._special_texts()))
        return re.sub(specials, "", text).strip() if specials else text.strip()


def split_reasoning(text: str, opened: bool) -> tuple[str | None, str]:
    """Reasoning (None without) and the rest; ``opened``: the prompt ends inside of it. Unclosed, all is reasoning."""
    before, mark, after = text.partition(_THINK)
    if not opened and (not mark or before.strip()):
        return None, text
    thoughts, _, said = (text if opened and not mark else after).partition(_THOUGHT)
    return thoughts.strip(), said.lstrip("\n")


def _stand_ins(answer: Message, new: Sequence[Message]) -> list[Message]:
    """Answers with the mark: one that calls tools where results follow, with the mark as an argument or as text."""
    plain: Message = {"role": "assistant", "content": _MARK}
    calls = answer.get("tool_calls")
    if new[0]["role"] != "tool" or not calls:
        return [plain]
    last = calls[-1]
    marked = {**last, "function": {**last["function"], "arguments": json.dumps({"mark": _MARK})}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], marked]},
        plain | {"tool_calls": calls},
        plain,
    ]


def _shows(text: str, message: Message) -> bool:
    """Whether a rendering has all of a message's text, as it is or in JSON."""
    said = text_of(message.get("content")).strip()
    return any(form in text for form in (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1]))
