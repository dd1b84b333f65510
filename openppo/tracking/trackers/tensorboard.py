"""Curves, histograms and samples for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openppo.tracking.histogram import Histogram

_NEEDED = "--use_tensorboard needs the package tensorboard: run 'pip install tensorboard', or leave the flag out."


class TensorBoardTracker:
    """Writes TensorBoard event files: scalars by metric name, histograms, samples as text.

    A run that goes on from step ``go_on_from`` has TensorBoard forget what was written after it.
    """

    name = "--use_tensorboard"
    errors: tuple[type[Exception], ...] = (Exception,)
    """It may write to a cloud, whose clients raise what they like."""

    def __init__(self, folder: str | Path, go_on_from: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(_NEEDED) from error
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=None if go_on_from is None else go_on_from + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Write each sample as a text of its own: ``samples/0``, ``samples/1``, ..."""
        for index, sample in enumerate(samples):
            self._writer.add_text(f"samples/{index}", _markdown(sample), step)
        self._writer.flush()

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Tokens are for the report."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write each one as ``histograms/<name>``."""
        for name, of in histograms.items():
            self._writer.add_histogram_raw(
                f"histograms/{name}",
                min=of.edges[0],
                max=of.edges[-1],
                num=sum(of.counts),
                sum=of.total,
                sum_squares=of.total_of_squares,
                bucket_limits=of.edges[1:],
                bucket_counts=of.counts,
                global_step=step,
            )
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _markdown(sample: Mapping[str, Any]) -> str:
    """Each entry as a heading and a literal block, so that the text shows as it is; lists of numbers are left out."""
    blocks = []
    for key, value in sample.items():
        if isinstance(value, (list, tuple)):
            continue
        literal = "\n".join("    " + line for line in str(value).split("\n"))
        blocks.append(f"**{key}**\n\n{literal}")
    return "\n\n".join(blocks)
