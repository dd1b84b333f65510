"""Base of all trackers, and several of them in one, of which any may fail."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openppo.tracking.console import logger
from openppo.tracking.metrics import Histogram


class Tracker:
    """Base of all that records the reports of a run, on rank 0; every method does nothing until overridden."""

    name: str = "a tracker"
    """Name in warnings, best the flag that asks for the tracker."""
    errors: tuple[type[Exception], ...] = (OSError,)
    """Exceptions from outside this program, such as a full disk or a lost connection; for a service, any."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Record samples (prompt, response, score and so on) of a step."""

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record one row for each sample of a step: lists over the tokens of its response."""

    def log_rollouts(self, step: int, split: str, rows: list[dict[str, Any]]) -> None:
        """Record one row for each of this rank's samples, of a step or an evaluation, if they are dumped."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Record distributions of a step."""

    def close(self) -> None:
        """Write out all that is pending; nothing is logged afterwards."""


class Trackers(Tracker, contextlib.AbstractContextManager["Trackers"]):
    """Passes everything to each tracker; one that raises one of its ``errors`` is disabled with a warning.

    Any other exception is a bug and propagates. ``with trackers:`` closes them on this rank at the end of a run, even
    if it fails.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self._each(lambda tracker: tracker.log_samples(step, samples))

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._each(lambda tracker: tracker.log_tokens(step, rows))

    def log_rollouts(self, step: int, split: str, rows: list[dict[str, Any]]) -> None:
        self._each(lambda tracker: tracker.log_rollouts(step, split, rows))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._each(lambda tracker: tracker.log_histograms(step, histograms))

    def close(self) -> None:
        """Close all trackers; further calls do nothing."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except tracker.errors as error:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                logger.warning("%s: %s; disabled; training continues.", tracker.name, reason)
                self._trackers.remove(tracker)
                with contextlib.suppress(*tracker.errors):
                    tracker.close()
