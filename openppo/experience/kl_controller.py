"""Coefficient of the KL penalty: fixed, or adapted to a target."""

import math


class FixedKLController:
    """Coefficient that never changes, even when a checkpoint is loaded.

    >>> controller = FixedKLController(0.1)
    >>> controller.update(current=6.0, n_steps=64)
    >>> controller.value
    0.1
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Ignore the measured KL."""

    def state_dict(self) -> dict[str, float]:
        """State for ``load_state_dict``, as JSON."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the coefficient of an earlier run."""


class AdaptiveKLController(FixedKLController):
    """Coefficient that moves the measured KL towards ``target`` (arXiv 1909.08593, section 2.2).

    >>> controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=100)
    >>> controller.update(current=12.0, n_steps=50)  # twice the target, which counts as 20 % too much
    >>> round(controller.value, 6)
    0.11
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        super().__init__(init_kl_coef)
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Adapt the coefficient to the KL of ``n_steps`` samples.

        coef *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon

        ``current`` is the KL per action token measured on these samples; it is ignored unless it is finite.
        """
        if not math.isfinite(current):
            return
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the coefficient of an earlier run."""
        self.value = state["value"]
