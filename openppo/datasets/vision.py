"""Images and videos for a model, prepared by its processor and chat template."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import RowsConfig
from openppo.datasets.image_families import check_images
from openppo.datasets.media_files import read_frames, read_image, thumbnail, within_pixels
from openppo.datasets.message_parts import media_kind, media_parts
from openppo.datasets.templates import Message, apply_template, encode_bare, encode_start, text_of
from openppo.media import MediaItem
from openppo.types import Prompt

_TEXT = "Zq7textqZ"
"""Text of trial messages: letters and a digit, which no template changes."""
_QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>")
"""Marks that Qwen's models expect around the token of an image or video."""
_NOT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
"""Outputs of a processor that describe the text, not an image or video."""


@dataclass(eq=False)
class Vision:
    """Reader of images and videos for a model; ``load`` loads its processor on first use.

    ``token_ids`` stand for images and videos in prompts; if empty, the model reads neither. ``named`` is what error
    messages call the reader.
    """

    load: Callable[[], Any] | None
    token_ids: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    options: RowsConfig
    named: str = "this command"

    @property
    def reads(self) -> bool:
        """True if the model can read images."""
        return self.load is not None and bool(self.token_ids)

    @cached_property
    def processor(self) -> Any:
        """Processor from transformers, which uses ``tokenizer``."""
        if self.load is None or not self.token_ids:
            raise ValueError(
                f"the row has images, and {self.named} reads none. Remove them, or use a model that does."
            )
        processor = self.load()
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = processor.chat_template
        processor.tokenizer = self.tokenizer
        return processor

    @cached_property
    def tokens(self) -> dict[str, str]:
        """Text, by kind, that the processor replaces with the tokens of an image or video."""
        image_token = getattr(self.processor, "boi_token", None) or self.processor.image_token
        tokens = {"image": str(image_token)}
        if getattr(self.processor, "video_processor", None) is not None:
            tokens["video"] = str(self.processor.video_token)
        return tokens

    @cached_property
    def placeholders(self) -> dict[str, str]:
        """Text, by kind, that stands for an item: as the chat template writes it, or the processor's token.

        Qwen's token needs marks around it; without them, adjacent items would be read as one.
        """
        text_part = {"type": "text", "text": _TEXT}
        before, _, after = self._try_template([text_part]).partition(_TEXT)
        ending = _TEXT + after

        has_marks = {*_QWEN_MARKS} <= self.tokenizer.get_vocab().keys()
        start, end = _QWEN_MARKS if has_marks else ("", "")

        placeholders = {}
        for kind, token in self.tokens.items():
            rendered = self._try_template([{"type": kind}, text_part])
            written = ""
            if rendered.startswith(before) and rendered.endswith(ending):
                written = rendered[len(before) : len(rendered) - len(ending)]
            placeholders[kind] = written if token in written else start + token + end
        return placeholders

    @cached_property
    def takes_parts(self) -> bool:
        """True if the chat template accepts a content that is a list of parts."""
        written = self._try_template([{"type": "image"}, {"type": "text", "text": _TEXT}])
        return self.tokens["image"] in written and _TEXT in written

    @cached_property
    def takes_texts(self) -> bool:
        """True if the chat template accepts a content that is a text."""
        return _TEXT in self._try_template(_TEXT)

    def _try_template(self, content: str | list[dict[str, str]]) -> str:
        """Render a user's message with the chat template; empty if the template rejects it."""
        with suppress(ValueError):
            return apply_template([{"role": "user", "content": content}], self.tokenizer)
        return ""

    def write(
        self,
        messages: Sequence[Message],
        render: Callable[[Callable[[Any], Any]], str],
        guarded: bool = False,
    ) -> str:
        """Write a conversation, with the processor's token for each image and video of ``messages``.

        ``render`` writes the messages, after it has converted each content with the function that it receives: to parts
        or to a text, as the chat template expects. With ``guarded``, tokens for media in texts are broken up.
        """
        n_places = len(list(media_parts(messages)))
        # A template that takes parts may write only texts for some roles.
        forms = (True, False) if self.takes_parts else (False,)

        text = ""
        for as_parts in forms:
            try:
                text = render(partial(self._content, as_parts=as_parts, guarded=guarded))
            except ValueError:
                if not as_parts:
                    raise
            if len(self._places.findall(text)) == n_places:
                break
        return text

    def _content(self, content: Any, as_parts: bool, guarded: bool) -> Any:
        """Convert a content to parts or to a text."""
        if not any(media_parts([{"content": content}])):
            text = text_of(content)
            if guarded:
                text = self.guarded(text)
            if as_parts and text and not self.takes_texts:
                return [{"type": "text", "text": text}]
            return text

        parts = []
        for part in content:
            kind = media_kind(part)
            if kind is not None:
                parts.append({"type": kind})
            elif guarded and "text" in part:
                parts.append({**part, "text": self.guarded(part["text"])})
            else:
                parts.append(part)
        if not as_parts:
            return self.as_text(parts)
        return [part for part in parts if part.get("text", True)]

    def as_text(self, content: str | list[dict[str, Any]]) -> str:
        """Write a content as a text in which placeholders stand for images and videos."""
        if isinstance(content, str):
            return content
        texts = []
        for part in content:
            kind = media_kind(part)
            texts.append(part["text"] if kind is None else self.placeholders[kind])
        return "".join(texts)

    def for_agents(self, config: Any, model: str) -> "Vision | None":
        """Return itself if its family is tested with images and its processor loads; else None, with a warning.

        ``model`` is the model's flag and name, for messages.
        """
        if not self.reads:
            return None
        try:
            check_images(config, model)
            _ = self.processor
        except ValueError as error:
            logger.warning("agents get no images: %s", error)
            return None
        return self

    def guarded(self, text: str) -> str:
        """Break up tokens for media in ``text`` with a space after their first character."""
        media_tokens = self.tokenizer.convert_ids_to_tokens([*self.token_ids])
        pattern = _any_of({*self.tokens.values(), *media_tokens})
        return pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    @cached_property
    def _places(self) -> re.Pattern[str]:
        return _any_of(self.tokens.values())

    def expanded(
        self, text: str, items: Sequence[MediaItem], cuts: Sequence[int] = ()
    ) -> tuple[str, list[int]]:
        """Replace each place in ``text`` with the tokens of its item.

        Returns the longer text, and the positions ``cuts`` in it. ``ValueError`` unless places and ``items`` match.
        """
        places = list(self._places.finditer(text))
        for kind, token in self.tokens.items():
            n_places = sum(place[0] == token for place in places)
            n_items = sum(item.kind == kind for item in items)
            if n_places != n_items:
                raise ValueError(
                    f"{n_places} places for {kind}s, and {n_items} {kind}s. Correct or remove the row."
                )

        moved = _moved_cuts(cuts, places, items)
        texts = iter([item.text for item in items])
        return self._places.sub(lambda _: next(texts), text), moved

    def encode(self, text: str, items: Sequence[MediaItem], start: bool = False) -> list[int]:
        """Encode a text with a place for each of ``items``; at the ``start`` with special tokens in front."""
        encode = encode_start if start else encode_bare
        whole, _ = self.expanded(text, items)
        return self.counted(encode(self.tokenizer, whole), items)

    def counted(self, ids: list[int], items: Sequence[MediaItem]) -> list[int]:
        """Return ``ids``; ``ValueError`` unless as many of them stand for media as ``items`` have tokens."""
        n_tokens = sum(ids.count(token_id) for token_id in self.token_ids)
        if n_tokens != sum(item.n_tokens for item in items):
            problem = f"{n_tokens} tokens stand for {len(items)} images"
            raise ValueError(f"{problem}: the row's text contains the token.")
        return ids

    def item(self, value: object, kind: str = "image", near: str = "") -> MediaItem:
        """Process ``value``, an image or a video in any form; a path may be relative to the file ``near``.

        Raises one of ``UNREADABLE`` for any other value.
        """
        options = self.options
        processor = self.processor
        if kind == "video":
            frames, fps = read_frames(value, options.video_fps, options.max_frames, near=near)
        else:
            frames = [read_image(value, near)]
            fps = 1.0

        fitted = [within_pixels(frame, options.min_pixels, options.max_pixels) for frame in frames]
        arguments = _video_arguments(fitted, fps) if kind == "video" else {"images": fitted}
        processed = processor(
            text=[self.tokens[kind]],
            add_special_tokens=False,
            return_tensors="pt",
            **arguments,
        )
        return self._item(processed, kind, thumbnail(frames[0]))

    def _item(self, processed: Any, kind: str, picture: str) -> MediaItem:
        """Make an item from one ``processed`` image or video."""
        ids = processed["input_ids"][0].tolist()
        counts = {token_id: ids.count(token_id) for token_id in self.token_ids if token_id in ids}
        if len(counts) != 1:
            raise ValueError(
                f"{type(self.processor).__name__} writes {len(counts)} kinds of tokens for an {kind}."
            )
        [(token_id, n_tokens)] = counts.items()

        as_written = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        text = str(self.tokenizer.decode(ids, **as_written))
        inputs = _inputs_of(processed)
        return MediaItem(
            inputs,
            token_id,
            n_tokens,
            key=_hash_of(kind, inputs),
            kind=kind,
            text=text,
            thumbnail=picture,
        )

    def blank(self, kinds: Iterable[str]) -> Prompt:
        """Return a prompt with one grey item of each of ``kinds``, for batches without any."""
        grey = Image.new("RGB", (64, 64), (128, 128, 128))
        values = {"image": grey, "video": [grey, grey]}
        items = tuple(self.item(values[kind], kind) for kind in kinds)
        text = "".join(self.placeholders[item.kind] for item in items)
        return Prompt(text, self.encode(text, items), media=items)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def _moved_cuts(
    cuts: Sequence[int], places: Sequence[re.Match[str]], items: Sequence[MediaItem]
) -> list[int]:
    """Return where positions ``cuts`` of a text are after ``items`` have replaced their ``places``."""
    added = []
    for place, item in zip(places, items, strict=True):
        n_characters = len(item.text) - len(place[0])
        added.append((place.start(), n_characters))

    moved = []
    for cut in cuts:
        n_before = sum(n_characters for start, n_characters in added if start < cut)
        moved.append(cut + n_before)
    return moved


def _inputs_of(processed: Any) -> dict[str, torch.Tensor]:
    """Return the inputs of the model's forward for one ``processed`` item."""
    inputs = {}
    for name, value in processed.items():
        if isinstance(value, torch.Tensor) and name not in _NOT_INPUTS:
            inputs[name] = value
    # Idefics 3 and SmolVLM put a batch dimension before that of tiles.
    if "pixel_attention_mask" in inputs:
        inputs = {name: tensor[0] for name, tensor in inputs.items()}
    return inputs


def _video_arguments(frames: list[Image.Image], fps: float) -> dict[str, Any]:
    """Return a processor's arguments for one video; a single frame is repeated, since Qwen's patches span two."""
    if len(frames) == 1:
        frames = frames * 2
    n_frames = len(frames)
    metadata = {
        "fps": fps,
        "total_num_frames": n_frames,
        "frames_indices": [*range(n_frames)],
        "duration": n_frames / fps,
    }
    return {"videos": [frames], "do_sample_frames": False, "video_metadata": [metadata]}


def _hash_of(kind: str, inputs: Mapping[str, torch.Tensor]) -> int:
    """Return a 48-bit hash of a model's inputs for an item, equal for equal items only."""
    digest = hashlib.sha256(kind.encode())
    for name, tensor in inputs.items():
        numbers = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        digest.update(name.encode() + numbers)
    return int.from_bytes(digest.digest()[:6], "big")
