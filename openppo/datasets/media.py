"""Rows with images and videos -> prompts and examples."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from openppo.datasets.conversation import render_chat
from openppo.datasets.media_files import UNREADABLE, given_in, values_of
from openppo.datasets.message_parts import media_kind, media_part, media_parts
from openppo.datasets.prompts import prompt_text, render_prompt
from openppo.datasets.row_fields import RowFields
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
Columns = Mapping[str, list[Any]]
"""Images and videos of a row's columns, by kind."""


@dataclass(eq=False)
class RowVision(Vision):
    """Maker of prompts and examples of rows, with images and videos or without.

    ``seen`` are the items so far by key.
    """

    seen: dict[int, MediaItem] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """Kinds of the items of all rows so far."""
        return sorted({item.kind for item in self.seen.values()})

    def render(self, fields: RowFields) -> Prompt:
        """Render a prompt like ``render_prompt``, with images and videos of the row's columns or messages."""
        options = self.options
        chat = options.apply_chat_template
        if not has_media(fields) and not self.needs_parts:
            prompt = render_prompt(fields.prompt, self.tokenizer, options, tools=fields.tools)
            return self.without_media(prompt, prompt.text)

        if chat:
            messages = as_messages(fields.prompt, "user", options.input_template)
            check_tools(fields.tools, self.tokenizer)
        else:
            content = fill_template(fields.prompt, options.input_template)
            messages = [{"role": "user", "content": content}]

        messages, items = self._placed(messages, fields)
        if chat:
            text = prompt_text(messages, partial(self._rendered, fields=fields))
        else:
            text = self.as_text(messages[0]["content"])
        ids = self.encode(text, items, not chat)
        prompt = Prompt(text, ids, messages=messages if chat else None, media=items)
        return prompt if items else self.without_media(prompt, text)

    @cached_property
    def needs_parts(self) -> bool:
        """True if the chat template writes contents that are parts, and none that is a text."""
        if not (self.options.apply_chat_template and self.reads):
            return False
        if not self.tokenizer.chat_template:
            # The processor may have a template; loading it gives it to the tokenizer.
            _ = self.processor
        return not self.takes_texts and self.takes_parts

    def example(
        self, fields: RowFields, render_text: Callable[[RowFields], TokenExample]
    ) -> TokenExample:
        """Render a row with images by ``render_response``, and any other by ``render_text``."""
        if has_media(fields) or self.needs_parts:
            return self.render_response(fields)
        text = fields.prompt if fields.whole is None else fields.whole
        return self.without_media(render_text(fields), str(text))

    def without_media(self, rendered: T, text: str = "") -> T:
        """Return ``rendered``, which has no images; ``ValueError`` if its text has a place for one."""
        has_mark = "<image>" in text or (self.options.video_key is not None and "<video>" in text)
        if self.token_ids and (has_mark or not {*self.token_ids}.isdisjoint(rendered.token_ids)):
            raise ValueError(
                "its text has a place for an image, and the row has none. Add the image, name its column with "
                "--image_key, or remove the row."
            )
        return rendered

    def render_response(self, fields: RowFields) -> TokenExample:
        """Render a row that has images: the response to its prompt, or a whole conversation."""
        if fields.prompt is None and fields.conversation is None:
            raise ValueError(
                "a row with images needs a prompt and a response: name their columns, or remove the row."
            )
        if self.options.apply_chat_template:
            return self._render_turns(fields)

        prompt = self.render(fields)
        before, _ = self.expanded(prompt.text, prompt.media)
        filled = replace(self.options, input_template=None)
        example = render_response(before, fields.response, self.tokenizer, options=filled)
        return self._with_media(example, prompt.media)

    def _render_turns(self, fields: RowFields) -> TokenExample:
        template = self.options.input_template
        messages = fields.conversation or as_messages(fields.prompt, "user", template)
        messages, items = self._placed(messages, fields)

        if fields.conversation is not None:
            chat = Chat(messages)
        else:
            chat = join_turns(messages, as_messages(fields.response, "assistant"))

        example = render_turns(
            chat,
            self.tokenizer,
            fields.tools,
            render=partial(self._rendered, fields=fields),
            expand=partial(self.expanded, items=items),
        )
        return self._with_media(example, items)

    def _with_media(self, example: TokenExample, items: tuple[MediaItem, ...]) -> TokenExample:
        ids = self.counted(example.token_ids, items)
        return replace(example, token_ids=ids, media=items)

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
        self, messages: Sequence[Message], fields: RowFields
    ) -> tuple[list[Message], tuple[MediaItem, ...]]:
        """Put a ``media_part`` for each image and video into ``messages``; return the items in the same order.

        Items of a column take the places without an item of their own. Without any places, they stand at the
        beginning of the user's first message.
        """
        columns = {kind: values_of(fields.media.get(kind)) for kind in KINDS}
        marks = self._marks(columns)
        divided = [{**message, "content": _parts(message, marks)} for message in messages]
        if not any(media_parts(divided)):
            _put_in_front(divided, columns)
        _require_same_numbers(divided, columns)
        items = self._read_items(divided, columns, fields.source)

        placed = []
        for message, original in zip(divided, messages, strict=True):
            placed.append(message if any(media_parts([message])) else original)
        return placed, tuple(items)

    def _marks(self, columns: Columns) -> str:
        """Pattern of the marks for items in texts; empty if texts have none."""
        options = self.options
        keys = {"image": options.image_key, "video": options.video_key}
        kinds = [kind for kind, values in columns.items() if values or keys[kind]]
        return "|".join(f"<{kind}>" for kind in kinds)

    def _read_items(
        self, messages: Sequence[Message], columns: Columns, near: str
    ) -> list[MediaItem]:
        """Read the item of each place in ``messages``, and put a ``media_part`` there."""
        column_values = {kind: iter(values) for kind, values in columns.items()}
        totals = Counter(media_kind(part) for part in media_parts(messages))
        numbers = Counter[str]()
        items = []
        for part in media_parts(messages):
            kind = str(media_kind(part))
            numbers[kind] += 1
            if kind not in self.tokens:
                raise ValueError(
                    f"the row has videos, and {self.named} reads none. Remove them, or use a model that does."
                )

            value = given_in(part)
            if value is None:
                value = next(column_values[kind])
            try:
                item = self.item(value, kind, near)
            except UNREADABLE as error:
                problem = str(error).rstrip(".")
                raise ValueError(
                    f"{kind} {numbers[kind]} of {totals[kind]} cannot be read: {problem}. Correct it, or remove the "
                    "row."
                ) from error

            items.append(self.seen.setdefault(item.key, item))
            part.clear()
            part.update(media_part(kind, item.key))
        return items


def has_media(fields: RowFields) -> bool:
    """True if a row has images or videos, in its columns or in the messages of its prompt."""
    if any(values_of(column) for column in fields.media.values()):
        return True
    turns = fields.prompt if isinstance(fields.prompt, list) else []
    return any(media_parts(turn for turn in turns if isinstance(turn, dict)))


def _put_in_front(messages: Sequence[Message], columns: Columns) -> None:
    """Begin the user's first message, or else the first one, with places for all items."""
    user_turns = (message for message in messages if message["role"] == "user")
    first = next(user_turns, messages[0])
    places = [{"type": kind} for kind in KINDS for _ in columns[kind]]
    first["content"] = places + first["content"]


def _require_same_numbers(messages: Sequence[Message], columns: Columns) -> None:
    """Refuse other numbers of places than of items, in the messages themselves and in columns."""
    n_places = Counter[str]()
    n_items = Counter({kind: len(values) for kind, values in columns.items()})
    for part in media_parts(messages):
        kind = str(media_kind(part))
        n_places[kind] += 1
        if given_in(part) is not None:
            n_items[kind] += 1

    for kind in columns:
        if n_places[kind] != n_items[kind]:
            raise ValueError(
                f"{n_places[kind]} places for {kind}s, and {n_items[kind]} {kind}s. Correct or remove the row."
            )


def _parts(message: Message, marks: str) -> list[dict[str, Any]]:
    """Divide a message into parts, its texts at the ``marks``; the assistant's texts have none."""
    content = message["content"]
    if not isinstance(content, list):
        content = [{"type": "text", "text": content or ""}]
    has_marks = marks != "" and message["role"] != "assistant"

    parts = []
    for part in content:
        if media_kind(part) or not has_marks:
            parts.append(dict(part))
            continue
        for piece in re.split(f"({marks})", part["text"]):
            if re.fullmatch(marks, piece):
                parts.append({"type": piece[1:-1]})
            else:
                parts.append({"type": "text", "text": piece})
    return [part for part in parts if media_kind(part) or part["text"]]
