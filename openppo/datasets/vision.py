"""What a model's processor and chat template make of images and videos."""

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

_TEXT = "Zq7textqZ"  # letters and a digit, which no template changes
_NOT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@dataclass(eq=False)
class Vision:
    """Images and videos of a model, whose processor ``load`` loads when there are some.

    ``token_ids`` are those that stand for them. None of them: the model reads none.
    """

    load: Callable[[], Any] | None
    token_ids: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    options: RowsConfig
    named: str = "this command"

    @property
    def reads(self) -> bool:
        """Whether the model may read images."""
        return self.load is not None and bool(self.token_ids)

    @cached_property
    def processor(self) -> Any:
        """Of transformers, with this tokenizer."""
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
        """What the processor replaces by the tokens of an item, by its kind."""
        made = {
            "image": str(getattr(self.processor, "boi_token", None) or self.processor.image_token)
        }
        if getattr(self.processor, "video_processor", None) is not None:
            made["video"] = str(self.processor.video_token)
        return made

    @cached_property
    def placeholders(self) -> dict[str, str]:
        """Text that stands for an item of each kind: as the chat template writes it, or the processor's token.

        Qwen's has marks around it, without which neighbours are taken for one.
        """
        text, around = {"type": "text", "text": _TEXT}, ("<|vision_start|>", "<|vision_end|>")
        before, _, after = self._tried([text]).partition(_TEXT)
        start, end = around if {*around} <= self.tokenizer.get_vocab().keys() else ("", "")
        made = {kind: start + token + end for kind, token in self.tokens.items()}
        for kind, token in self.tokens.items():
            beside = self._tried([{"type": kind}, text])
            if beside.startswith(before) and beside.endswith(_TEXT + after):
                written = beside[len(before) : len(beside) - len(_TEXT + after)]
                made[kind] = written if token in written else made[kind]
        return made

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the chat template writes a content that is a list of parts."""
        written = self._tried([{"type": "image"}, {"type": "text", "text": _TEXT}])
        return self.tokens["image"] in written and _TEXT in written

    @cached_property
    def takes_texts(self) -> bool:
        """Whether it writes a content that is a text."""
        return _TEXT in self._tried(_TEXT)

    def _tried(self, content: str | list[dict[str, str]]) -> str:
        """A user's message as the template writes it; empty if it refuses that."""
        with suppress(ValueError):
            return apply_template([{"role": "user", "content": content}], self.tokenizer)
        return ""

    def write(
        self,
        messages: Sequence[Message],
        render: Callable[[Callable[[Any], Any]], str],
        guarded: bool = False,
    ) -> str:
        """Text of a conversation, with the processor's token for each image and video of ``messages``.

        ``render`` writes them, with contents as its argument makes them: parts or texts, as the chat template wants,
        and texts ``guarded``.
        """
        n, text = sum(1 for _ in media_parts(messages)), ""
        for as_parts in (
            (True, False) if self.takes_parts else (False,)
        ):  # of some roles it may write only texts
            try:
                text = render(partial(self._content, as_parts=as_parts, guarded=guarded))
            except ValueError:
                if not as_parts:
                    raise
            if len(self._places.findall(text)) == n:
                break
        return text

    def _content(self, content: Any, as_parts: bool, guarded: bool) -> Any:
        """A content as the chat template gets it."""
        if not any(media_parts([{"content": content}])):
            text = self.guarded(text_of(content)) if guarded else text_of(content)
            return (
                [{"type": "text", "text": text}]
                if as_parts and text and not self.takes_texts
                else text
            )
        kinds = map(media_kind, content)
        parts = [
            {"type": kind} if kind else part for kind, part in zip(kinds, content, strict=True)
        ]
        parts = [
            part | {"text": self.guarded(part["text"])} if guarded and "text" in part else part
            for part in parts
        ]
        return (
            [part for part in parts if part.get("text", True)] if as_parts else self.as_text(parts)
        )

    def as_text(self, content: str | list[dict[str, Any]]) -> str:
        """A content as a text in which placeholders stand for images and videos."""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return "".join(
            self.placeholders[kind] if (kind := media_kind(part)) else part["text"]
            for part in parts
        )

    def for_agents(self, config: Any, model: str) -> "Vision | None":
        """Itself if this can read images: the family was compared, and its processor loads; else None, with a warning.

        ``model`` is a flag and a name.
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
        """``text``, with a space after the first character of what is written like a token that stands for media."""
        written = {*self.tokens.values(), *self.tokenizer.convert_ids_to_tokens([*self.token_ids])}
        return re.sub(
            "|".join(map(re.escape, written)), lambda place: f"{place[0][0]} {place[0][1:]}", text
        )

    @cached_property
    def _places(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tokens.values())))

    def expanded(
        self, text: str, items: Sequence[MediaItem], cuts: Sequence[int] = ()
    ) -> tuple[str, list[int]]:
        """``text`` with the tokens of each of ``items`` in its place, and where the positions ``cuts`` are in that.

        ``ValueError`` for other numbers of places.
        """
        places = list(self._places.finditer(text))
        for kind, token in self.tokens.items():
            n_places, n_items = (
                sum(place[0] == token for place in places),
                sum(item.kind == kind for item in items),
            )
            if n_places != n_items:
                raise ValueError(
                    f"{n_places} places for {kind}s, and {n_items} {kind}s. Correct or remove the row."
                )
        longer = [
            (p.start(), len(item.text) - len(p[0])) for p, item in zip(places, items, strict=True)
        ]
        moved = [cut + sum(more for start, more in longer if start < cut) for cut in cuts]
        found = iter(items)
        return self._places.sub(lambda _: next(found).text, text), moved

    def encode(self, text: str, items: Sequence[MediaItem], start: bool = False) -> list[int]:
        """Token ids of a text with a place for each of ``items``; at the ``start`` with special tokens in front."""
        encode = encode_start if start else encode_bare
        (whole, _) = self.expanded(text, items)
        return self.counted(encode(self.tokenizer, whole), items)

    def counted(self, ids: list[int], items: Sequence[MediaItem]) -> list[int]:
        """``ids``; ``ValueError`` if more or fewer of them stand for media than of ``items``."""
        n_tokens = sum(ids.count(token_id) for token_id in self.token_ids)
        if n_tokens != sum(item.n_tokens for item in items):
            raise ValueError(
                f"{n_tokens} tokens stand for {len(items)} images: its text names the token itself."
            )
        return ids

    def item(self, value: object, kind: str = "image", near: str = "") -> MediaItem:
        """``value``, an image or a video in any form, processed; a path may be beside the file ``near``.

        One of ``UNREADABLE`` for what is none.
        """
        options, processor = self.options, self.processor
        if kind == "video":
            frames, fps = read_frames(value, options.video_fps, options.max_frames, near=near)
        else:
            frames, fps = [read_image(value, near)], 1.0
        fitted = [within_pixels(frame, options.min_pixels, options.max_pixels) for frame in frames]
        given = _video_inputs(fitted, fps) if kind == "video" else {"images": fitted}
        made = processor(
            text=[self.tokens[kind]], add_special_tokens=False, return_tensors="pt", **given
        )
        return self._item(made, kind, thumbnail(frames[0]))

    def _item(self, made: Any, kind: str, picture: str) -> MediaItem:
        """What the processor ``made`` of one image or video."""
        inputs = {
            name: x
            for name, x in made.items()
            if isinstance(x, torch.Tensor) and name not in _NOT_INPUTS
        }
        if "pixel_attention_mask" in inputs:  # Idefics 3 and SmolVLM: of a row, its images' tiles
            inputs = {name: x[0] for name, x in inputs.items()}
        ids = made["input_ids"][0].tolist()
        counts = {token_id: ids.count(token_id) for token_id in self.token_ids if token_id in ids}
        if len(counts) != 1:
            raise ValueError(
                f"{type(self.processor).__name__} writes {len(counts)} kinds of tokens for an {kind}."
            )
        ((token_id, n_tokens),) = counts.items()
        as_written = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        text = str(self.tokenizer.decode(ids, **as_written))
        return MediaItem(
            inputs,
            token_id,
            n_tokens,
            key=_number_of(kind, inputs),
            kind=kind,
            text=text,
            thumbnail=picture,
        )

    def blank(self, kinds: Iterable[str]) -> Prompt:
        """A prompt of a grey item of each of ``kinds``, for batches that have none."""
        grey = Image.new("RGB", (64, 64), (128, 128, 128))
        items = tuple(self.item([grey, grey] if kind == "video" else grey, kind) for kind in kinds)
        text = "".join(self.placeholders[item.kind] for item in items)
        return Prompt(text, self.encode(text, items), media=items)


def _video_inputs(frames: list[Image.Image], fps: float) -> dict[str, Any]:
    """Arguments of a processor for one video; a single frame is given twice, since Qwen's patches are of two."""
    frames = frames * 2 if len(frames) == 1 else frames
    about = {"fps": fps, "total_num_frames": len(frames), "frames_indices": [*range(len(frames))]}
    about["duration"] = len(frames) / fps
    return {"videos": [frames], "do_sample_frames": False, "video_metadata": [about]}


def _number_of(kind: str, inputs: Mapping[str, torch.Tensor]) -> int:
    """Equal for equal items, and for no others: 48 bits of a hash of all that the model reads."""
    digest = hashlib.sha256(kind.encode())
    for name, x in inputs.items():
        digest.update(name.encode() + x.contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:6], "big")
