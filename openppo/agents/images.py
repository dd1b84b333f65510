"""Images of an episode: each is processed once, and messages have its key in its place."""

import asyncio
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import aiohttp
from PIL import Image

from openppo.datasets.media_files import UNREADABLE, content_of, given_in
from openppo.datasets.templates import Message, shortened, text_of
from openppo.datasets.vision import Vision
from openppo.media import Media, MediaItem, media_key, media_kind, media_part, media_parts
from openppo.types import Prompt

_SECONDS_TO_FETCH, _MOST_BYTES = 30.0, 20 * 2**20


class Images:
    """Of the ``prompt``, and those that ``read`` finds in messages; ``fetches``: also from addresses."""

    def __init__(self, vision: Vision | None, prompt: Prompt, fetches: bool) -> None:
        self.vision, self.fetches, self.near = vision, fetches, prompt.source
        self.items = {item.key: item for item in prompt.media}
        self._keys: dict[bytes, int] = {}  # by what was given

    def of(self, messages: Sequence[Message]) -> Media:
        """Those of messages that were read, in the order of their places."""
        return tuple(self.items[media_key(part) or 0] for part in media_parts(messages))

    async def read(self, message: Message) -> Message:
        """``message`` as it was given, or with parts as content, in which ``media_part`` stands for an image.

        ``ValueError`` for an image that cannot be read.
        """
        if not any(media_parts([message])):
            return dict(message)
        if self.vision is None:
            raise ValueError("a message has an image, and --pretrain reads none here: leave it out.")
        parts = [await self._read(part) for part in message["content"]]
        return {**message, "content": parts}

    async def _read(self, part: Any) -> dict[str, Any]:
        if (kind := media_kind(part)) is None:
            return {"type": "text", "text": text_of([part])}
        if media_key(part) in self.items:
            return dict(part)
        if kind != "image":
            raise ValueError(f"{shortened(part)}: agents get images, no videos: give some of its frames.")
        return media_part(kind, (await self._item(given_in(part))).key)

    async def _item(self, value: Any) -> MediaItem:
        assert self.vision is not None
        try:
            is_address = isinstance(value, str) and value.startswith(("http://", "https://"))
            if is_address and not self.fetches:
                raise ValueError(f"{shortened(value)} is not fetched: send a data URL, or add --allow_image_urls.")
            content = await _fetched(value) if is_address else content_of(value, self.near)
            if isinstance(content, Image.Image):
                digest = sha256(f"{content.mode} {content.size}".encode() + content.tobytes()).digest()
            else:
                digest = sha256(content if isinstance(content, bytes | bytearray) else repr(content).encode()).digest()
            if digest not in self._keys:
                item = await asyncio.to_thread(self.vision.item, content)
                self.items[item.key], self._keys[digest] = item, item.key
        except UNREADABLE as error:
            raise ValueError(f"the image {shortened(value)} cannot be read: {error}.") from error
        return self.items[self._keys[digest]]


async def _fetched(address: str) -> bytes:
    """What an address gives; ``OSError`` if that fails or is too large."""
    limit = aiohttp.ClientTimeout(total=_SECONDS_TO_FETCH)
    try:
        async with aiohttp.ClientSession(timeout=limit) as client, client.get(address) as answer:
            answer.raise_for_status()
            content = await answer.content.read(_MOST_BYTES + 1)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise OSError(f"{type(error).__name__} {error}") from error
    if len(content) > _MOST_BYTES:
        raise OSError(f"more than {_MOST_BYTES} bytes")
    return content
