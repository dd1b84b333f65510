"""What a run tells about itself: metrics, timers, trackers, progress, log."""

from openppo.tracking.histogram import Histogram as Histogram, histogram as histogram
from openppo.tracking.log import get_logger as get_logger, setup_logging as setup_logging
from openppo.tracking.metrics import Metrics as Metrics, Reduction as Reduction
from openppo.tracking.profiler import StepProfiler as StepProfiler
from openppo.tracking.progress_bar import ProgressBar as ProgressBar, progress_bar as progress_bar
from openppo.tracking.report.environment import environment as environment, save_environment as save_environment
from openppo.tracking.run_folder import (
    check_run_folder as check_run_folder,
    cut_logs as cut_logs,
    save_config as save_config,
    set_aside_logs as set_aside_logs,
    set_aside_model as set_aside_model,
)
from openppo.tracking.timers import PhaseTimer as PhaseTimer
from openppo.tracking.trackers import (
    ConsoleTracker as ConsoleTracker,
    JSONLTracker as JSONLTracker,
    TensorBoardTracker as TensorBoardTracker,
    Tracker as Tracker,
    Trackers as Trackers,
    WandbTracker as WandbTracker,
    check_trackers as check_trackers,
    json_form as json_form,
    make_trackers as make_trackers,
)
