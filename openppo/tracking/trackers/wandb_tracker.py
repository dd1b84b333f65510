"""Curves, histograms and samples for Weights & Biases, online or in a folder."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from openppo.config import TrackingConfig, mask_credentials
from openppo.config.fields import KEY_FROM_ELSEWHERE
from openppo.tracking.histogram import Histogram
from openppo.tracking.log import get_logger

STEP = "global_step"
"""The axis of all curves: W&B's own step would refuse what a run that goes on writes again."""
_FIRST_COLUMNS = ("prompt", "response", "reward", "label", "finish_reason")
_SECONDS_TO_FINISH = 60.0
NEEDED = "--use_wandb needs the package wandb: run 'pip install wandb', or leave the flag out."


class WandbTracker:
    """Writes to one W&B run, whose id is kept in ``<folder>/wandb_run_id``.

    A run that goes on takes the id that it finds there: curves continue, and steps that are done again have two points.
    ``options`` become the run's config.
    """

    name = "--use_wandb"
    errors: tuple[type[Exception], ...] = (Exception,)
    """Its service and its protocol are others', and raise more than they say."""

    def __init__(self, folder: Path, tracking: TrackingConfig, options: Mapping[str, Any], goes_on: bool) -> None:
        try:
            import wandb
            from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
        except ImportError as error:
            raise ValueError(NEEDED) from error
        self._wandb = wandb
        refused = (OSError, wandb.Error, HandleAbandonedError, MailboxClosedError)
        key = None if tracking.use_wandb == KEY_FROM_ELSEWHERE else tracking.use_wandb
        id_file = folder / "wandb_run_id"
        settings = wandb.Settings(
            console="off",  # what is printed stays here
            silent=True,
            api_key=key,  # wandb.login would store it in ~/.netrc
            finish_timeout=_SECONDS_TO_FINISH,
        )
        try:
            with _discreet(key):
                self._run = wandb.init(
                    project=tracking.wandb_project,
                    entity=tracking.wandb_org,
                    group=tracking.wandb_group,
                    name=tracking.wandb_run_name or folder.resolve().parent.name,
                    id=id_file.read_text().strip() if goes_on and id_file.is_file() else None,
                    resume="allow" if goes_on else None,
                    config=dict(options),
                    dir=str(folder),
                    mode=tracking.wandb_mode,
                    settings=settings,
                )
            id_file.write_text(self._run.id)
        except refused as error:
            raise ValueError(
                f"--use_wandb cannot start a run ({type(error).__name__}: {error}). Check key and names, or use "
                "--wandb_mode offline."
            ) from error
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        place = f"{self._run.settings.sync_dir} (offline: 'wandb sync' sends it)"
        get_logger().info("--use_wandb writes to %s", place if self._run.offline else self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log each metric by its name."""
        self._run.log({STEP: step, **metrics})

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Log the samples of a step as a table."""
        if not samples:
            return
        columns = [name for name in _FIRST_COLUMNS if any(name in sample for sample in samples)]
        rows = [[step, *(_cell(sample.get(name)) for name in columns)] for sample in samples]
        name = "eval_samples" if samples[0].get("evaluation") else "samples"
        self._run.log({STEP: step, name: self._wandb.Table(columns=["step", *columns], data=rows)})

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Tokens are for the report."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log each one as ``histograms/<name>``."""
        shown = {
            f"histograms/{name}": self._wandb.Histogram(np_histogram=(np.array(of.counts), np.array(of.edges)))
            for name, of in histograms.items()
        }
        self._run.log({STEP: step, **shown})

    def close(self) -> None:
        """Send what is left, for a minute at most. While an exception is on its way the run counts as failed."""
        self._run.finish(exit_code=None if sys.exc_info()[0] is None else 1)


@contextmanager
def _discreet(key: str | None) -> Iterator[None]:
    """Inside, W&B sees a command line without secrets, which it would send along, and nobody to ask for a key."""
    argv, stdin = sys.argv, sys.stdin
    sys.argv = [mask_credentials(word if key is None else word.replace(key, "***")) for word in argv]
    sys.stdin = io.StringIO()
    try:
        yield
    finally:
        sys.argv, sys.stdin = argv, stdin


def _cell(value: Any) -> Any:
    """A column of a table holds one type: numbers as they are, anything else as text."""
    return value if isinstance(value, int | float) else "" if value is None else str(value)
