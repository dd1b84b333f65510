"""What a run reports: metrics, timers, trackers, progress, log."""

from openppo.tracking.console import ProgressBar, get_logger, progress_bar, setup_logging
from openppo.tracking.metrics import Histogram, Metrics, Moments, Reduction, histogram
from openppo.tracking.profiler import StepProfiler
from openppo.tracking.run_folder import (
    check_run_folder,
    cut_logs,
    environment,
    save_config,
    save_environment,
    set_aside_logs,
    set_aside_model,
)
from openppo.tracking.timers import PhaseTimer
from openppo.tracking.trackers import check_trackers, make_trackers
from openppo.tracking.trackers.dashboards import TensorBoardTracker, WandbTracker
from openppo.tracking.trackers.local import ConsoleTracker, JSONLTracker, json_form
from openppo.tracking.trackers.tracker import Tracker, Trackers

__all__ = [
    "ConsoleTracker",
    "Histogram",
    "JSONLTracker",
    "Metrics",
    "Moments",
    "PhaseTimer",
    "ProgressBar",
    "Reduction",
    "StepProfiler",
    "TensorBoardTracker",
    "Tracker",
    "Trackers",
    "WandbTracker",
    "check_run_folder",
    "check_trackers",
    "cut_logs",
    "environment",
    "get_logger",
    "histogram",
    "json_form",
    "make_trackers",
    "progress_bar",
    "save_config",
    "save_environment",
    "set_aside_logs",
    "set_aside_model",
    "setup_logging",
]
