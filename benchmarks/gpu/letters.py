"""An environment and a reward for sorted letters, in commands.sh."""

import random
from typing import Any


class Letters:
    """Two turns: sort a word, then the same word backwards."""

    def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
        self.n_turns, self.word = 0, "".join(random.Random(seed).choices("abcdefgh", k=3))
        return self.word + ">", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.n_turns += 1
        return self.word[::-1] + ">", _is_sorted(self.word, action), self.n_turns == 2, False, {}


def reward_fn(prompt: str, response: str) -> float:
    """1 for the letters of the prompt in order."""
    return _is_sorted(prompt.strip().rstrip(">"), response)


def _is_sorted(word: str, answer: str) -> float:
    return float(answer.strip() == "".join(sorted(word)))
