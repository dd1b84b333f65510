"""Content of a data row, whatever its format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openppo.datasets.templates import Message, Tools


@dataclass(frozen=True)
class RowFields:
    """Content of a row in any format; None for missing parts.

    ``prompt``, ``response``, ``chosen`` and ``rejected`` are texts or lists of chat messages; without a prompt,
    ``chosen`` and ``rejected`` are whole. ``conversation`` is a whole chat, ``whole`` a text without a response. For
    process supervision ``response`` is a text with placeholders or a list of steps, and ``label`` the judgements. A
    ranking has its responses in ``ranked``, and in ``label`` their scores. ``tools`` come from column ``--tools_key``.
    ``media`` come from ``--image_key`` and ``--video_key``, by kind; their paths may be beside the ``source``.
    """

    prompt: Any = None
    response: Any = None
    chosen: Any = None
    rejected: Any = None
    label: Any = None
    conversation: list[Message] | None = None
    whole: Any = None
    ranked: Any = None
    tools: Tools | None = None
    media: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
