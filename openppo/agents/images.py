"""Images of an episode, each processed once; messages have keys in their place."""

import asyncio
import io
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

from PIL import Image, UnidentifiedImageError

from openppo.agents.fetching import fetch
from openppo.datasets.media_files import UNREADABLE, content_of, given_in, read_image
from openppo.datasets.message_parts import media_key, media_kind, media_part, media_parts
from openppo.datasets.templates import Message, shortened, text_of
from openppo.datasets.vision import Vision
from openppo.media import Media, MediaItem
from openppo.types import Prompt

_MOST_PIXELS = 2**26


class Images:
    """Images of the ``prompt``, and those that ``read`` finds in messages; with ``fetches`` from URLs too."""

    def __init__(self, vision: Vision | None, prompt: Prompt, fetches: bool) -> None:
        self.vision = vision
        self.fetches = fetches
        self.near = prompt.source
        self.items = {item.key: item for item in prompt.media}
        # Fetched bytes by URL, items by digest.
        self._work: dict[str | bytes, asyncio.Task[Any]] = {}

    def of(self, messages: Sequence[Message]) -> Media:
        """Images of messages that were read, in their order there."""
        return tuple(self.items[media_key(part) or 0] for part in media_parts(messages))

    async def read(self, message: Message) -> Message:
        """Return a copy of ``message``, with its images processed.

        Content with images becomes a list of parts, with a ``media_part`` for each image. ``ValueError`` for an image
        that cannot be read.
        """
        if not any(media_parts([message])):
            return dict(message)
        if self.vision is None:
            raise ValueError(
                "a message has an image, and --pretrain reads none here: leave it out."
            )
        return {**message, "content": [await self._read(part) for part in message["content"]]}

    async def _read(self, part: Any) -> dict[str, Any]:
        kind = media_kind(part)
        if kind is None:
            return {"type": "text", "text": text_of([part])}
        if media_key(part) in self.items:
            return dict(part)
        if kind != "image":
            raise ValueError(
                f"{shortened(part)}: agents get images, no videos: give some of its frames."
            )

        value = given_in(part)
        try:
            item = await self._item(value)
        except UNREADABLE as error:
            raise ValueError(
                f"the image {shortened(value)} cannot be read: {str(error).rstrip('.')}."
            ) from error
        self.items[item.key] = item
        return media_part(kind, item.key)

    async def _item(self, value: Any) -> MediaItem:
        assert self.vision is not None
        if isinstance(value, str) and value.startswith(("http://", "https://")):
            if not self.fetches:
                raise ValueError("it is not fetched: send a data URL, or add --allow_image_urls")
            content: Any = await self._once(value, lambda: fetch(value))
        else:
            content = content_of(value, self.near)

        if isinstance(content, bytes | bytearray):
            digest = sha256(content).digest()
        else:
            content = read_image(content)
            digest = sha256(f"{content.size}".encode() + content.tobytes()).digest()

        def process() -> Coroutine[Any, Any, MediaItem]:
            return asyncio.to_thread(self._processed, content)

        item: MediaItem = await self._once(digest, process)
        return item

    def _processed(self, content: Any) -> MediaItem:
        assert self.vision is not None
        if isinstance(content, bytes | bytearray):
            check_pixels(content)
        return self.vision.item(content)

    async def _once(self, key: str | bytes, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Return the result of ``work``, which runs once for a ``key`` unless it fails."""
        task = self._work.get(key)
        if task is None:
            task = asyncio.ensure_future(work())
            self._work[key] = task
        try:
            return await asyncio.shield(task)
        except UNREADABLE:
            self._work.pop(key, None)
            raise


def check_pixels(content: bytes | bytearray) -> None:
    """Raise ``ValueError`` for an image of too many pixels to be decoded; only its header is read."""
    with suppress(UnidentifiedImageError), Image.open(io.BytesIO(content)) as image:
        if image.width * image.height > _MOST_PIXELS:
            size = f"{image.width} x {image.height} pixels"
            raise ValueError(
                f"it has {size}, and messages may have images of {_MOST_PIXELS}: send a smaller one"
            )
