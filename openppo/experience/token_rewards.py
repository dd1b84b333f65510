"""From trajectories to scores, and to one reward per token: shaped scores on the last action, less a KL penalty."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from openppo.config import RewardShapingConfig
from openppo.models.argument_order import check_tensor
from openppo.rewards import Scorer, start_scoring
from openppo.rollout.episodes import by_episode, episode_numbers, episode_reward
from openppo.rollout.failures import NothingTrainedError
from openppo.rollout.rollout import Rollout
from openppo.rollout.scores import write_scores
from openppo.tracking import Metrics
from openppo.tracking.metrics import Moments
from openppo.types import Comm, StopCheck, Trajectory

_EPS = 1e-8


def begin_scoring(
    scorer: Scorer | None,
    trajectories: list[Trajectory],
    stop: StopCheck,
    prefix: str = "",
) -> Rollout:
    """A rollout of ``trajectories`` on which scoring has begun, and on the greedy responses beside them.

    An episode is scored once, by its last trajectory, unless it failed or has a reward of the whole already. The metric
    ``reward_errors``, with ``prefix`` only if there are any, counts those on which the reward function raises.
    """
    greedy = list({id(part): part for t in trajectories for part in t.greedy}.values())
    metrics, parts = (
        Metrics(),
        [of_one for of_one in by_episode([*trajectories, *greedy]) if needs_score(of_one[-1])],
    )
    scored = [of_episode[-1] for of_episode in parts]
    wait_for = start_scoring(scorer, scored, stop) if scorer is not None else list

    def write() -> None:
        scores = wait_for()
        for score, of_episode in zip(scores, parts, strict=scorer is not None):
            write_scores(of_episode[-1:], [score])
            for other in of_episode[:-1]:
                other.scores.update(score.rewards)
        n_failed = sum(score.failed for score in scores)
        if n_failed or not prefix:
            metrics.add(f"{prefix}reward_errors", n_failed, reduce="sum")

    return Rollout(trajectories, metrics, write)


def check_rewarded(trajectories: Sequence[Trajectory], comm: Comm) -> None:
    """``NothingTrainedError`` on all ranks if a reward function failed on every sample of all of them. Collective.

    ``--reward_error_value`` stands in for single samples; a function that works on none says nothing about any.
    """
    errors = [parts[-1].reward_error for parts in by_episode(trajectories)]
    failed = [error for error in errors if error is not None]
    n_samples, n_failed = comm.all_reduce(torch.tensor([len(errors), len(failed)])).tolist()
    if n_failed == 0 or n_failed < n_samples:
        return

    first = next(error for of_rank in comm.all_gather_object(failed[:1]) for error in of_rank)
    raise NothingTrainedError(
        f"the reward function raised on all {n_samples} samples, --reward_error_value or not; the first: {first}"
    )


def needs_score(trajectory: Trajectory) -> bool:
    """Whether sources of rewards score it: not an episode that failed or has a reward of the whole already."""
    return trajectory.episode is None or (
        trajectory.episode.ending.is_trained and not trajectory.scores
    )


def useful_groups(
    trajectories: Sequence[Trajectory], compares_steps: bool, weights: Mapping[str, float]
) -> list[Trajectory]:
    """Scored trajectories whose group has different rewards: the others teach nothing (arXiv 2503.14476)."""
    if not trajectories:
        return []
    episodes = by_episode(trajectories)
    rewards = [episode_reward(parts, weights) for parts in episodes]
    if (
        compares_steps
    ):  # unequal steps of single responses teach something even if their sums are equal
        earned = [
            (reward, *_judged_steps(parts[-1]))
            for reward, parts in zip(rewards, episodes, strict=True)
        ]
        rewards = [earned.index(each) for each in earned]
    same = one_reward_groups(
        torch.tensor(rewards), torch.tensor([parts[0].group for parts in episodes])
    )
    return [
        t for parts, drop in zip(episodes, same.tolist(), strict=True) if not drop for t in parts
    ]


def _judged_steps(trajectory: Trajectory) -> list[float]:
    """Rewards that are compared step by step: those of a single response, not of an agent's turns."""
    return trajectory.step_rewards if trajectory.episode is None else []


@dataclass(frozen=True)
class StepRewards:
    """Rewards of steps or tokens, 0 outside ``ends``; both (B, L)."""

    rewards: Tensor
    ends: Tensor

    def added_to(self, scores: Tensor) -> Tensor:
        """Whole rewards (B,): ``scores`` (B,) and those of all steps."""
        return (scores.double() + self.rewards.double().sum(-1)).to(scores.dtype)

    def taken_from(self, whole_rewards: Tensor) -> Tensor:
        """Scores (B,): ``whole_rewards`` (B,) without those of all steps."""
        return (whole_rewards.double() - self.rewards.double().sum(-1)).to(whole_rewards.dtype)


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


def compute_reward(
    scores: Tensor,
    kl: Tensor | None,
    action_mask: Tensor,
    kl_coef: float,
    reward_clip_range: tuple[float, float] | None = None,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """r_t = -kl_coef kl_t + token_reward_t + [t is the last action] clip(score) (arXiv 1909.08593, 2009.01325).

    ``scores`` (B,), ``kl`` (B, L) k1 of each token or None without a reference, ``action_mask`` bool (B, L),
    ``token_rewards`` (B, L) are not clipped. Returns float32 (B, L), 0 outside the mask.
    """
    order = "compute_reward(scores, kl, action_mask, kl_coef, reward_clip_range)"
    check_tensor(scores, "scores", n_dims=1, order=order)
    if kl is not None:
        check_tensor(kl, "kl", n_dims=2, order=order)
    check_tensor(action_mask, "action_mask", n_dims=2, order=order)
    if isinstance(kl_coef, Tensor) and kl_coef.ndim > 0:
        raise TypeError(
            f"kl_coef has the shape {tuple(kl_coef.shape)}, and is one number: OpenPPO's order is {order}."
        )

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


def soft_overlong_penalty(
    lengths: Tensor, max_len: int, buffer_len: int, factor: float = 1.0
) -> Tensor:
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
        scores = scores + soft_overlong_penalty(
            lengths, max_len, buffer, factor=config.overlong_penalty_factor
        )
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
    low, high = (
        start.scatter_reduce(0, index, rewards, which, include_self=False)
        for which in ("amin", "amax")
    )
    return (low == high)[index]


class RunningMoments(Moments):
    """Moments of the whole rewards of all ranks' episodes so far."""

    def update(self, scores: Tensor, comm: Comm) -> None:
        """Take in this rank's ``scores`` (B,); B may differ and be 0. Collective."""
        self.merge(Moments.of(scores, comm))

    @property
    def scale(self) -> float:
        """sqrt(var + 1e-8), by which rewards are divided."""
        return float((self.variance + _EPS) ** 0.5)

    def normalize(self, scores: Tensor) -> Tensor:
        """(score - mean) / sqrt(var + 1e-8), same shape."""
        return (scores - self.mean) / self.scale

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
