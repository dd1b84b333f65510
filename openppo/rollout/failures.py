"""The rule by which failed episodes end a run, synchronous or asynchronous."""

from collections.abc import Sequence
from dataclasses import dataclass

from openppo.types import Sample

GROUPS_IN_A_ROW = 10
"""Failed groups in a row after which a task is left out."""
STEPS_IN_A_ROW = 2
"""Global steps in a row without a trained episode after which the run ends."""
N_SHOWN = 2
"""Failed episodes of a step that are logged."""


class NothingTrainedError(RuntimeError):
    """Nothing to train on, on all ranks alike; ``failed`` are stand-ins for the last episodes."""

    def __init__(self, message: str, failed: Sequence[Sample] = ()) -> None:
        super().__init__(message)
        self.failed = list(failed)


@dataclass(eq=False)
class FailureCount:
    """Failed groups in a row, and steps in a row without a group to train on."""

    groups: int = 0
    steps: int = 0
    error: str = ""
    _has_good_group: bool = False

    def add_group(self, error: str | None) -> None:
        """Count a group that failed with ``error``, or that has episodes to train on (None)."""
        if error is None:
            self.groups = 0
            self._has_good_group = True
        else:
            self.groups += 1
            self.error = error

    def drop_groups(self, reason: str) -> None:
        """Note that no group of this step is trained on, though not all have failed."""
        if self._has_good_group:
            self._has_good_group = False
            self.error = reason

    def end_step(self) -> None:
        """Count a step, made of the groups since the last one."""
        self.steps = 0 if self._has_good_group else self.steps + 1
        self._has_good_group = False

    def groups_message(self, task: str = "") -> str | None:
        """Message about too many failed groups in a row, of a task or run; None for fewer."""
        if self.groups < GROUPS_IN_A_ROW:
            return None
        in_task = f" of task {task}" if task else ""
        return f"{GROUPS_IN_A_ROW} groups{in_task} in a row failed; the last: {self.error}"

    def steps_message(self, n_steps: int) -> str | None:
        """Message for a run with too many steps without a trained episode; None for fewer.

        One is too many for a run of a single step (``n_steps`` is 1).
        """
        most = 1 if n_steps == 1 else STEPS_IN_A_ROW
        if self.steps < most:
            return None
        steps = "step" if self.steps == 1 else "steps"
        return f"no episode of the last {self.steps} {steps} could be trained on; the last error: {self.error}"
