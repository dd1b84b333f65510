"""TensorBoard and Weights & Biases."""

import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from openppo.config import TrackingConfig, mask_credentials
from openppo.config.fields import KEY_FROM_ELSEWHERE
from openppo.tracking.console import logger
from openppo.tracking.metrics import Histogram
from openppo.tracking.trackers.tracker import Tracker

STEP = "global_step"
"""Axis of all curves in W&B: its own step would refuse what a resumed run writes again."""
_FIRST_COLUMNS = ("prompt", "response", "reward", "label", "finish_reason")
_SECONDS_TO_FINISH = 30.0


class TensorBoardTracker(Tracker):
    """Writes TensorBoard event files: scalars by metric name, histograms, samples as text.

    If the run resumes, TensorBoard forgets all that was written after step ``resumed_after``.
    """

    name = "--use_tensorboard"
    errors = (Exception,)
    """Event files may lie in a cloud, whose clients raise anything."""

    def __init__(self, folder: str | Path, resumed_after: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_after is None else resumed_after + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        for index, sample in enumerate(samples):
            self._writer.add_text(f"samples/{index}", _markdown(sample), step)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        for name, histogram in histograms.items():
            self._writer.add_histogram_raw(
                f"histograms/{name}",
                min=histogram.edges[0],
                max=histogram.edges[-1],
                num=sum(histogram.counts),
                sum=histogram.total,
                sum_squares=histogram.total_of_squares,
                bucket_limits=histogram.edges[1:],
                bucket_counts=histogram.counts,
                global_step=step,
            )

    def close(self) -> None:
        self._writer.close()


def _markdown(sample: Mapping[str, Any]) -> str:
    """Write each entry as a heading and a literal block, except lists of numbers."""
    entries = []
    for key, value in sample.items():
        if not isinstance(value, list | tuple):
            block = str(value).replace("\n", "\n    ")
            entries.append(f"**{key}**\n\n    {block}")
    return "\n\n".join(entries)


class WandbTracker(Tracker):
    """Writes to one W&B run, whose id is kept in ``<folder>/wandb_run_id``.

    A resumed run takes the id from there: curves continue, and repeated steps have two points. ``options`` become the
    run's config.
    """

    name = "--use_wandb"
    errors = (Exception,)
    """W&B's service and protocol raise more than they document."""

    def __init__(
        self, folder: Path, tracking: TrackingConfig, options: Mapping[str, Any], resumes: bool
    ) -> None:
        import wandb
        from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError

        self._wandb = wandb
        key = None if tracking.use_wandb == KEY_FROM_ELSEWHERE else tracking.use_wandb
        # Printed lines are not sent. wandb.login would store the key in ~/.netrc.
        quiet: dict[str, Any] = {"console": "off", "silent": True}
        settings = wandb.Settings(api_key=key, finish_timeout=_SECONDS_TO_FINISH, **quiet)

        id_file = folder / "wandb_run_id"
        try:
            run_id = id_file.read_text().strip() if resumes and id_file.is_file() else None
            with _masked_command_line(key):
                self._run = wandb.init(
                    project=os.environ.get("WANDB_PROJECT", "openppo"),
                    name=os.environ.get("WANDB_NAME", folder.resolve().parent.name),
                    id=run_id,
                    resume="allow" if resumes else None,
                    config=dict(options),
                    dir=str(folder),
                    settings=settings,
                )
            id_file.write_text(self._run.id)
        except (OSError, wandb.Error, HandleAbandonedError, MailboxClosedError) as error:
            raise ValueError(
                f"--use_wandb cannot start a run ({type(error).__name__}: {error}). Check key and names, or use "
                "WANDB_MODE=offline."
            ) from error

        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        place = f"{self._run.settings.sync_dir} (offline: 'wandb sync' sends it)"
        logger.info("--use_wandb writes to %s", place if self._run.offline else self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics})

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        if not samples:
            return

        names = set().union(*samples)
        columns = [name for name in _FIRST_COLUMNS if name in names]
        rows = []
        for sample in samples:
            cells = [_cell(sample.get(name)) for name in columns]
            rows.append([step, *cells])

        table = self._wandb.Table(columns=["step", *columns], data=rows)
        name = "eval_samples" if samples[0].get("evaluation") else "samples"
        self._run.log({STEP: step, name: table})

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        curves: dict[str, Any] = {STEP: step}
        for name, histogram in histograms.items():
            arrays = (np.array(histogram.counts), np.array(histogram.edges))
            curves[f"histograms/{name}"] = self._wandb.Histogram(np_histogram=arrays)
        self._run.log(curves)

    def close(self) -> None:
        """Send what is left, for half a minute at most; while an exception propagates the run counts as failed."""
        self._run.finish(exit_code=None if sys.exc_info()[0] is None else 1)


@contextmanager
def _masked_command_line(key: str | None) -> Iterator[None]:
    """Hide secrets of the command line, which W&B would send, and stdin, on which it would wait for a key."""
    argv, stdin = sys.argv, sys.stdin
    words = argv if key is None else [word.replace(key, "***") for word in argv]
    sys.argv = [mask_credentials(word) for word in words]
    sys.stdin = io.StringIO()
    try:
        yield
    finally:
        sys.argv, sys.stdin = argv, stdin


def _cell(value: Any) -> Any:
    """Return a cell of a table, whose columns hold one type: numbers as they are, anything else as text."""
    if isinstance(value, int | float):
        return value
    return "" if value is None else str(value)
