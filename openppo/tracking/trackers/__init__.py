"""Where metrics, samples and histograms go: console, JSON lines, report, TensorBoard, Weights & Biases."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openppo.config import TrackingConfig
from openppo.tracking.run_folder import numbered
from openppo.tracking.trackers.dashboards import TensorBoardTracker, WandbTracker
from openppo.tracking.trackers.local import (
    ConsoleTracker,
    HealthTracker,
    JSONLTracker,
    ReportTracker,
)
from openppo.tracking.trackers.tracker import Tracker, Trackers
from openppo.types import Comm


def check_trackers(tracking: TrackingConfig) -> None:
    """Raise ``ValueError`` naming the flag of a tracker whose package is missing, before anything is loaded."""
    packages = {"tensorboard": tracking.use_tensorboard, "wandb": tracking.use_wandb}
    for package, given in packages.items():
        if given is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--use_{package} needs the package {package}: run 'pip install {package}', or leave the flag out."
            )


def make_trackers(
    save_path: str,
    tracking: TrackingConfig,
    options: Mapping[str, Any],
    comm: Comm,
    headline: Sequence[str],
    total_steps: int,
    resumed_after: int | None = None,
    own: Sequence[Tracker] = (),
) -> Trackers:
    """``own`` trackers, and those of ``tracking`` on rank 0. Logs go to ``<save_path>/logs``.

    ``options`` are all options of the run, for dashboards that keep them. Raises ``ValueError`` naming the flag of a
    tracker that cannot start.
    """
    if comm.rank != 0:
        return Trackers(own)
    logs = Path(save_path) / "logs"
    trackers: list[Tracker] = [ConsoleTracker(headline, total_steps, tracking.log_samples_every)]
    trackers += [
        JSONLTracker(logs),
        HealthTracker(logs),
        ReportTracker(logs),
    ]  # the first writes what they read
    if tracking.use_tensorboard is not None:
        try:
            name = tracking.wandb_run_name or logs.resolve().parent.name
            folder = _own_subfolder(
                Path(tracking.use_tensorboard),
                name,
                logs / "tensorboard_run",
                resumed_after=resumed_after,
            )
            trackers.append(TensorBoardTracker(folder, resumed_after))
        except OSError as error:
            raise ValueError(
                f"--use_tensorboard {tracking.use_tensorboard} cannot be written ({error})."
            ) from error
    if tracking.use_wandb is not None:
        trackers.append(WandbTracker(logs, tracking, options, resumes=resumed_after is not None))
    return Trackers([*trackers, *own])


def _own_subfolder(folder: Path, name: str, kept: Path, resumed_after: int | None) -> Path:
    """Subfolder of this run, numbered if taken; a resumed run has its name in ``kept``."""
    folder.mkdir(parents=True, exist_ok=True)
    if (
        resumed_after is not None
        and kept.is_file()
        and (known := folder / kept.read_text().strip()).is_dir()
    ):
        return known
    mine = folder / name.replace("/", "_")
    mine = numbered(mine) if mine.exists() else mine
    mine.mkdir()
    kept.write_text(f"{mine.name}\n")
    return mine
