"""Images and videos among the parts of a chat message."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_SCHEME = "openppo:"
_KINDS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
"""Kinds of items by the type of a part."""


def media_kind(part: object) -> str | None:
    """Kind of a part of a message's content, in OpenAI's form or that of transformers; None for a text."""
    return _KINDS.get(str(part.get("type"))) if isinstance(part, dict) else None


def media_part(kind: str, key: int) -> dict[str, Any]:
    """Part that stands for an item, in OpenAI's form: clients pass it on unchanged."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": media_url(key)}}


def media_url(key: int) -> str:
    """Address that stands for an item in messages.

    >>> media_url(7)
    'openppo:7'
    """
    return f"{_SCHEME}{key}"


def media_key(part: Any) -> int | None:
    """Key of the item that a part stands for; None for an image of another form.

    >>> media_key(media_part("image", 7))
    7
    """
    if not isinstance(part, dict):
        return None
    address = part.get("image_url") or part.get("video_url")
    url = address.get("url") if isinstance(address, dict) else None
    if not isinstance(url, str) or re.fullmatch(rf"{_SCHEME}\d+", url) is None:
        return None
    return int(url.removeprefix(_SCHEME))


def media_parts(messages: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the parts of the messages' contents that are images or videos."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if media_kind(part))
