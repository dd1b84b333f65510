"""Images and videos of a prompt, as its model reads them, and their places among its token ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from torch import Tensor

KINDS = ("image", "video")
"""Kinds of items; a model's config names the token of each, ``image_token_id`` and ``video_token_id``."""


@dataclass(frozen=True, eq=False)
class MediaItem:
    """A processed image or video: ``inputs`` by their names in the model's forward, on the CPU.

    The first dimension of each input counts images, tiles or patches; items of a batch are concatenated along it.
    ``n_tokens`` tokens ``token_id`` of the prompt stand for the item; ``text`` is the processor's text for them, with
    the marks around them. Items of one ``key`` have equal inputs. ``thumbnail`` is a data URL of a small picture, for
    people.
    """

    inputs: dict[str, Tensor]
    token_id: int
    n_tokens: int
    key: int
    kind: str = "image"
    text: str = ""
    thumbnail: str = field(default="", repr=False)


Media = tuple[MediaItem, ...]
"""Items of one prompt, in the order of their places."""


class Tokens(Protocol):
    """A prompt, segment or example: its token ids, and the images whose placeholders are among them."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def media(self) -> Media: ...


@dataclass(frozen=True)
class TokenIds:
    """``Tokens`` and nothing else.

    >>> distinct_ids(TokenIds([5, 6]))
    [5, 6]
    """

    token_ids: Sequence[int]
    media: Media = ()


def distinct_ids(tokens: Tokens) -> list[int]:
    """Replace ids that stand for media by numbers below 0, equal for equal items.

    Rows share a beginning exactly if these numbers do.
    """
    ids = list(tokens.token_ids)
    for item, places in item_places(tokens):
        for place in places:
            ids[place] = -1 - item.key
    return ids


def item_places(tokens: Tokens) -> Iterator[tuple[MediaItem, list[int]]]:
    """Yield each item with the places of its tokens."""
    placeholders = {item.token_id for item in tokens.media}
    unassigned = {
        token_id: iter(_places_of(token_id, tokens.token_ids)) for token_id in placeholders
    }
    for item in tokens.media:
        yield item, list(islice(unassigned[item.token_id], item.n_tokens))


def _places_of(token_id: int, token_ids: Sequence[int]) -> list[int]:
    return [place for place, other in enumerate(token_ids) if other == token_id]
