"""Mean and variance of the rewards of a run so far."""

from dataclasses import asdict

from torch import Tensor

from openppo.tracking.metrics import Moments
from openppo.types import Comm

_EPS = 1e-8


class RunningMoments(Moments):
    """Moments of the whole rewards of all episodes so far, on all ranks."""

    def update(self, scores: Tensor, comm: Comm) -> None:
        """Add this rank's ``scores`` (B,); B may differ between ranks and be 0. Collective."""
        self.merge(Moments.of(scores, comm))

    @property
    def scale(self) -> float:
        """Divisor of rewards, sqrt(var + 1e-8)."""
        return float((self.variance + _EPS) ** 0.5)

    def normalize(self, scores: Tensor) -> Tensor:
        """Return (score - mean) / sqrt(var + 1e-8), of the same shape."""
        return (scores - self.mean) / self.scale

    def state_dict(self) -> dict[str, float]:
        """State for ``load_state_dict``, as JSON."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the moments of an earlier run."""
        vars(self).update(state)
