"""Destinations of metrics, samples and histograms: console, JSON lines, report, TensorBoard, Weights & Biases."""

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
    for package, option in packages.items():
        if option is not None and importlib.util.find_spec(package) is None:
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
    custom: Sequence[Tracker] = (),
) -> Trackers:
    """Start the trackers that ``tracking`` asks for, on rank 0, and add ``custom`` ones.

    Logs go to ``<save_path>/logs``.

    ``options`` are all options of the run, for dashboards that keep them. Raises ``ValueError`` naming the flag of a
    tracker that cannot start.
    """
    if comm.rank != 0:
        return Trackers(custom)

    logs = Path(save_path) / "logs"
    trackers: list[Tracker] = [
        ConsoleTracker(headline, total_steps, tracking.log_samples_every),
        JSONLTracker(logs),  # before the next two, which read its files
        HealthTracker(logs),
        ReportTracker(logs),
    ]
    if tracking.use_tensorboard is not None:
        trackers.append(_tensorboard(logs, tracking, resumed_after))
    if tracking.use_wandb is not None:
        trackers.append(WandbTracker(logs, tracking, options, resumes=resumed_after is not None))
    return Trackers([*trackers, *custom])


def _tensorboard(
    logs: Path, tracking: TrackingConfig, resumed_after: int | None
) -> TensorBoardTracker:
    """Start the tracker of ``--use_tensorboard`` in a subfolder of this run."""
    parent = Path(str(tracking.use_tensorboard))
    name = logs.resolve().parent.name
    try:
        folder = _subfolder(
            parent, name, name_file=logs / "tensorboard_run", resumes=resumed_after is not None
        )
        return TensorBoardTracker(folder, resumed_after)
    except OSError as error:
        raise ValueError(
            f"--use_tensorboard {tracking.use_tensorboard} cannot be written ({error})."
        ) from error


def _subfolder(parent: Path, name: str, *, name_file: Path, resumes: bool) -> Path:
    """Make a subfolder ``name``, numbered if that exists; a resumed run has its name in ``name_file``."""
    parent.mkdir(parents=True, exist_ok=True)
    if resumes and name_file.is_file():
        known = parent / name_file.read_text().strip()
        if known.is_dir():
            return known

    folder = parent / name
    if folder.exists():
        folder = numbered(folder)
    folder.mkdir()
    name_file.write_text(f"{folder.name}\n")
    return folder
