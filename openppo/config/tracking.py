"""Options of what shows a run: console, TensorBoard, Weights & Biases, profiler, self-check."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from openppo.config.fields import Options, not_empty, not_negative, option, require


@dataclass(frozen=True)
class TrackingConfig(Options):
    """Destinations of metrics, samples and profiles."""

    use_tensorboard: str | None = option(None, place=True)
    """Folder for TensorBoard event files (off when not given); each run gets a subfolder, named as with --use_wandb."""
    use_wandb: str | None = option(None, not_empty, ": give it alone, with an API key, or not at all", place=True)
    """Log to Weights & Biases; the key is optional (better keep it in WANDB_API_KEY). Needs 'wandb'."""
    wandb_project: str = "openppo"
    """With --use_wandb: project."""
    wandb_run_name: str | None = None
    """Name of the run, with --use_wandb and --use_tensorboard (default: the last folder of --save_path)."""
    wandb_group: str | None = None
    """With --use_wandb: group of runs that it belongs to."""
    wandb_org: str | None = None
    """With --use_wandb: team or user that owns the project (default: that of the key)."""
    wandb_mode: Literal["online", "offline"] | None = None
    """With --use_wandb: 'offline' writes to <save_path>/logs/wandb only, for 'wandb sync' (default: WANDB_MODE, else
    online)."""
    log_samples_every: int = option(10, not_negative, "; 0 prints none")
    """Print a sample every this many steps (0: never)."""
    self_check: bool = True
    """Before training on the first batch print two samples of it token by token, with what is trained on."""
    profile_steps: str | None = None
    """Steps to record with torch.profiler, such as 3 or 2-4,10: a trace of each rank in <save_path>/logs/profile."""

    def validate(self) -> None:
        super().validate()
        for first, last in self._profiled_ranges():
            require(1 <= first <= last, f"--profile_steps {self.profile_steps}: steps count from 1, ranges go upwards.")

    @property
    def shows_histograms(self) -> bool:
        """Whether a tracker shows distributions."""
        return self.use_tensorboard is not None or self.use_wandb is not None

    def is_profiled(self, step: int) -> bool:
        """Whether ``--profile_steps`` names this step, counted from 1."""
        return any(first <= step <= last for first, last in self._profiled_ranges())

    def _profiled_ranges(self) -> list[tuple[int, int]]:
        """First and last step of each range."""
        if self.profile_steps is None:
            return []
        parts = self.profile_steps.replace(" ", "").split(",")
        matches = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in parts]
        require(
            all(matches),
            f"--profile_steps {self.profile_steps}: give steps and ranges with commas, such as 3 or 2-4,10.",
        )
        return [(int(match[1]), int(match[2] or match[1])) for match in matches if match]
