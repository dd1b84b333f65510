"""Inputs of a prefill: padded ends of prompts with whole images."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openppo.media import Media
from openppo.model_inputs import ModelInputs
from openppo.models.media_inputs import media_inputs, rope_positions

_PREFILL_ON_CPU = 4096
_PREFILL_ON_GPU = 16384


def prefill_tokens(on_cpu: bool) -> int:
    """Most prompt tokens of one forward, padding included; a single prompt may have more."""
    return _PREFILL_ON_CPU if on_cpu else _PREFILL_ON_GPU


def reads_whole(model: Any) -> bool:
    """True if images attend both ways, so that prompts with new images are read from their start."""
    return "token_type_ids" in inspect.signature(type(model).forward).parameters


def whole_images(
    model: Any, prompts: Sequence[Sequence[int]], media: Sequence[Media], width: int
) -> int:
    """Smallest width, ``width`` or more, at which the ends of ``prompts`` cut no image.

    ``prompts`` are ``distinct_ids``. If a ``model`` that ``reads_whole`` has an image to read, it is the length of the
    longest prompt.
    """
    reaches: list[tuple[int, int]] = []  # tokens behind an image, and tokens from its first on
    for ids, images in zip(prompts, media, strict=True):
        for image in images:
            key = -1 - image.key
            n_behind = ids[::-1].index(key)
            n_from_start = len(ids) - ids.index(key)
            reaches.append((n_behind, n_from_start))

    is_read = any(n_behind < width for n_behind, _ in reaches)
    if is_read and reads_whole(model):
        return max(map(len, prompts))

    while True:
        cut = [
            n_from_start for n_behind, n_from_start in reaches if n_behind < width < n_from_start
        ]
        if not cut:
            return width
        width = max(cut)


def padded_left(
    model: Any,
    prompts: Sequence[Sequence[int]],
    media: Sequence[Media],
    width: int,
    inputs: dict[str, Any],
) -> tuple[Tensor, list[int]]:
    """Return left-padded ids (prompts, width) of the ends of ``prompts``, and position shifts.

    ``prompts`` are ``distinct_ids``. ``inputs`` of the forward get entries for those of ``media`` that lie in these
    ends. A shift is how far the positions of tokens that follow a prompt are above their places.
    """
    token_ids = {-1 - image.key: image.token_id for images in media for image in images}
    rows = [_with_tokens(prompt, token_ids) for prompt in prompts]
    ends = [([0] * width + row)[-width:] for row in rows]
    ids = torch.tensor(ends, device=inputs["position_ids"].device)
    shifts = [0] * len(rows)
    with_images = [i for i, images in enumerate(media) if images]
    if not with_images:
        return ids, shifts

    shown = [
        _images_in(images, prompt[-width:]) for images, prompt in zip(media, prompts, strict=True)
    ]
    ends_read = ModelInputs(ids, torch.ones_like(ids, dtype=torch.bool), tuple(shown))
    inputs |= media_inputs(model, ends_read)

    whole = ModelInputs.of_ids([rows[i] for i in with_images], pad_token_id=0)
    whole = whole.with_media([media[i] for i in with_images])
    positions = rope_positions(model, whole)
    if positions is None:
        return ids, shifts

    inputs["position_ids"] = inputs["position_ids"].expand(3, -1, -1).clone()
    for k, i in enumerate(with_images):
        length = len(rows[i])
        row_positions = positions[:, k, :length]
        inputs["position_ids"][:, i, -length:] = row_positions[:, -width:]
        shifts[i] = int(row_positions.max()) + 1 - length
    return ids, shifts


def _with_tokens(prompt: Sequence[int], token_ids: dict[int, int]) -> list[int]:
    """``prompt`` with the placeholder tokens of its images in place of their distinct ids."""
    return [token_ids.get(token, token) for token in prompt]


def _images_in(images: Media, ids: Sequence[int]) -> Media:
    """Those of ``images`` that occur in ``ids``."""
    return tuple(image for image in images if -1 - image.key in ids)
