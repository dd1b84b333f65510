"""Where metrics, samples and histograms go: console, JSON lines, TensorBoard, Weights & Biases."""

from openppo.tracking.trackers.console import ConsoleTracker
from openppo.tracking.trackers.jsonl import JSONLTracker, json_form
from openppo.tracking.trackers.make import check_trackers, make_trackers
from openppo.tracking.trackers.tensorboard import TensorBoardTracker
from openppo.tracking.trackers.tracker import Tracker, Trackers
from openppo.tracking.trackers.wandb_tracker import WandbTracker

__all__ = [
    "ConsoleTracker",
    "JSONLTracker",
    "TensorBoardTracker",
    "Tracker",
    "Trackers",
    "WandbTracker",
    "check_trackers",
    "json_form",
    "make_trackers",
]
