"""Samples of one step, whose scores may still be under way."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import overload

from openppo.tracking import Metrics
from openppo.types import Interrupted, Sample, StopCheck


class Rollout(Sequence[Sample]):
    """This rank's samples of one step; reading one blocks until all scores are there.

    Code that runs on several ranks calls ``wait_for_scores`` before it reads. ``metrics`` are measurements of the
    source. ``take_scored`` blocks until scores are there and returns the samples with them. ``failed`` are stand-ins,
    for logs, for a few episodes that are not trained on.
    """

    def __init__(
        self,
        unscored: Sequence[Sample],
        metrics: Metrics,
        take_scored: Callable[[], list[Sample]] | None = None,
        failed: Sequence[Sample] = (),
    ) -> None:
        self.metrics = metrics
        self.failed = list(failed)
        self._samples = list(unscored)
        self._take_scored = take_scored

    @property
    def unscored(self) -> list[Sample]:
        """The samples as they are now, without waiting, for work that needs no scores."""
        return list(self._samples)

    def wait(self) -> None:
        """Block until scores are there, on this rank alone; raise the errors of the source of rewards."""
        if self._take_scored is not None:
            self._samples = self._take_scored()
            self._take_scored = None

    def map(self, function: Callable[[Sample], Sample]) -> "Rollout":
        """Return the rollout of ``function(sample)`` for each sample, called when the scores are there.

        In a list in its place, samples count as another engine's: log-probs are recomputed, ``metrics`` are lost.

        >>> rollout.map(lambda sample: sample.with_scores({"length": sample.n_actions}))[0].scores
        {'length': 2}
        """
        return Rollout(
            self.unscored,
            self.metrics,
            take_scored=lambda: [function(sample) for sample in self],
            failed=self.failed,
        )

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        self.wait()
        return self._samples[index]


def unscored(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples as they are now, without waiting for scores."""
    return samples.unscored if isinstance(samples, Rollout) else samples


def wait_for_scores(samples: Sequence[Sample], stop: StopCheck) -> None:
    """Block until scores are there; ``Interrupted`` on all ranks if one of them has a signal."""
    if not isinstance(samples, Rollout):
        return

    with suppress(Interrupted):  # other ranks may not know of the signal yet
        samples.wait()
    stop()
