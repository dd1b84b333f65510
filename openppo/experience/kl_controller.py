"""The coefficient of the KL penalty over time."""

from __future__ import annotations


class FixedKLController:
    """A coefficient that never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Ignore the measured KL."""
