"""Rows with images and videos, to prompts and examples."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from openppo.datasets.conversation import render_chat
from openppo.datasets.media_files import UNREADABLE, given_in, values_of
from openppo.datasets.message_parts import media_kind, media_part, media_parts
from openppo.datasets.prompts import prompt_text, render_prompt
from openppo.datasets.row_formats import RowFields
from openppo.datasets.templates import (
    Message,
    TokenExample,
    as_messages,
    check_tools,
    fill_template,
)
from openppo.datasets.turns import Chat, join_turns, render_response, render_turns
from openppo.datasets.vision import Vision
from openppo.media import KINDS, MediaItem
from openppo.types import Prompt

T = TypeVar("T", Prompt, TokenExample)


@dataclass(eq=False)
class RowVision(Vision):
    """Makes prompts of rows, with images and videos or without; ``seen`` are the items so far by key."""

    seen: dict[int, MediaItem] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """Kinds of the items of all rows so far."""
        return sorted({item.kind for item in self.seen.values()})

    def render(self, fields: RowFields) -> Prompt:
        """``render_prompt``, of a row that may have images and videos in its columns or its messages."""
        options, chat = self.options, self.options.apply_chat_template
        if not has_media(fields) and not self.needs_parts:
            prompt = render_prompt(fields.prompt, self.tokenizer, options, tools=fields.tools)
            return self.without_media(prompt, prompt.text)
        if chat:
            asked = as_messages(fields.prompt, "user", options.input_template)
            check_tools(fields.tools, self.tokenizer)
        else:
            asked = [
                {"role": "user", "content": fill_template(fields.prompt, options.input_template)}
            ]
        messages, items = self._placed(asked, fields)
        render = partial(self._rendered, fields=fields)
        text = prompt_text(messages, render) if chat else self.as_text(messages[0]["content"])
        prompt = Prompt(
            text,
            self.encode(text, items, not chat),
            messages=messages if chat else None,
            media=items,
        )
        return prompt if items else self.without_media(prompt, text)

    @cached_property
    def needs_parts(self) -> bool:
        """Whether the chat template writes nothing of a content that is a text."""
        if not (self.options.apply_chat_template and self.reads):
            return False
        if not self.tokenizer.chat_template:
            _ = self.processor  # which may have one
        return not self.takes_texts and self.takes_parts

    def example(
        self, fields: RowFields, otherwise: Callable[[RowFields], TokenExample]
    ) -> TokenExample:
        """What ``otherwise`` makes of a row, or of one with images ``render_response``."""
        if has_media(fields) or self.needs_parts:
            return self.render_response(fields)
        asked = fields.prompt if fields.whole is None else fields.whole
        return self.without_media(otherwise(fields), str(asked))

    def without_media(self, made: T, text: str = "") -> T:
        """``made``, a prompt or example; ``ValueError`` if its text has a place for an image."""
        has_mark = "<image>" in text or (self.options.video_key is not None and "<video>" in text)
        if self.token_ids and (has_mark or not {*self.token_ids}.isdisjoint(made.token_ids)):
            what = "its text has a place for an image, and the row has none"
            raise ValueError(
                f"{what}. Add the image, name its column with --image_key, or remove the row."
            )
        return made

    def render_response(self, fields: RowFields) -> TokenExample:
        """``render_response`` and, of a conversation, ``render_whole``, of a row that has images."""
        options, response = self.options, fields.response
        if fields.prompt is None and fields.conversation is None:
            raise ValueError(
                "a row with images needs a prompt and a response: name their columns, or remove the row."
            )
        if not options.apply_chat_template:
            prompt = self.render(fields)
            before, _ = self.expanded(prompt.text, prompt.media)
            made = render_response(
                before, response, self.tokenizer, options=replace(options, input_template=None)
            )
            return replace(
                made, token_ids=self.counted(made.token_ids, prompt.media), media=prompt.media
            )
        whole = fields.conversation is not None
        asked = fields.conversation or as_messages(fields.prompt, "user", options.input_template)
        messages, items = self._placed(asked, fields)
        turns = (
            Chat(messages) if whole else join_turns(messages, as_messages(response, "assistant"))
        )
        render, expand = partial(self._rendered, fields=fields), partial(self.expanded, items=items)
        example = render_turns(turns, self.tokenizer, fields.tools, render=render, expand=expand)
        return replace(example, token_ids=self.counted(example.token_ids, items), media=items)

    def _rendered(
        self, messages: Sequence[Message], fields: RowFields, for_generation: bool = False
    ) -> str:
        def render(content: Callable[[Any], Any]) -> str:
            return render_chat(
                messages,
                self.tokenizer,
                for_generation=for_generation,
                tools=fields.tools,
                content=content,
            )

        return self.write(messages, render)

    def _placed(
        self, asked: Sequence[Message], fields: RowFields
    ) -> tuple[list[Message], tuple[MediaItem, ...]]:
        """Messages with a ``media_part`` for each image and video, and the items in their order.

        Those of a column take the places without one of their own; without any places the first message of the user
        begins with them.
        """
        column = {kind: values_of(fields.media.get(kind)) for kind in KINDS}
        named = {"image": self.options.image_key, "video": self.options.video_key}
        marks = "|".join(f"<{kind}>" for kind, values in column.items() if values or named[kind])
        messages = [{**m, "content": _parts(m, marks)} for m in asked]
        if not any(media_parts(messages)):
            first = next((m for m in messages if m["role"] == "user"), messages[0])
            first["content"] = [{"type": kind} for kind in KINDS for _ in column[kind]] + first[
                "content"
            ]
        rest, items = {kind: iter(values) for kind, values in column.items()}, list[MediaItem]()
        places = Counter(media_kind(part) for part in media_parts(messages))
        own = Counter(
            media_kind(part) for part in media_parts(messages) if given_in(part) is not None
        )
        for kind, values in column.items():
            if (n_values := own[kind] + len(values)) != places[kind]:
                what = f"{places[kind]} places for {kind}s, and {n_values} {kind}s"
                raise ValueError(f"{what}. Correct or remove the row.")
        read = Counter[str]()
        for part in media_parts(messages):
            kind = str(media_kind(part))
            value = given_in(part)
            read[kind] += 1
            if kind not in self.tokens:
                what = f"the row has videos, and {self.named} reads none"
                raise ValueError(f"{what}. Remove them, or use a model that does.")
            try:
                item = self.item(next(rest[kind]) if value is None else value, kind, fields.source)
            except UNREADABLE as error:
                what = f"{kind} {read[kind]} of {places[kind]} cannot be read: {str(error).rstrip('.')}"
                raise ValueError(f"{what}. Correct it, or remove the row.") from error
            items.append(self.seen.setdefault(item.key, item))
            part.clear()
            part |= media_part(kind, item.key)
        made = [
            m if any(media_parts([m])) else given for m, given in zip(messages, asked, strict=True)
        ]
        return made, tuple(items)


def has_media(fields: RowFields) -> bool:
    """Whether a row has images or videos, in its columns or in the messages of its prompt."""
    turns = fields.prompt if isinstance(fields.prompt, list) else []
    return any(map(values_of, fields.media.values())) or any(
        media_parts(t for t in turns if isinstance(t, dict))
    )


def _parts(message: Message, marks: str) -> list[dict[str, Any]]:
    """Parts of a message, its texts cut where one of the ``marks`` is; the assistant's have none."""
    content, made = message["content"], list[dict[str, Any]]()
    for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
        if media_kind(part) or message["role"] == "assistant" or not marks:
            made.append(dict(part))
            continue
        for piece in re.split(f"({marks})", part["text"]):
            is_mark = re.fullmatch(marks, piece) is not None
            made.append({"type": piece[1:-1]} if is_mark else {"type": "text", "text": piece})
    return [part for part in made if media_kind(part) or part["text"]]
