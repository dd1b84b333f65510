"""Numbers of samples, and of the rows of their batch, which are their segments."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openppo.experience.token_rewards import StepRewards
from openppo.types import Sample


class SampleRows:
    """Samples (N,) and the rows (B,) of their batch; baselines and groups count each sample once."""

    def __init__(self, samples: Sequence[Sample], device: torch.device) -> None:
        counts = [len(sample.segments) for sample in samples]
        self.n_rows = torch.tensor(counts, device=device)
        """Rows of each sample (N,)."""
        groups = [sample.group for sample in samples]
        self.groups = torch.tensor(groups, device=device)
        """Prompt of each sample, int64 (N,)."""
        are_of_agents = [sample.episode is not None for sample in samples]
        self.of_agent = torch.tensor(are_of_agents, device=device)
        """True for an agent's episode, False for a single response, (N,)."""
        truncated = [sample.truncated for sample in samples]
        self.truncated = torch.tensor(truncated, device=device)
        """True if ``--generate_max_len`` cut off the last answer, (N,)."""
        longest = [_longest_turn(sample) for sample in samples]
        self.longest = torch.tensor(longest, device=device)
        """Action tokens of the longest turn, (N,)."""

    def outcomes(self, scores: Tensor, steps: StepRewards) -> tuple[Tensor, StepRewards]:
        """Add the rewards of an agent's turns to its score; steps of single responses stay as they are."""
        outcomes = torch.where(self.of_agent, steps.added_to(scores), scores)
        judged = steps.ends & ~self.of_agent[:, None]
        rewards = torch.where(judged, steps.rewards, 0.0)
        return outcomes, StepRewards(rewards, judged)

    def by_row(self, scores: Tensor, rewards: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scores (B,) and step rewards (B, L) of rows, from those of samples as ``collect_step_rewards`` has them.

        A row's score includes the step rewards of later rows of its sample.
        """
        row_scores = scores.repeat_interleave(self.n_rows)
        if rewards is None:
            return row_scores, None

        most = int(self.n_rows.max())
        is_row = torch.arange(most, device=rewards.device) < self.n_rows[:, None]  # (N, rows)
        rewards = rewards.view(len(self.n_rows), most, -1)  # (N, rows, L)
        sums = rewards.sum(-1)
        sums_from_here = sums.flip(-1).cumsum(-1).flip(-1)
        sums_of_later = sums_from_here - sums
        return row_scores + sums_of_later[is_row], rewards[is_row]


def _longest_turn(sample: Sample) -> int:
    lengths = [stop - start for segment in sample.segments for start, stop in segment.spans]
    return max(lengths, default=0)
