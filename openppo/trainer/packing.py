"""Whether samples go through a model without their padding: all real tokens of a micro-batch in one row.

Attention kernels for sequences of unequal lengths, such as FlashAttention-2's, then compute no padding at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from openppo.models.actor import Actor
from openppo.models.scalar_head import ScalarHeadModel

logger = logging.getLogger("openppo")

_LEAK = 1e-5
_NOISE = 0.05
"""Outputs of a row with and without padding differ by less than this, in bfloat16 too; of large ones, relatively."""


@torch.no_grad()
def pack_where_exact(
    module: Actor | ScalarHeadModel, forward: Callable[[Tensor, Tensor], Tensor], device: torch.device, name: str
) -> None:
    """Have ``module`` pack its rows if they then do not see each other, which tiny forwards find out. The log says
    so if they do.

    ``forward`` is the module or the engine around it, called by all ranks together; it knows at least four tokens.
    transformers keeps rows apart where position ids start again, but not for every architecture and attention.
    """
    rows = torch.tensor([[0, 1, 2, 3, 0], [2, 0, 1, 3, 3]], device=device)
    others = torch.tensor([[3, 1, 0, 2, 0], [2, 0, 1, 3, 3]], device=device)
    mask = torch.tensor([[True, True, True, True, False], [True] * 5], device=device)
    padded = forward(rows, mask)
    module.packs_rows = True
    try:
        packed, beside_another = forward(rows, mask), forward(others, mask)
    except TypeError as error:
        logger.warning("samples of the %s are padded: the model takes no position ids (%s)", name, error)
        module.packs_rows = False
        return
    leak = float((packed - beside_another)[1].abs().max())
    shift = float((packed - padded).abs().max())
    module.packs_rows = leak <= _LEAK and shift <= _NOISE * max(1.0, float(padded.abs().max()))
    if not module.packs_rows:
        logger.warning(
            "samples of the %s are padded: in one row they change each other's outputs by %.2g, their own by %.2g",
            name,
            leak,
            shift,
        )
