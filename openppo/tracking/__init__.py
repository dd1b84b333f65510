"""What a run reports: metrics, timers, trackers, progress, log."""

from openppo.tracking.console import (
    ProgressBar as ProgressBar,
    get_logger as get_logger,
    progress_bar as progress_bar,
    setup_logging as setup_logging,
)
from openppo.tracking.metrics import (
    Histogram as Histogram,
    Metrics as Metrics,
    Moments as Moments,
    Reduction as Reduction,
    histogram as histogram,
)
from openppo.tracking.profiler import StepProfiler as StepProfiler, step_tracer as step_tracer
from openppo.tracking.run_folder import (
    check_run_folder as check_run_folder,
    cut_logs as cut_logs,
    environment as environment,
    save_config as save_config,
    save_environment as save_environment,
    set_aside_logs as set_aside_logs,
    set_aside_model as set_aside_model,
)
from openppo.tracking.phase import PhaseTimer as PhaseTimer
from openppo.tracking.trackers import check_trackers as check_trackers, make_trackers as make_trackers
from openppo.tracking.trackers.dashboards import TensorBoardTracker as TensorBoardTracker, WandbTracker as WandbTracker
from openppo.tracking.trackers.local import (
    ConsoleTracker as ConsoleTracker,
    JSONLTracker as JSONLTracker,
    json_form as json_form,
)
from openppo.tracking.trackers.tracker import Tracker as Tracker, Trackers as Trackers
