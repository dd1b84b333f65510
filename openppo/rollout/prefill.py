"""Inputs of a prefill: padded prompts, with images that are whole."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openppo.media import Media, model_inputs, rope_positions
from openppo.models.padding import pad_right

_PREFILL_ON_CPU, _PREFILL_ON_GPU = 4096, 16384


def prefill_tokens(on_cpu: bool) -> int:
    """Prompt tokens of one forward pass, padding included, unless a single prompt has more."""
    return _PREFILL_ON_CPU if on_cpu else _PREFILL_ON_GPU


def reads_whole(model: Any) -> bool:
    """Whether images attend both ways, which a forward gives them only where it reads a prompt from its start."""
    return "token_type_ids" in inspect.signature(type(model).forward).parameters


def whole_images(
    model: Any, prompts: Sequence[Sequence[int]], media: Sequence[Media], width: int
) -> int:
    """``width`` or more, so that no image is cut before the last tokens of ``prompts``, which are ``distinct_ids``.

    With an image of a ``model`` that ``reads_whole`` it is all tokens.
    """
    reaches = []  # tokens of a prompt that are behind an image, and those from its first on
    for ids, of_prompt in zip(prompts, media, strict=True):
        keys = [-1 - item.key for item in of_prompt]
        reaches += [(ids[::-1].index(key), len(ids) - ids.index(key)) for key in keys]
    if any(behind < width for behind, _ in reaches) and reads_whole(model):
        return max(map(len, prompts))
    while cut := [first for behind, first in reaches if behind < width < first]:
        width = max(cut)
    return width


def padded_left(
    model: Any,
    prompts: Sequence[Sequence[int]],
    media: Sequence[Media],
    width: int,
    where: dict[str, Any],
) -> tuple[Tensor, list[int]]:
    """Ids (prompts, width) of the last tokens of ``prompts``, which are ``distinct_ids``, padded with 0 on the left.

    Adds to ``where``, the inputs of a forward over them, what ``model`` gets for those of their ``media`` that are
    among these. Also returns how far the positions of tokens that follow are above their places.
    """
    real = {-1 - item.key: item.token_id for of_prompt in media for item in of_prompt}
    rows = [[real.get(i, i) for i in prompt] for prompt in prompts]
    ids = torch.tensor(
        [([0] * width + row)[-width:] for row in rows], device=where["position_ids"].device
    )
    shifts, seeing = [0] * len(rows), [i for i, of_prompt in enumerate(media) if of_prompt]
    if not seeing:
        return ids, shifts
    last = [prompt[-width:] for prompt in prompts]
    shown = [
        tuple(item for item in of if -1 - item.key in seen)
        for of, seen in zip(media, last, strict=True)
    ]
    where |= model_inputs(model, ids, shown)
    right, _ = pad_right([rows[i] for i in seeing], 0)
    places = rope_positions(model, right, [media[i] for i in seeing])
    if places is not None:
        where["position_ids"] = where["position_ids"].expand(3, -1, -1).clone()
        for k, i in enumerate(seeing):
            own = places[:, k, : len(rows[i])]
            where["position_ids"][:, i, -len(rows[i]) :] = own[:, -width:]
            shifts[i] = int(own.max()) + 1 - len(rows[i])
    return ids, shifts
