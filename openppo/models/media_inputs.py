"""Inputs of a model's forward for the images and videos of a batch."""

import inspect
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from openppo.media import KINDS, MediaItem
from openppo.model_inputs import ModelInputs
from openppo.models.vision_models import placeholders


def media_inputs(model: Any, inputs: ModelInputs) -> dict[str, Tensor]:
    """Further arguments of ``model``'s forward for the media of ``inputs``, on the same device; none without media.

    Models that distinguish kinds of tokens also get these kinds, int64 (B, L): 0 text, 1 image, 2 video.
    """
    if not any(inputs.media):
        return {}
    arguments = {}
    for name, tensor in joined(list(chain.from_iterable(inputs.media))).items():
        tensor = tensor.to(inputs.sequences.device)
        if name.startswith("pixel_values"):
            tensor = tensor.to(model.dtype)
        arguments[name] = tensor

    # The forward that takes these arguments may be that of a classifier's inner model.
    accepted: set[str] = set()
    for module in (model, *model.children()):
        accepted |= inspect.signature(type(module).forward).parameters.keys()
    for name in {"token_type_ids", "mm_token_type_ids"} & accepted:
        arguments[name] = token_kinds(inputs.sequences, model.config)
    return arguments


def token_kinds(input_ids: Tensor, config: Any) -> Tensor:
    """Kinds of tokens, int64 like ``input_ids``: 0 text, 1 image, 2 video."""
    kinds = torch.zeros_like(input_ids)
    for token_id, kind in placeholders(config).items():
        kinds[input_ids == token_id] = 1 + KINDS.index(kind)
    return kinds


def joined(items: Sequence[MediaItem]) -> dict[str, Tensor]:
    """Concatenate the inputs of all items; dimensions after the first are zero-padded to the largest."""
    tensors: dict[str, list[Tensor]] = {}
    for item in items:
        for name, tensor in item.inputs.items():
            tensors.setdefault(name, []).append(tensor)

    inputs = {name: _concatenate(parts) for name, parts in tensors.items()}
    # Idefics 3 and SmolVLM read images by row; all images may be in the first row.
    if "pixel_attention_mask" in inputs:
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    return inputs


def _concatenate(parts: list[Tensor]) -> Tensor:
    shapes = torch.tensor([part.shape[1:] for part in parts])
    largest = shapes.amax(0).tolist() if shapes.numel() else []
    padded = [F.pad(part, _padding(part, largest)) for part in parts]
    return torch.cat(padded)


def _padding(part: Tensor, largest: Sequence[int]) -> list[int]:
    """Padding behind each dimension after the first, the last one first, as ``F.pad`` takes it."""
    padding = []
    for size, target in zip(part.shape[:0:-1], largest[::-1], strict=True):
        padding += [0, target - size]
    return padding


def rope_positions(model: Any, inputs: ModelInputs) -> Tensor | None:
    """Positions (3, B, L) in time, height and width of the tokens.

    None for models that simply number their tokens, and without media: then all three positions are that number.
    """
    modules = (module for module in model.modules() if hasattr(module, "get_rope_index"))
    indexing = next(modules, None)
    if indexing is None or not any(inputs.media):
        return None

    get_rope_index = indexing.get_rope_index
    accepted = inspect.signature(get_rope_index).parameters
    tensors = joined(list(chain.from_iterable(inputs.media)))
    grids = {
        name: tensors.get(name)
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        if name in accepted
    }
    kinds = token_kinds(inputs.sequences, model.config)
    positions: Tensor
    positions, _ = get_rope_index(inputs.sequences, mm_token_type_ids=kinds, **grids)
    return positions
