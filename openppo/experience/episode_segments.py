"""Rows of a batch as segments of episodes."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from openppo.experience.token_rewards import StepRewards
from openppo.rollout.episodes import by_episode, episode_numbers
from openppo.types import Trajectory


class EpisodeSegments:
    """Rows (B,) of a batch as segments of episodes (E,); baselines and groups count each episode once."""

    def __init__(self, trajectories: Sequence[Trajectory], device: torch.device) -> None:
        numbers = episode_numbers(trajectories)
        n_segments = Counter[int]()
        positions = []
        last_rows: dict[int, int] = {}
        for row, number in enumerate(numbers):
            positions.append(n_segments[number])
            n_segments[number] += 1
            last_rows[number] = row

        self.most = max(n_segments.values())
        """Largest number of segments of an episode."""
        self.episodes = torch.tensor(numbers, device=device)
        """Episode of each row (B,)."""
        self.positions = torch.tensor(positions, device=device)
        """Position of each row among its episode's segments (B,)."""
        self.last = torch.tensor(list(last_rows.values()), device=device)
        """Row of each episode's last segment (E,)."""

        episodes = by_episode(trajectories)
        last_segments = [segments[-1] for segments in episodes]
        groups = [segment.group for segment in last_segments]
        self.groups = torch.tensor(groups, device=device)
        """Prompt of each episode, int64 (E,)."""
        are_of_agents = [segment.episode is not None for segment in last_segments]
        self.of_agent = torch.tensor(are_of_agents, device=device)
        """True for an agent's episode, False for a single response, (E,)."""
        truncated = [segment.truncated for segment in last_segments]
        self.truncated = torch.tensor(truncated, device=device)
        """True if ``--generate_max_len`` cut off the last answer, (E,)."""
        longest = [_longest_turn(segments) for segments in episodes]
        self.longest = torch.tensor(longest, device=device)
        """Action tokens of the longest turn, (E,)."""

    def join(self, scores: Tensor, steps: StepRewards) -> tuple[Tensor, StepRewards]:
        """Scores (E,), and step rewards of all segments side by side, (E, segments * L)."""
        rewards = self._join_rows(steps.rewards)
        ends = self._join_rows(steps.ends)
        return scores[self.last], StepRewards(rewards, ends)

    def outcomes(self, scores: Tensor, steps: StepRewards) -> tuple[Tensor, StepRewards]:
        """Add the rewards of an agent's turns to its score; steps of single responses stay as they are."""
        outcomes = torch.where(self.of_agent, steps.added_to(scores), scores)
        judged = steps.ends & ~self.of_agent[:, None]
        rewards = torch.where(judged, steps.rewards, 0.0)
        return outcomes, StepRewards(rewards, judged)

    def split(self, scores: Tensor, rewards: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Undo ``join``: scores (B,) and step rewards (B, L) of the segments.

        A segment's score includes the step rewards of later segments.
        """
        row_scores = scores[self.episodes]
        if rewards is None:
            return row_scores, None

        rewards = rewards.view(len(self.last), self.most, -1)  # (E, segments, L)
        sums = rewards.sum(-1)
        sums_from_here = sums.flip(-1).cumsum(-1).flip(-1)
        sums_of_later = sums_from_here - sums
        row_scores = row_scores + sums_of_later[self.episodes, self.positions]
        return row_scores, rewards[self.episodes, self.positions]

    def _join_rows(self, rows: Tensor) -> Tensor:
        """Put the rows (B, L) of an episode side by side, (E, segments * L)."""
        n_tokens = rows.shape[-1]
        joined = rows.new_zeros(len(self.last), self.most, n_tokens)
        joined = joined.index_put((self.episodes, self.positions), rows)
        return joined.flatten(1)


def _longest_turn(segments: Sequence[Trajectory]) -> int:
    lengths = [stop - start for segment in segments for start, stop in segment.spans]
    return max(lengths, default=0)
