"""Optimizer steps that are left out because a loss or gradient was not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from openppo.config import RunConfig
from openppo.types import Comm

logger = logging.getLogger("openppo")


class SkippedSteps:
    """Counts them, keeps their batches in ``<save_path>/skipped``, and ends the run when there are too many in a row.

    All ranks see the same norms, since a gradient that is not finite on one rank is not finite on any.
    """

    def __init__(self, run: RunConfig, comm: Comm) -> None:
        self.run = run
        self.comm = comm
        self.total = 0
        self.in_a_row: dict[str, int] = {}

    def accept(self, norm: float, role: str, place: str, batch: Mapping[str, Tensor]) -> bool:
        """Whether a step with the gradient norm ``norm`` was taken. If not, this rank's ``batch`` is written.

        ``place`` names the step in messages. ``FloatingPointError`` when the last ``--max_skipped_steps`` were not.
        """
        if math.isfinite(norm):
            self.in_a_row[role] = 0
            return True
        self.total += 1
        self.in_a_row[role] = self.in_a_row.get(role, 0) + 1
        name = f"{place.replace(' ', '_')}_{role}_rank{self.comm.rank}.safetensors"
        file = Path(self.run.save_path) / "skipped" / name
        _write(batch, file)
        what = f"a loss or the gradient of the {role} was not finite in {place}"
        if self.in_a_row[role] >= self.run.max_skipped_steps:
            raise FloatingPointError(
                f"{what}, and {self.in_a_row[role]} optimizer steps in a row were skipped (--max_skipped_steps). Lower "
                f"the learning rate, and look at the batches in {file.parent}. The weights are those before."
            )
        if self.comm.rank == 0:
            logger.warning("%s: this optimizer step is skipped on all ranks; its batch is in %s", what, file)
        return False

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes, as JSON."""
        return {"total": self.total, "in_a_row": dict(self.in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from an earlier session."""
        self.total, self.in_a_row = state["total"], dict(state["in_a_row"])


def _write(batch: Mapping[str, Tensor], file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in batch.items()}, file)
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be written (%s)", file, error)
