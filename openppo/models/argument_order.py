"""Errors for arguments in another library's order, found from types and shapes without waiting for a device."""

from __future__ import annotations

from torch import Tensor

from openppo.model_inputs import ModelInputs


def check_tensor(value: object, name: str, order: str, n_dims: int | None = None) -> None:
    """Raise ``TypeError`` with our ``order`` of arguments unless ``value`` is a tensor, with ``n_dims`` axes if set."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {value!r:.60}, no tensor: OpenPPO's order is {order}.")

    if n_dims is not None and value.ndim != n_dims:
        shape = f"{tuple(value.shape)} in place of {n_dims} dimensions"
        raise TypeError(f"{name} has the shape {shape}: OpenPPO's order is {order}.")


def check_inputs(inputs: object, order: str) -> None:
    """Raise ``TypeError`` with our ``order`` of arguments unless ``inputs`` are ``ModelInputs``."""
    if not isinstance(inputs, ModelInputs):
        kind = type(inputs).__name__
        raise TypeError(
            f"the first argument is a {kind}, no ModelInputs: OpenPPO's order is {order}."
        )


def check_masks(sequences: Tensor, order: str, **masks: object) -> None:
    """Raise ``TypeError`` with our ``order`` of arguments unless each mask has the shape of ``sequences``."""
    for name, mask in masks.items():
        check_tensor(mask, name, order=order)
        if isinstance(mask, Tensor) and mask.shape != sequences.shape:
            shapes = f"{tuple(mask.shape)}, and sequences {tuple(sequences.shape)}"
            raise TypeError(f"{name} has the shape {shapes}: OpenPPO's order is {order}.")
