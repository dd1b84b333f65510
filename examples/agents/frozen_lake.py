"""gymnasium's FrozenLake as text: a map of its own for each seed, the place of the player as a letter.

    --environment examples/agents/frozen_lake.py:FrozenLake --n_envs 32 --max_steps 100

A row of --prompt_data may name the map: {"map": 7}.
"""

from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

MOVES = "LDRU"  # left, down, right, up: the numbers of FrozenLake's actions, in order
RULES = "P is you. Walk over ice (F) from S to G, around the holes (H). Answer with one letter: L, D, R or U.\n"


class FrozenLake:
    """A lake without slipping. Its ``ansi`` rendering marks the player by a colour only, which a model cannot see."""

    rules = RULES

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Lay out the map of ``seed``, or of the row's column ``map``."""
        lake = generate_random_map(size=4, seed=seed if options is None else options["map"])
        self.game = gymnasium.make(
            "FrozenLake-v1", desc=lake, is_slippery=False, max_episode_steps=30
        )
        place, info = self.game.reset(seed=seed)
        return self.rules + self.shown(place), info

    def parse(self, text: str) -> int | None:
        """Read a letter as a move."""
        letter = text.strip().upper()
        return MOVES.index(letter) if letter in [*MOVES] else None

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move; the reward is 1 at the goal."""
        place, reward, terminated, truncated, info = self.game.step(action)
        return self.shown(place), float(reward), terminated, truncated, info

    def close(self) -> None:
        """Close the game."""
        self.game.close()

    def shown(self, place: int) -> str:
        """Draw the map with the player on it."""
        rows = [[tile.decode() for tile in row] for row in self.game.unwrapped.desc]
        rows[place // len(rows)][place % len(rows)] = "P"
        return "\n".join(map("".join, rows))
