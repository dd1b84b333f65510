"""Reports of a run: metrics, timers, trackers, progress bars, log."""

from openppo.tracking.console import progress_bar as progress_bar, setup_logging as setup_logging
from openppo.tracking.metrics import Histogram as Histogram, Metrics as Metrics, Moments as Moments
from openppo.tracking.metrics import Reduction as Reduction, histogram as histogram
from openppo.tracking.profiler import StepProfiler as StepProfiler
from openppo.tracking.run_folder import check_run_folder as check_run_folder, cut_logs as cut_logs
from openppo.tracking.run_folder import environment as environment, save_run as save_run
from openppo.tracking.run_folder import (
    set_aside_logs as set_aside_logs,
    set_aside_model as set_aside_model,
)
from openppo.tracking.timer import PhaseTimer as PhaseTimer
from openppo.tracking.trackers import (
    check_trackers as check_trackers,
    make_trackers as make_trackers,
)
from openppo.tracking.trackers.dashboards import (
    TensorBoardTracker as TensorBoardTracker,
    WandbTracker as WandbTracker,
)
from openppo.tracking.trackers.local import (
    ConsoleTracker as ConsoleTracker,
    JSONLTracker as JSONLTracker,
)
from openppo.tracking.trackers.local import json_form as json_form
from openppo.tracking.trackers.rollouts import (
    RolloutTracker as RolloutTracker,
    prepare_rollouts as prepare_rollouts,
)
from openppo.tracking.trackers.tracker import Tracker as Tracker, Trackers as Trackers
