"""Optimizer steps that are skipped because a gradient is not finite."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from openppo import logger
from openppo.config import RunConfig
from openppo.types import Comm
from openppo.weight_files import save_tensors


class SkippedSteps:
    """Counter of skipped optimizer steps, which keeps their batches and ends a run after too many in a row.

    Batches are written to ``<save_path>/skipped``. All ranks see the same norms, since a gradient that is not finite on
    one rank is not finite on any.
    """

    def __init__(self, run: RunConfig, comm: Comm) -> None:
        self.run = run
        self.comm = comm
        self.total = 0
        self.in_a_row: dict[str, int] = {}

    def accept(self, norm: float, role: str, place: str, **batch: list[dict[str, Any]]) -> bool:
        """Return True if the gradient ``norm`` is finite, which means that the step was taken.

        Otherwise write this rank's ``batch``. ``place`` names the step in messages. ``FloatingPointError`` once
        ``max_skipped_steps`` steps in a row were skipped.
        """
        if math.isfinite(norm):
            self.in_a_row[role] = 0
            return True

        self.total += 1
        self.in_a_row[role] = self.in_a_row.get(role, 0) + 1
        name = f"{place.replace(' ', '_')}_{role}_rank{self.comm.rank}.safetensors"
        file = Path(self.run.save_path, "skipped", name)
        _write(batch, file)

        problem = f"a loss or the gradient of the {role} was not finite in {place}"
        if self.in_a_row[role] >= self.run.max_skipped_steps:
            raise FloatingPointError(
                f"{problem}, and {self.in_a_row[role]} optimizer steps in a row were skipped (max_skipped_steps). "
                f"Lower the learning rate, and look at the batches in {file.parent}. "
                "Skipped steps do not change the weights."
            )
        if self.comm.rank == 0:
            logger.warning(
                "%s: this optimizer step is skipped on all ranks; its batch is in %s", problem, file
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the counts for ``load_state_dict``, as JSON."""
        return {"total": self.total, "in_a_row": dict(self.in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of an earlier session."""
        self.total = state["total"]
        self.in_a_row = dict(state["in_a_row"])


def _write(batch: Mapping[str, list[dict[str, Any]]], file: Path) -> None:
    """Save tensors under "kind/number of the micro-batch/field"; only log a failure."""
    tensors: dict[str, Tensor] = {}
    for kind, micro_batches in batch.items():
        for number, micro in enumerate(micro_batches):
            for name, value in micro.items():
                if value is not None:
                    tensor = torch.as_tensor(value).detach().cpu().contiguous()
                    tensors[f"{kind}/{number}/{name}"] = tensor
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, file)
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be written (%s)", file, error)
