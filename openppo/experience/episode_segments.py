"""Rows of a batch as segments of episodes."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from openppo.experience.token_rewards import StepRewards
from openppo.rollout.rollout import by_episode, episode_numbers
from openppo.types import Trajectory


class EpisodeParts:
    """Rows (B,) as parts of episodes (E,), which baselines and groups count once."""

    def __init__(self, trajectories: Sequence[Trajectory], device: torch.device) -> None:
        numbers = episode_numbers(trajectories)
        last_rows: dict[int, int] = {}
        n_parts = Counter[int]()
        places = []
        for row, number in enumerate(numbers):
            places.append(n_parts[number])
            n_parts[number] += 1
            last_rows[number] = row

        episodes = by_episode(trajectories)
        self.most = max(n_parts.values())
        self.last = torch.tensor(list(last_rows.values()), device=device)
        """Row of each episode's last part (E,)."""
        self.places = torch.tensor(numbers, device=device), torch.tensor(places, device=device)
        self.groups = torch.tensor([parts[-1].group for parts in episodes], device=device)
        """Prompt of each episode, int64 (E,)."""
        self.of_agent = torch.tensor(
            [parts[-1].episode is not None for parts in episodes], device=device
        )
        """True for an agent's episode, False for a single response, (E,)."""
        self.truncated = torch.tensor([parts[-1].truncated for parts in episodes], device=device)
        """Whether ``--generate_max_len`` cut off the last answer, (E,)."""
        self.longest = torch.tensor([_longest_turn(parts) for parts in episodes], device=device)
        """Action tokens of the longest turn, (E,)."""

    def join(self, scores: Tensor, steps: StepRewards) -> tuple[Tensor, StepRewards]:
        """Scores (E,), and rewards of steps of all parts beside each other, (E, parts * L)."""
        return scores[self.last], StepRewards(self._beside(steps.rewards), self._beside(steps.ends))

    def outcomes(self, scores: Tensor, steps: StepRewards) -> tuple[Tensor, StepRewards]:
        """Add the rewards of an agent's turns to its score; steps of single responses stay."""
        whole = torch.where(self.of_agent, steps.added_to(scores), scores)
        judged = steps.ends & ~self.of_agent[:, None]
        return whole, StepRewards(torch.where(judged, steps.rewards, 0.0), judged)

    def split(self, scores: Tensor, rewards: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scores (B,) and step rewards (B, L) of the parts; a part's score includes the steps of later parts."""
        episodes, places = self.places
        if rewards is None:
            return scores[episodes], None
        of_parts = rewards.view(len(self.last), self.most, -1)
        later = of_parts.sum(-1).flip(-1).cumsum(-1).flip(-1) - of_parts.sum(-1)
        return scores[episodes] + later[episodes, places], of_parts[episodes, places]

    def _beside(self, of_rows: Tensor) -> Tensor:
        placed = of_rows.new_zeros(len(self.last), self.most, of_rows.shape[-1])
        return placed.index_put(self.places, of_rows).flatten(1)


def _longest_turn(parts: Sequence[Trajectory]) -> int:
    return max((stop - start for part in parts for start, stop in part.spans), default=0)
