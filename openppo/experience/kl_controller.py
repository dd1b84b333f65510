"""The coefficient of the KL penalty over time."""

import math


class FixedKLController:
    """A coefficient that never changes; a checkpoint does not change it either, since the option is in force."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Ignore the measured KL."""

    def state_dict(self) -> dict[str, float]:
        """What ``AdaptiveKLController.load_state_dict`` can resume from."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the coefficient of an earlier run."""


class AdaptiveKLController:
    """Moves the coefficient until the measured KL is ``target`` (arXiv 1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """coef *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon, after ``n_steps`` samples.

        ``current`` is the KL per action token that was measured on them. One that is not finite says nothing.
        """
        if not math.isfinite(current):
            return
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the coefficient of an earlier run."""
        self.value = state["value"]
