"""Trajectories of one step, whose scores may still be under way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from openppo.tracking import Metrics
from openppo.types import Interrupted, StopCheck, Trajectory


class Rollout(list[Trajectory]):
    """This rank's trajectories of one step; reading one blocks until all scores are there.

    Code that runs on several ranks calls ``wait_for_scores`` before it reads. ``metrics`` are measurements of the
    source. ``write_scores`` blocks until scores are there and writes them into the trajectories. ``failed`` are
    stand-ins, for logs, for a few episodes that are not trained on.
    """

    def __init__(
        self,
        unscored: Sequence[Trajectory],
        metrics: Metrics,
        write_scores: Callable[[], None] | None = None,
        failed: Sequence[Trajectory] = (),
    ) -> None:
        super().__init__(unscored)
        self.metrics = metrics
        self.failed = list(failed)
        self._write_scores = write_scores

    @property
    def unscored(self) -> list[Trajectory]:
        """The same trajectories without waiting, for work that needs no scores."""
        return list(super().__iter__())

    def wait(self) -> None:
        """Block until scores are there, on this rank alone; raise the errors of the source of rewards."""
        if self._write_scores is not None:
            self._write_scores()
            self._write_scores = None

    def __iter__(self) -> Iterator[Trajectory]:
        self.wait()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.wait()
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]


def wait_for_scores(trajectories: Sequence[Trajectory], stop: StopCheck) -> None:
    """Block until scores are there; ``Interrupted`` on all ranks if one of them has a signal."""
    if not isinstance(trajectories, Rollout):
        return

    with suppress(Interrupted):  # other ranks may not know of the signal yet
        trajectories.wait()
    stop()
