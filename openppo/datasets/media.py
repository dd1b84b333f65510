"""Images of data rows, and prompts with them as the model's processor writes and reads them."""

import base64
import binascii
import hashlib
import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import PreTrainedTokenizerBase

from openppo.config import RowsConfig
from openppo.datasets.row_formats import RowFields
from openppo.datasets.templates import (
    Message,
    TokenExample,
    as_messages,
    as_text,
    check_tools,
    encode_bare,
    end_with_eos,
    fill_template,
    is_image,
    render_chat,
    render_prompt,
    shortened,
)
from openppo.media import MediaItem
from openppo.types import Prompt

T = TypeVar("T", Prompt, TokenExample)
MARK = "<image>"
"""Stands for an image in the text of a row."""
_TEXT = "Zq7textqZ"  # letters and a digit, which no template changes
_NOT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def read_images(value: object, near: str = "") -> list[Image.Image]:
    """Images of a column: one or a list of them, each as bytes, base64, ``datasets.Image``, PIL's, or a path.

    A path is looked for in the working directory, then beside the file ``near``. ``ValueError`` for what is no image;
    nothing is fetched.
    """
    values = [one for one in (value if isinstance(value, list) else [value]) if one not in (None, "")]
    images = []
    for number, one in enumerate(values, start=1):
        try:
            images.append(_read(one, near))
        except (OSError, UnidentifiedImageError, binascii.Error, Image.DecompressionBombError) as error:
            what = f"image {number} of {len(values)} cannot be read: {error}"
            raise ValueError(f"{what}. Correct it, or remove the row.") from error
    return images


def _read(value: object, near: str) -> Image.Image:
    if isinstance(value, dict):
        given = next((value[name] for name in ("bytes", "image", "url", "path", "image_url") if value.get(name)), None)
        return _read(given, near)
    if isinstance(value, str):
        value = _content(value, near)
    if isinstance(value, bytes | bytearray):
        value = Image.open(io.BytesIO(value))
    if not isinstance(value, Image.Image):
        forms = "bytes, base64, a path, or an image of datasets or PIL"
        raise ValueError(f"{shortened(value)} is no image: give {forms}, or remove the row.")
    return ImageOps.exif_transpose(value).convert("RGB")


def _content(text: str, near: str) -> bytes:
    if re.match(r"https?://", text):
        raise ValueError(f"{shortened(text)} is an address, and nothing is fetched: download it, and give its path.")
    if text.startswith("data:"):
        return base64.b64decode(text.partition(",")[2], validate=True)
    for path in (Path(text), Path(near).parent / text, Path(near) / text):
        with suppress(OSError):  # a name that is too long is base64
            if path.is_file():
                return path.read_bytes()
    if re.search(r"\.\w{3,4}$", text):
        raise FileNotFoundError(f"there is no file {text}")
    return base64.b64decode(text, validate=True)


def within_pixels(image: Image.Image, least: int | None, most: int | None) -> Image.Image:
    """``image`` scaled so that it has at least and at most so many pixels; its shape stays."""
    n_pixels = image.width * image.height
    wanted = min(max(n_pixels, least or 0), most or max(n_pixels, least or 0))
    if wanted == n_pixels:
        return image
    factor, up = math.sqrt(wanted / n_pixels), wanted > n_pixels
    rounded = math.ceil if up else math.floor
    return image.resize((max(1, rounded(image.width * factor)), max(1, rounded(image.height * factor))))


@dataclass(eq=False)
class Vision:
    """Makes prompts with images, of a model whose processor ``load`` loads when the first row has some.

    ``token_ids`` are those that stand for images. None of them: the model reads no images.
    """

    load: Callable[[], Any] | None
    token_ids: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    options: RowsConfig
    named: str = "this command"
    seen: dict[str, MediaItem] = field(default_factory=dict)

    @cached_property
    def processor(self) -> Any:
        """Of transformers, with this tokenizer."""
        if self.load is None or not self.token_ids:
            raise ValueError(f"the row has images, and {self.named} reads none. Remove them, or use a model that does.")
        processor = self.load()
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = processor.chat_template
        processor.tokenizer = self.tokenizer
        return processor

    @cached_property
    def token(self) -> str:
        """What the processor replaces by the tokens of an image."""
        return str(getattr(self.processor, "boi_token", None) or self.processor.image_token)

    @cached_property
    def placeholder(self) -> str:
        """Text that stands for an image: as the chat template writes it, or the processor's token."""
        text = {"type": "text", "text": _TEXT}
        before, _, after = self._tried([text]).partition(_TEXT)
        beside = self._tried([{"type": "image"}, text])
        around = beside.startswith(before) and beside.endswith(_TEXT + after)
        written = beside[len(before) : len(beside) - len(_TEXT + after)] if around else ""
        return written if self.token in written else self.token

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the chat template writes a content that is a list of parts."""
        written = self._tried([{"type": "image"}, {"type": "text", "text": _TEXT}])
        return self.token in written and _TEXT in written

    def _tried(self, content: str | list[dict[str, str]]) -> str:
        """A user's message as the template writes it; empty if it refuses that."""
        with suppress(ValueError):
            return render_chat([{"role": "user", "content": content}], self.tokenizer)
        return ""

    def render(self, fields: RowFields) -> Prompt:
        """``render_prompt``, of a row that may have images in its column or its messages."""
        chat, reads = self.options.apply_chat_template, self.load is not None and bool(self.token_ids)
        if chat and reads and not self.tokenizer.chat_template:
            _ = self.processor  # which may have one
        if not has_images(fields):
            if chat and reads and _TEXT not in self._tried(_TEXT) and self.takes_parts:
                text = self._written(as_messages(fields.prompt, "user", self.options.input_template), fields, True)
                return self.without_images(Prompt(text, encode_bare(self.tokenizer, text)), text)
            prompt = render_prompt(fields.prompt, self.tokenizer, self.options, fields.tools)
            return self.without_images(prompt, prompt.text)
        near, images = fields.source, read_images(fields.images, fields.source)
        messages: list[Message] | None = None
        if chat:
            check_tools(fields.tools, self.tokenizer)
            messages, images = _placed(as_messages(fields.prompt, "user", self.options.input_template), images, near)
            text = self._written(messages, fields, True)
        else:
            asked = fill_template(fields.prompt, self.options.input_template)
            text = _with_marks(asked, len(images)).replace(MARK, self.placeholder)
        return self._processed(Prompt(text, [], messages=messages), images)

    def without_images(self, made: T, text: str = "") -> T:
        """``made``, a prompt or example; ``ValueError`` if its text has a place for an image."""
        if self.token_ids and (MARK in text or not {*self.token_ids}.isdisjoint(made.token_ids)):
            what = "its text has a place for an image, and the row has none"
            raise ValueError(f"{what}. Add the image, name its column with --image_key, or remove the row.")
        return made

    def render_response(self, fields: RowFields) -> TokenExample:
        """A prompt with images and the response to it, ending with EOS; the response and the EOS are targets."""
        prompt, rest = self.render(fields), fields.response
        if prompt.messages is not None:
            whole = self._written([*prompt.messages, *as_messages(rest, "assistant")], fields, False)
            if not whole.startswith(prompt.text):
                raise ValueError("the chat template writes the prompt otherwise once a response follows. Use another.")
            rest = whole.removeprefix(prompt.text)
        ids = end_with_eos(self.tokenizer, encode_bare(self.tokenizer, as_text(rest)))
        n_prompt = len(prompt.token_ids)
        self.without_images(TokenExample(ids, []))
        return TokenExample(prompt.token_ids + ids, [False] * n_prompt + [True] * len(ids), prompt.media)

    def _written(self, messages: Sequence[Message], fields: RowFields, for_generation: bool) -> str:
        """The conversation, with what the template writes for an image at each of their places."""
        written = [{**m, "content": self._content(m)} for m in messages]
        return render_chat(written, self.tokenizer, for_generation=for_generation, tools=fields.tools)

    def _content(self, message: Message) -> Any:
        """Content as the template takes it; of the assistant's, no part is a place for an image."""
        content, is_own = message["content"] or "", message["role"] == "assistant"
        if not self.takes_parts:
            return content if is_own else content.replace(MARK, self.placeholder)
        texts = [content] if is_own else content.split(MARK)
        parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
        return [part for part in parts if part.get("text", True)]

    def _processed(self, prompt: Prompt, images: list[Image.Image]) -> Prompt:
        """``prompt`` with token ids and items, of which it names as many as there are images."""
        if (n_marks := prompt.text.count(self.token)) != len(images):
            raise ValueError(f"{n_marks} places for images, and {len(images)} images. Correct or remove the row.")
        images = [within_pixels(image, self.options.min_pixels, self.options.max_pixels) for image in images]
        special = not self.options.apply_chat_template
        whole = self.processor(text=[prompt.text], images=images, add_special_tokens=special, return_tensors="pt")
        ids = whole["input_ids"][0].tolist()
        if special and len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:  # the response follows
            ids = ids[:-1]
        items = tuple(self._item(whole if len(images) == 1 else None, image) for image in images)
        n_tokens = sum(ids.count(token_id) for token_id in self.token_ids)
        if n_tokens != sum(item.n_tokens for item in items):
            raise ValueError(f"{n_tokens} tokens stand for {len(images)} images: its text names the token itself.")
        return replace(prompt, token_ids=ids, media=items)

    def _item(self, made: Any, image: Image.Image) -> MediaItem:
        """``image`` alone, or as it was ``made`` within its prompt."""
        if made is None:
            made = self.processor(text=[self.placeholder], images=[image], return_tensors="pt")
        inputs = {name: x for name, x in made.items() if isinstance(x, torch.Tensor) and name not in _NOT_INPUTS}
        if "pixel_attention_mask" in inputs:  # Idefics 3 and SmolVLM: of a row, its images' tiles
            inputs = {name: x[0] for name, x in inputs.items()}
        ids = made["input_ids"][0].tolist()
        counts = {token_id: ids.count(token_id) for token_id in self.token_ids if token_id in ids}
        if len(counts) != 1:
            raise ValueError(f"{type(self.processor).__name__} writes {len(counts)} kinds of tokens for an image.")
        (token_id, n_tokens) = next(iter(counts.items()))
        digest = hashlib.sha256()
        for name, x in inputs.items():
            digest.update(name.encode() + x.contiguous().view(torch.uint8).numpy().tobytes())
        item = MediaItem(inputs, token_id, n_tokens, int.from_bytes(digest.digest()[:7], "big"))
        return self.seen.setdefault(digest.hexdigest(), item)


def has_images(fields: RowFields) -> bool:
    """Whether a row has images, in its column or in the messages of its prompt."""
    given = fields.images if isinstance(fields.images, list) else [fields.images]
    if any(one not in (None, "") for one in given):
        return True
    turns = fields.prompt if isinstance(fields.prompt, list) else []
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    return any(is_image(part) for content in contents if isinstance(content, list) for part in content)


def _placed(messages: list[Message], images: list[Image.Image], near: str) -> tuple[list[Message], list[Image.Image]]:
    """Messages with texts, in which ``MARK`` stands for each image, and the images in the order of their places.

    ``images`` are those of a column: they take the places without one of their own; without any places the first
    message of the user begins with them.
    """
    column, placed, made = iter(images), list[Image.Image](), list[Message]()
    for message in messages:
        texts = []
        for part in message["content"] if isinstance(message["content"], list) else [message["content"] or ""]:
            text = part if isinstance(part, str) else MARK if is_image(part) else str(part["text"])
            own = read_images([part], near) if not isinstance(part, str) and _is_given(part) else []
            placed += own or [image for _, image in zip(re.findall(MARK, text), column, strict=False)]
            texts.append(text)
        made.append({**message, "content": "".join(texts)})
    if not any(MARK in message["content"] for message in made):
        first = next((i for i, message in enumerate(made) if message["role"] == "user"), 0)
        made[first] = {**made[first], "content": MARK * len(images) + made[first]["content"]}
    return made, [*placed, *column]


def _is_given(part: dict[str, Any]) -> bool:
    return any(part.get(name) for name in ("image", "image_url", "url", "path", "bytes"))


def _with_marks(text: str, n_images: int) -> str:
    """``text``; without a place for an image, with all of them in front."""
    return text if MARK in text else MARK * n_images + text
