"""ProgressBar bars that show the time left, and stay quiet in log files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar, overload

from tqdm import tqdm

from openppo.tracking.phase import current

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 30.0
_NAME = 10  # columns, so that bars below each other line up
_BAR = "{desc}{percentage:4.0f}% {bar:28} {n_fmt}/{total_fmt}  {elapsed}, {remaining} left"


class ProgressBar(Generic[T]):
    """Iterate over it, or use it as a context manager and call ``update``.

    On a terminal it is a tqdm bar that vanishes at the end. Elsewhere it writes a line every 30 s, and a last
    one if it ran longer than that.
    """

    def __init__(self, iterable: Iterable[T], total: int | None, description: str, enabled: bool) -> None:
        self._iterable = iterable
        self._total = total
        self._description = description
        self._lines = enabled and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            desc=f"{description:<{_NAME}}",
            disable=not enabled or self._lines,
            leave=False,
            dynamic_ncols=True,
            bar_format=_BAR if total else None,
        )
        self._done = 0
        self._start = self._last_line = time.monotonic()
        self._closed = False

    def update(self, n: int = 1) -> None:
        """Say that ``n`` more are done."""
        self._done += n
        current.progress()
        self._bar.update(n)
        if self._lines and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._write_line()

    def close(self) -> None:
        """End the bar; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._bar.close()
        if self._lines and time.monotonic() - self._start >= SECONDS_BETWEEN_LINES:
            self._write_line()

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        elapsed = self._last_line - self._start
        line = tqdm.format_meter(self._done, self._total or 0, elapsed, ncols=0, prefix=self._description)
        with suppress(OSError, ValueError):  # a full disk or a closed pipe ends no training
            print(line.strip(), file=sys.stderr, flush=True)

    def __iter__(self) -> Iterator[T]:
        with self:
            for item in self._iterable:
                yield item
                self.update()

    def __enter__(self) -> ProgressBar[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@overload
def progress_bar(iterable_or_total: int, description: str, *, enabled: bool) -> ProgressBar[int]: ...
@overload
def progress_bar(iterable_or_total: Iterable[T], description: str, *, enabled: bool) -> ProgressBar[T]: ...
def progress_bar(
    iterable_or_total: int | Iterable[T], description: str, *, enabled: bool
) -> ProgressBar[int] | ProgressBar[T]:
    """Show progress over an iterable, or over ``total`` things (then it also iterates over ``range(total)``)."""
    if isinstance(iterable_or_total, int):
        return ProgressBar(range(iterable_or_total), iterable_or_total, description, enabled)
    total = len(iterable_or_total) if isinstance(iterable_or_total, Sized) else None
    return ProgressBar(iterable_or_total, total, description, enabled)
