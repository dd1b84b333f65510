"""The trackers that options ask for."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openppo.config import TrackingConfig
from openppo.tracking.report.live import HealthTracker, ReportTracker
from openppo.tracking.trackers.console import ConsoleTracker
from openppo.tracking.trackers.jsonl import JSONLTracker
from openppo.tracking.trackers.tensorboard import TensorBoardTracker
from openppo.tracking.trackers.tracker import Tracker, Trackers
from openppo.tracking.trackers.wandb_tracker import WandbTracker
from openppo.types import Comm


def check_trackers(tracking: TrackingConfig) -> None:
    """``ValueError`` naming the flag of a tracker whose package is missing; before anything is loaded."""
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
    go_on_from: int | None = None,
) -> Trackers:
    """The trackers that ``tracking`` asks for, on rank 0; none on other ranks. Logs go to ``<save_path>/logs``.

    ``options`` are all options of the run, for dashboards that keep them. ``ValueError`` names the flag of a tracker
    that cannot start.
    """
    if comm.rank != 0:
        return Trackers([])
    logs = Path(save_path) / "logs"
    trackers: list[Tracker] = [ConsoleTracker(headline, total_steps, tracking.log_samples_every)]
    try:
        trackers.append(JSONLTracker(logs))
        trackers += [HealthTracker(logs), ReportTracker(logs)]  # they read what the one before writes
    except OSError as error:
        raise ValueError(f"--save_path {save_path} cannot be written ({error}): choose another folder.") from error
    if tracking.use_tensorboard is not None:
        try:
            name = tracking.wandb_run_name or logs.resolve().parent.name
            folder = _own_subfolder(Path(tracking.use_tensorboard), name, logs / "tensorboard_run", go_on_from)
            trackers.append(TensorBoardTracker(folder, go_on_from))
        except OSError as error:
            raise ValueError(f"--use_tensorboard {tracking.use_tensorboard} cannot be written ({error}).") from error
    if tracking.use_wandb is not None:
        trackers.append(WandbTracker(logs, tracking, options, go_on_from is not None))
    return Trackers(trackers)


def _own_subfolder(folder: Path, name: str, kept: Path, go_on_from: int | None) -> Path:
    """Subfolder of this run, numbered if taken, kept for a resume."""
    folder.mkdir(parents=True, exist_ok=True)
    if go_on_from is not None and kept.is_file() and (known := folder / kept.read_text().strip()).is_dir():
        return known
    for number in itertools.count():
        mine = folder / (name.replace("/", "_") + (f".{number}" if number else ""))
        try:
            mine.mkdir()
        except FileExistsError:
            continue
        kept.write_text(f"{mine.name}\n")
        return mine
    raise AssertionError("numbers do not end")
