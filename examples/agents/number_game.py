"""A game to begin with: find a number from 0 to 9 with the words higher and lower.

--environment examples/agents/number_game.py:NumberGame --n_envs 64 --max_steps 200
"""

import random
import re
from typing import Any


class NumberGame:
    """An environment: gymnasium's methods, with text for observations."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Choose a number; the same for the same seed."""
        self.number, self.guesses = random.Random(seed).randrange(10), 0
        return "I think of a number from 0 to 9. Guess it, with one digit, in four guesses.", {}

    def parse(self, text: str) -> int | None:
        """Read the last digit of an answer as the guess; None for an answer without one."""
        digits = re.findall(r"\d", text)
        return int(digits[-1]) if digits else None

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info."""
        self.guesses += 1
        if action == self.number:
            return "right", 1.0, True, False, {}
        return "higher" if action < self.number else "lower", 0.0, False, self.guesses == 4, {}

    def close(self) -> None:
        """Release nothing."""
