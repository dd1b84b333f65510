"""Gradients summed in a fixed order, so that equal runs on a GPU are equal bit for bit.

FlashAttention adds gradients of keys in any order unless torch's deterministic algorithms are an error, not a warning.
Enabled for a whole run, these would refuse the cumulative sums of sampling, which are exact without them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic


def prepare_fixed_order() -> None:
    """Set the environment variables that libraries read once, before the first product on a GPU."""
    # Workspaces of one size, so that products are summed in one order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # transformers passes it to flash-attn.
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")


@contextmanager
def fixed_order() -> Iterator[None]:
    """Enable torch's deterministic algorithms; new tensors are not filled, which would cost a pass each."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
