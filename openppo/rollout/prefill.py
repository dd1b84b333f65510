"""Inputs of a prefill: padded ends of prompts with whole images."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openppo.media import Media, Tokens
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


def whole_images(model: Any, prompts: Sequence[Tokens], width: int) -> int:
    """Smallest width, ``width`` or more, at which the ends of ``prompts`` cut no image.

    The ids of ``prompts`` are ``distinct_ids``. If a ``model`` that ``reads_whole`` has an image to read, it is the
    length of the longest prompt.
    """
    reaches: list[tuple[int, int]] = []  # tokens behind an image, and tokens from its first on
    for prompt in prompts:
        ids = prompt.token_ids
        for image in prompt.media:
            key = -1 - image.key
            n_behind = ids[::-1].index(key)
            n_from_start = len(ids) - ids.index(key)
            reaches.append((n_behind, n_from_start))

    is_read = any(n_behind < width for n_behind, _ in reaches)
    if is_read and reads_whole(model):
        return max(len(prompt.token_ids) for prompt in prompts)

    while True:
        cut = [
            n_from_start for n_behind, n_from_start in reaches if n_behind < width < n_from_start
        ]
        if not cut:
            return width
        width = max(cut)


def padded_left(
    model: Any, prompts: Sequence[Tokens], width: int, inputs: dict[str, Any]
) -> tuple[Tensor, list[int]]:
    """Return left-padded ids (prompts, width) of the ends of ``prompts``, and position shifts.

    The ids of ``prompts`` are ``distinct_ids``. ``inputs`` of the forward get entries for the images in these ends. A
    shift is how far the positions of tokens that follow a prompt are above their places.
    """
    placeholders = {-1 - image.key: image.token_id for prompt in prompts for image in prompt.media}
    rows = [_with_placeholders(prompt.token_ids, placeholders) for prompt in prompts]
    ends = [([0] * width + row)[-width:] for row in rows]
    ids = torch.tensor(ends, device=inputs["position_ids"].device)
    shifts = [0] * len(rows)
    with_images = [i for i, prompt in enumerate(prompts) if prompt.media]
    if not with_images:
        return ids, shifts

    shown = [_images_in_end(prompt, width) for prompt in prompts]
    ends_read = ModelInputs(ids, torch.ones_like(ids, dtype=torch.bool), tuple(shown))
    inputs |= media_inputs(model, ends_read)

    whole = ModelInputs.of_ids([rows[i] for i in with_images], pad_token_id=0)
    whole = whole.with_media([prompts[i].media for i in with_images])
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


def _with_placeholders(token_ids: Sequence[int], placeholders: dict[int, int]) -> list[int]:
    """``token_ids`` with the placeholder tokens of images in place of their distinct ids."""
    return [placeholders.get(token_id, token_id) for token_id in token_ids]


def _images_in_end(prompt: Tokens, width: int) -> Media:
    """Images of ``prompt`` that occur in its last ``width`` ids."""
    end = prompt.token_ids[-width:]
    return tuple(image for image in prompt.media if -1 - image.key in end)
