"""What a run tells about itself: metrics, timers, trackers, progress, log."""

from openppo.tracking.histogram import Histogram, histogram
from openppo.tracking.log import get_logger, setup_logging
from openppo.tracking.metrics import Metrics, Reduction
from openppo.tracking.profiler import StepProfiler
from openppo.tracking.progress_bar import ProgressBar, progress_bar
from openppo.tracking.report.environment import environment, save_environment
from openppo.tracking.run_folder import check_run_folder, cut_logs, save_config, set_aside_logs, set_aside_model
from openppo.tracking.timers import PhaseTimer
from openppo.tracking.trackers import (
    ConsoleTracker,
    JSONLTracker,
    TensorBoardTracker,
    Tracker,
    Trackers,
    WandbTracker,
    check_trackers,
    json_form,
    make_trackers,
)

__all__ = [
    "ConsoleTracker",
    "Histogram",
    "JSONLTracker",
    "Metrics",
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
