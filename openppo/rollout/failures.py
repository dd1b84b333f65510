"""When failed episodes end a run: one rule, of synchronous and asynchronous runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from openppo.types import Trajectory

GROUPS_IN_A_ROW = 10
"""Failed groups of a task; then no more of it are played."""
STEPS_IN_A_ROW = 2
"""Global steps without a trained episode; then the run ends."""
N_SHOWN = 2
"""Failed episodes that are shown of a step."""


class NothingTrainedError(RuntimeError):
    """Samples of which none can be trained on, alike on all ranks; ``failed`` stand for the last episodes."""

    def __init__(self, message: str, failed: Sequence[Trajectory] = ()) -> None:
        super().__init__(message)
        self.failed = list(failed)


@dataclass(eq=False)
class FailureCount:
    """Groups that failed in a row, and steps in a row without a group to train on."""

    groups: int = 0
    steps: int = 0
    error: str = ""
    _has_good_group: bool = False

    def add_group(self, error: str | None) -> None:
        """Count a group, which failed with ``error``, or has episodes to train on (None)."""
        if error is None:
            self.groups, self._has_good_group = 0, True
        else:
            self.groups, self.error = self.groups + 1, error

    def drop_groups(self, reason: str) -> None:
        """Note that no group of this step is trained on, though not all have failed."""
        if self._has_good_group:
            self._has_good_group, self.error = False, reason

    def end_step(self) -> None:
        """Count the step that the groups since the last one make up."""
        self.steps = 0 if self._has_good_group else self.steps + 1
        self._has_good_group = False

    def groups_message(self, task: str = "") -> str | None:
        """Report that a task or a run has had enough failed groups; None if it has not."""
        if self.groups < GROUPS_IN_A_ROW:
            return None
        of_task = f" of task {task}" if task else ""
        return f"{GROUPS_IN_A_ROW} groups{of_task} in a row failed; the last: {self.error}"

    def steps_message(self, n_steps: int) -> str | None:
        """Report that a run has had enough steps without a trained episode; None if it has not.

        Of a run of a single step, by its ``n_steps``, one is enough.
        """
        if self.steps < (1 if n_steps == 1 else STEPS_IN_A_ROW):
            return None
        steps = "step" if self.steps == 1 else "steps"
        return f"no episode of the last {self.steps} {steps} could be trained on; the last error: {self.error}"
