"""What a tracker is, and how several are served although one may fail."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from openppo.tracking.histogram import Histogram
from openppo.tracking.log import get_logger
from openppo.tracking.phase import current


class Tracker(Protocol):
    """Something that records what a run reports. Only rank 0 has trackers."""

    name: str
    """What a warning calls it, best the flag that it came from."""
    errors: tuple[type[Exception], ...]
    """What it may raise for reasons outside this program: a full disk, a lost connection. Of a service, anything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Record samples (prompt, response, score and so on) of a step."""
        ...

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record one row for each sample of a step: lists over the tokens of its response."""
        ...

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Record how values of a step are distributed."""
        ...

    def close(self) -> None:
        """Write out what is left; nothing is logged afterwards."""
        ...


class Trackers:
    """Hands everything to each tracker. One that fails with one of its ``errors`` is switched off with a warning.

    Any other exception is a mistake of ours, and is raised. ``with trackers:`` closes them at the end of a run, also of
    one that fails: its logs are as whole as they can be, and other ranks are not asked.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._each(lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Record samples of a step."""
        self._each(lambda tracker: tracker.log_samples(step, samples))

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record the tokens of samples of a step."""
        self._each(lambda tracker: tracker.log_tokens(step, rows))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Record distributions of a step."""
        self._each(lambda tracker: tracker.log_histograms(step, histograms))

    def close(self) -> None:
        """Close all trackers; further calls do nothing."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closed = False
        if isinstance(error, Exception):
            current.failing = (error, time.monotonic())
        try:
            self.close()
            closed = True
        finally:
            current.failing = None
            if error is not None and not closed:
                raise error  # what ended the run; that closing failed too is its context

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except tracker.errors as error:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                get_logger().warning("%s: %s; it is switched off, the run goes on.", tracker.name, reason)
                self._trackers.remove(tracker)
                with contextlib.suppress(*tracker.errors):
                    tracker.close()
