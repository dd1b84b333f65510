"""The advantage estimators by name: an entry of ``ESTIMATORS`` each, made of pure functions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.config import AdvantageConfig, LossAggregation, TrainPPOConfig
from openppo.experience.advantages import (
    get_advantages_and_returns,
    get_cumulative_returns,
    length_adaptive_lambda,
    pack_actions,
)
from openppo.experience.token_rewards import StepRewards
from openppo.models.loss import POLICY_LOSSES

Rewarded = tuple[Tensor, Tensor | None]
Rewards = Callable[[Tensor, StepRewards, Tensor, Tensor | None], Rewarded]
"""``rewards(scores, steps, groups, greedy)``: each trajectory's score, rewards of its steps, its prompt's id int64,
and the reward of the greedy response to it (None unless ``needs_greedy``), all (B,) in any order, to what replaces
scores (B,) and rewards of steps (B, L)."""
Baseline = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``baseline(totals, groups, greedy)``: what to subtract from whole rewards (B,)."""
Advantages = Callable[
    [Tensor, Tensor | None, Tensor, AdvantageConfig, float | None], tuple[Tensor, Tensor]
]
"""``advantages(rewards, values, action_mask, config, lambd_critic)``: from token rewards after the KL penalty to
advantages and returns, all (B, L) and 0 outside ``action_mask``. ``values`` where there is a critic; ``lambd_critic``,
unless it is None, replaces the option of that name."""
_EPS = 1e-9
_EQUAL = 1e-6


def plain_rewards(
    scores: Tensor, steps: StepRewards, groups: Tensor, greedy: Tensor | None
) -> Rewarded:
    """Scores and rewards of steps as they are."""
    return scores, steps.rewards


def centred(baseline: Baseline) -> Rewards:
    """Whole rewards less a baseline; each action has the advantage of its trajectory."""

    def rewards(
        scores: Tensor, steps: StepRewards, groups: Tensor, greedy: Tensor | None
    ) -> Rewarded:
        totals = steps.added_to(scores)
        return totals - baseline(totals, groups, greedy), None

    return rewards


def rewards_to_go(
    rewards: Tensor,
    values: Tensor | None,
    action_mask: Tensor,
    config: AdvantageConfig,
    lambd_critic: float | None,
) -> tuple[Tensor, Tensor]:
    """Discounted rewards to go, which are the returns too."""
    returns = get_cumulative_returns(rewards, action_mask, config.gamma)
    return returns, returns


def generalized_advantages(
    rewards: Tensor,
    values: Tensor | None,
    action_mask: Tensor,
    config: AdvantageConfig,
    lambd_critic: float | None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, with another lambda for the critic's targets where options ask for it."""
    assert values is not None
    lambd: float | Tensor = config.lambd
    for_critic = lambd_critic if lambd_critic is not None else config.lambd_critic
    if config.adaptive_lambd_alpha is not None:
        lambd = length_adaptive_lambda(action_mask, config.adaptive_lambd_alpha)
        for_critic = config.lambd if for_critic is None else for_critic
    return get_advantages_and_returns(
        values, rewards, action_mask, gamma=config.gamma, lambd=lambd, lambd_critic=for_critic
    )


@dataclass(frozen=True)
class Estimator:
    """One entry of ``ESTIMATORS``: two functions, and what they need."""

    rewards: Rewards = plain_rewards  # before the KL penalty, which is neither centred nor divided
    advantages: Advantages = rewards_to_go
    uses_critic: bool = False  # needs the values of a critic
    needs_greedy: bool = False  # needs the reward of the greedy response to each prompt
    compares_steps: bool = (
        False  # responses of equal whole reward differ where rewards of their steps do
    )
    normalize: bool = True  # advantages over the action tokens of the whole buffer, unless an option says otherwise
    loss_agg: LossAggregation = (
        "token_mean"  # how the policy loss adds up, unless an option says otherwise
    )

    def normalizes(self, choice: str) -> bool:
        """Whether advantages are normalized: ``choice`` is ``default``, ``on`` or ``off``."""
        return self.normalize if choice == "default" else choice == "on"


def group_mean(totals: Tensor, groups: Tensor, greedy: Tensor | None) -> Tensor:
    """The mean reward of all responses to the prompt, this one included (arXiv 2501.03262, 2503.20783)."""
    _, mean, _ = _group_statistics(totals, groups)
    return mean.to(totals.dtype)


def leave_one_out_mean(totals: Tensor, groups: Tensor, greedy: Tensor | None) -> Tensor:
    """The mean reward of the other responses to the prompt (RLOO, arXiv 2402.14740)."""
    count, mean, _ = _group_statistics(totals, groups)
    _require_several(count, "--advantage_estimator rloo")
    return ((mean * count - totals.double()) / (count - 1)).to(totals.dtype)


def greedy_reward(totals: Tensor, groups: Tensor, greedy: Tensor | None) -> Tensor:
    """The reward of the greedy response to the prompt (ReMax, arXiv 2310.10505)."""
    assert greedy is not None
    return greedy.to(totals)


def normalized_by_group(
    scores: Tensor, steps: StepRewards, groups: Tensor, greedy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Normalize scores (B,) and step rewards (B, L) by their group (arXiv 2402.03300, section 4.1.3, with scores).

    Each less the mean of its kind, both divided by the root of the sum of both unbiased variances + 1e-9: weights
    between the kinds keep their meaning. Steps with the same rewards in all responses of a group are left out. This is
    process supervision of single responses: an agent's turns belong to its score (``EpisodeParts.outcomes``).
    """
    ends = steps.ends & ~_are_alike(steps, groups)[:, None]
    count, mean, squares = _group_statistics(scores, groups)
    _require_several(count, "--advantage_estimator group_norm")
    n_steps, step_mean, step_squares = _group_statistics(steps.rewards, groups, ends)
    std = (squares / (count - 1) + step_squares / (n_steps - 1).clamp(min=1)).sqrt()
    alike = std <= _EQUAL * (1 + (mean.abs() + step_mean.abs()))  # rewards differ by rounding only
    scale = torch.where(alike, torch.inf, std + _EPS).to(scores.dtype)
    centred = torch.where(ends, steps.rewards - step_mean[:, None].to(scores.dtype), 0.0)
    return (scores - mean.to(scores.dtype)) / scale, centred / scale[:, None]


def group_moments(totals: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std + 1e-9 of the whole rewards (B,) of each row's group, the std unbiased; both (B,).

    The std is infinite where rewards differ by rounding only, so that whatever is divided by it becomes 0.
    """
    count, mean, squares = _group_statistics(totals, groups)
    _require_several(count, "--reward_normalizer group")
    std = (squares / (count - 1)).sqrt()
    alike = std <= _EQUAL * (1 + mean.abs())
    return mean.to(totals.dtype), torch.where(alike, torch.inf, std + _EPS).to(totals.dtype)


def _group_statistics(
    rewards: Tensor, groups: Tensor, counted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and squared deviations per group, (B,) float64 each.

    ``rewards`` (B,), or (B, L) where ``counted``. In float64 the mean of equal rewards is exactly that reward, so that
    such a group has advantages of exactly 0.
    """
    values = (rewards[:, None] if rewards.dim() == 1 else rewards).double()
    counts = torch.ones_like(values) if counted is None else counted.double()
    count = _group_sum(counts.sum(-1), groups)
    mean = _group_sum((counts * values).sum(-1), groups) / count.clamp(min=1)
    return count, mean, _group_sum((counts * (values - mean[:, None]).square()).sum(-1), groups)


def _group_sum(numbers: Tensor, groups: Tensor) -> Tensor:
    _, index = groups.unique(return_inverse=True)
    return torch.zeros_like(numbers).index_add_(0, index, numbers)[index]


def _are_alike(steps: StepRewards, groups: Tensor) -> Tensor:
    """Whether all rows of the group have the same step rewards in order, bool (B,)."""
    counts, rows = (
        steps.ends.sum(-1),
        pack_actions(steps.rewards, steps.ends, steps.ends.cumsum(-1) - 1),
    )
    ids, index = groups.unique(return_inverse=True)
    every = torch.arange(len(groups), device=groups.device)
    first = every.new_zeros(len(ids)).scatter_reduce(0, index, every, "amin", include_self=False)[
        index
    ]
    same = (rows - rows[first]).abs().amax(-1) <= _EQUAL * (1 + rows.abs().amax(-1))
    return _group_sum((~same | (counts != counts[first])).long(), groups) == 0


def _require_several(count: Tensor, name: str) -> None:
    if bool((count < 2).any()):
        raise ValueError(
            f"{name} met a prompt with a single response, which it cannot compare with others: "
            "use --n_samples_per_prompt of at least 2, and keep the responses to a prompt together."
        )


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(advantages=generalized_advantages, uses_critic=True),
    "reinforce": Estimator(),
    "reinforce_baseline": Estimator(centred(group_mean)),
    "rloo": Estimator(centred(leave_one_out_mean)),
    "group_norm": Estimator(normalized_by_group, compares_steps=True, normalize=False),
    "dr_grpo": Estimator(centred(group_mean), normalize=False, loss_agg="constant"),
    "remax": Estimator(centred(greedy_reward), needs_greedy=True, normalize=False),
}
"""By the names of ``--advantage_estimator``."""


def loss_aggregation(config: TrainPPOConfig) -> LossAggregation:
    """``--loss_agg``, else what the policy loss asks for, else what the estimator asks for."""
    return (
        config.loss.loss_agg
        or POLICY_LOSSES[config.loss.loss_type].loss_agg
        or ESTIMATORS[config.advantage.advantage_estimator].loss_agg
    )
