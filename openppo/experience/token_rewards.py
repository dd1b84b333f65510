"""From trajectories to scores, and to one reward per token: shaped scores on the last action, less a KL penalty."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from openppo.config import RewardShapingConfig
from openppo.models.log_probs import KLEstimator, compute_approx_kl
from openppo.rewards import Scorer, start_scoring
from openppo.rollout.rollout import Rollout, by_episode, check_weights, episode_numbers, episode_reward, write_scores
from openppo.tracking import Metrics
from openppo.tracking.metrics import Moments
from openppo.types import Comm, StopCheck, Trajectory

_LARGEST_K3 = 10.0
_EPS = 1e-8


def begin_scoring(
    scorer: Scorer | None,
    trajectories: list[Trajectory],
    weights: Mapping[str, float],
    stop: StopCheck,
    prefix: str = "",
) -> Rollout:
    """A rollout of ``trajectories`` on which scoring has begun, and on the greedy responses beside them.

    An episode is scored once, by its last trajectory, unless it failed or has a reward of the whole already. The metric
    ``reward_errors``, with ``prefix`` only if there are any, counts those on which the reward function raises. Reading
    raises ``ValueError`` if ``weights`` names no reward.
    """
    greedy = list({id(t.greedy): t.greedy for t in trajectories if t.greedy is not None}.values())
    metrics, parts = Metrics(), [of_one for of_one in by_episode([*trajectories, *greedy]) if needs_score(of_one[-1])]
    scored = [of_episode[-1] for of_episode in parts]
    wait_for = start_scoring(scorer, scored, stop) if scorer is not None else list

    def write() -> None:
        scores = wait_for()
        for score, of_episode in zip(scores, parts, strict=scorer is not None):
            write_scores(of_episode[-1:], [score])
            for other in of_episode[:-1]:
                other.scores.update(score.rewards)
        check_weights(scored, weights)
        n_failed = sum(score.failed for score in scores)
        if n_failed or not prefix:
            metrics.add(f"{prefix}reward_errors", n_failed, reduce="sum")

    return Rollout(trajectories, metrics, write)


def needs_score(trajectory: Trajectory) -> bool:
    """Whether sources of rewards score it: not an episode that failed or has a reward of the whole already."""
    return trajectory.episode is None or (trajectory.episode.ending.is_trained and not trajectory.scores)


def useful_groups(
    trajectories: Sequence[Trajectory], compares_steps: bool, weights: Mapping[str, float]
) -> list[Trajectory]:
    """Scored trajectories whose group has different rewards: the others teach nothing (arXiv 2503.14476)."""
    if not trajectories:
        return []
    episodes = by_episode(trajectories)
    rewards = [episode_reward(parts, weights) for parts in episodes]
    if compares_steps:  # unequal steps teach something even if their sums are equal
        steps = [[reward for part in parts for reward in part.step_rewards] for parts in episodes]
        earned = [(parts[-1].total_score(weights), *steps[i]) for i, parts in enumerate(episodes)]
        rewards = [earned.index(each) for each in earned]
    same = one_reward_groups(torch.tensor(rewards), torch.tensor([parts[0].group for parts in episodes]))
    return [t for parts, drop in zip(episodes, same.tolist(), strict=True) if not drop for t in parts]


@dataclass(frozen=True)
class StepRewards:
    """Rewards of steps or tokens, 0 outside ``ends``; both (B, L)."""

    rewards: Tensor
    ends: Tensor

    def added_to(self, scores: Tensor) -> Tensor:
        """Whole rewards (B,): ``scores`` (B,) and those of all steps."""
        return (scores.double() + self.rewards.double().sum(-1)).to(scores.dtype)


def collect_step_rewards(trajectories: Sequence[Trajectory], device: torch.device) -> StepRewards:
    """Collate rewards of steps or tokens."""
    rewards = torch.zeros(len(trajectories), max(len(t.token_ids) for t in trajectories))
    ends = torch.zeros(rewards.shape, dtype=torch.bool)
    for row, t in enumerate(trajectories):
        if t.token_rewards is not None:
            rewards[row, : len(t.token_rewards)] = torch.tensor(t.token_rewards)
            rewarded = torch.tensor(t.action_mask if t.step_ends is None else t.step_ends)
            ends[row, : len(t.action_mask)] = rewarded & torch.tensor(t.action_mask)
    return StepRewards(torch.where(ends, rewards, 0.0).to(device), ends.to(device))


class EpisodeParts:
    """Rows (B,) as parts of episodes (E,), which baselines and groups count once."""

    def __init__(self, trajectories: Sequence[Trajectory], device: torch.device) -> None:
        episodes, rows = episode_numbers(trajectories), defaultdict[int, list[int]](list)
        places = []
        for row, episode in enumerate(episodes):
            places.append(len(rows[episode]))
            rows[episode].append(row)
        self.most = 1 + max(places)
        self.last = torch.tensor([of_one[-1] for of_one in rows.values()], device=device)
        """Row of each episode's last part (E,)."""
        self.places = torch.tensor(episodes, device=device), torch.tensor(places, device=device)

    def join(self, scores: Tensor, steps: StepRewards) -> tuple[Tensor, StepRewards]:
        """Scores (E,), and rewards of steps of all parts beside each other, (E, parts * L)."""
        rewards, ends = (self._beside(each) for each in (steps.rewards, steps.ends))
        return scores[self.last], StepRewards(rewards, ends)

    def split(self, scores: Tensor, rewards: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The same of the parts, (B,) and (B, L). What later parts earn by steps is earned at the end of a part too."""
        episodes, places = self.places
        if rewards is None:
            return scores[episodes], None
        of_parts = rewards.view(len(self.last), self.most, -1)
        later = of_parts.sum(-1).flip(-1).cumsum(-1).flip(-1) - of_parts.sum(-1)
        return scores[episodes] + later[episodes, places], of_parts[episodes, places]

    def _beside(self, of_rows: Tensor) -> Tensor:
        placed = of_rows.new_zeros(len(self.last), self.most, of_rows.shape[-1])
        return placed.index_put(self.places, of_rows).flatten(1)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, action_mask: Tensor, kl_estimator: KLEstimator) -> Tensor:
    """KL penalty (B, L); k3 at most 10, like verl's ``low_var_kl``: one unlikely token may be a million nats."""
    kl = compute_approx_kl(log_probs, ref_log_probs, action_mask, kl_estimator)
    return kl.clamp(max=_LARGEST_K3) if kl_estimator == "k3" else kl


def compute_reward(
    scores: Tensor,
    kl: Tensor | None,
    action_mask: Tensor,
    kl_coef: float,
    reward_clip_range: tuple[float, float] | None = None,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """r_t = -kl_coef kl_t + token_reward_t + [t is the last action] clip(score) (arXiv 1909.08593, 2009.01325).

    ``scores`` (B,), ``kl`` (B, L) per-token estimates or None without a reference, ``action_mask`` bool (B, L),
    ``token_rewards`` (B, L) are not clipped. Returns float32 (B, L), 0 outside the mask.
    """
    mask = action_mask.bool()
    if reward_clip_range is not None:
        scores = scores.clamp(*reward_clip_range)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(-1, keepdim=True)  # (B, 1), -1 without any action
    rewards = torch.where(places == last, scores[:, None].float(), 0.0)
    if kl is not None:
        rewards = rewards - kl_coef * kl
    if token_rewards is not None:
        rewards = rewards + token_rewards
    return torch.where(mask, rewards, 0.0).float()


def soft_overlong_penalty(lengths: Tensor, max_len: int, buffer_len: int, factor: float = 1.0) -> Tensor:
    """0 up to max_len - buffer_len tokens, then a straight line down to -factor at max_len (arXiv 2503.14476, eq. 13).

    ``lengths`` (B,) are numbers of action tokens; float32 (B,), to be added to the scores.
    """
    over = (lengths - (max_len - buffer_len)) / buffer_len
    return -factor * over.clamp(0, 1).float()


def shape_scores(
    scores: Tensor, truncated: Tensor, lengths: Tensor, config: RewardShapingConfig, max_len: int
) -> Tensor:
    """Scores (B,) less the penalties for a missing end of sequence and for length, then clipped.

    ``truncated`` bool (B,): cut off by ``max_len``, the largest number of action tokens; ``lengths`` (B,) counts them.
    """
    if config.missing_eos_penalty is not None:
        scores = scores - config.missing_eos_penalty * truncated.to(scores.dtype)
    if (buffer := config.overlong_buffer_len) is not None:
        scores = scores + soft_overlong_penalty(lengths, max_len, buffer, config.overlong_penalty_factor)
    return scores.clamp(*config.reward_clip_range)


def overlong_mask(action_mask: Tensor, truncated: Tensor) -> Tensor:
    """``action_mask`` (B, L) without any action in rows that are ``truncated``, bool (B,) (arXiv 2503.14476)."""
    return action_mask.bool() & ~truncated.bool()[:, None]


def one_reward_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """True for rows whose prompt got the same reward for all its responses, so that nothing is to be learned.

    ``rewards`` (B,) and ``groups`` int64 (B,), in any order; bool (B,) (dynamic sampling, arXiv 2503.14476).
    """
    ids, index = groups.unique(return_inverse=True)
    start = rewards.new_zeros(len(ids))
    low, high = (start.scatter_reduce(0, index, rewards, which, include_self=False) for which in ("amin", "amax"))
    return (low == high)[index]


class RunningMoments(Moments):
    """Moments of all scores of all ranks so far."""

    def update(self, scores: Tensor, comm: Comm) -> None:
        """Take in this rank's ``scores`` (B,); B may differ and be 0. Collective."""
        self.merge(Moments.of(scores, comm))

    def normalize(self, scores: Tensor, further_variance: float = 0.0) -> Tensor:
        """(score - mean) / sqrt(var + ``further_variance`` + 1e-8), same shape."""
        return (scores - self.mean) / (self.variance + further_variance + _EPS) ** 0.5

    def state_dict(self) -> dict[str, float]:
        """What ``load_state_dict`` takes."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the moments of an earlier run."""
        vars(self).update(state)


class FixedKLController:
    """A coefficient that never changes, by a checkpoint neither."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Ignore the measured KL."""

    def state_dict(self) -> dict[str, float]:
        """What ``load_state_dict`` takes."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the coefficient of an earlier run."""


class AdaptiveKLController(FixedKLController):
    """Moves the coefficient until the measured KL is ``target`` (arXiv 1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        super().__init__(init_kl_coef)
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """coef *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon, after ``n_steps`` samples.

        ``current`` is the KL per action token that was measured on them. One that is not finite says nothing.
        """
        if math.isfinite(current):
            error = min(max(current / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * n_steps / self.horizon

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the coefficient of an earlier run."""
        self.value = state["value"]
