"""Advantage estimators by name: each is an entry of ``ESTIMATORS``, made of pure functions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.config import AdvantageConfig, LossAggregation
from openppo.experience.advantages import (
    get_advantages_and_returns,
    get_cumulative_returns,
    length_adaptive_lambda,
    pack_actions,
)
from openppo.experience.token_rewards import StepRewards

Rewarded = tuple[Tensor, Tensor | None]
Rewards = Callable[[Tensor, StepRewards, Tensor, Tensor | None], Rewarded]
"""``rewards(scores, steps, groups, greedy)``: new scores (B,) and step rewards (B, L).

The arguments have an entry for each sample, in any order: its score, the rewards of its steps, its prompt's id
int64, and the reward of the greedy response to that prompt (None unless ``needs_greedy``).
"""
Baseline = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``baseline(totals, groups, greedy)``: numbers (B,) to subtract from whole rewards (B,)."""
Advantages = Callable[
    [Tensor, Tensor | None, Tensor, AdvantageConfig, float | None], tuple[Tensor, Tensor]
]
"""``advantages(rewards, values, action_mask, config, lambd_critic)``: advantages and returns.

All (B, L) and 0 outside ``action_mask``; token rewards include the KL penalty. ``values`` is None without a critic;
``lambd_critic``, unless it is None, replaces the option of that name.
"""
_EPS = 1e-9
_EQUAL = 1e-6


def plain_rewards(
    scores: Tensor, steps: StepRewards, groups: Tensor, greedy: Tensor | None
) -> Rewarded:
    """Leave scores and rewards of steps as they are."""
    return scores, steps.rewards


def centred(baseline: Baseline) -> Rewards:
    """Subtract a baseline from whole rewards; each action has the advantage of its sample.

    >>> estimator = Estimator(centred(lambda totals, groups, greedy: torch.ones_like(totals)))
    >>> no_steps = StepRewards(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    >>> estimator.rewards(torch.tensor([1.0, 3.0]), no_steps, torch.tensor([0, 0]), None)
    (tensor([0., 2.]), None)
    """

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
    """Discounted rewards to go, used both as advantages and as returns."""
    returns = get_cumulative_returns(rewards, action_mask, config.gamma)
    return returns, returns


def generalized_advantages(
    rewards: Tensor,
    values: Tensor | None,
    action_mask: Tensor,
    config: AdvantageConfig,
    lambd_critic: float | None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, with a separate lambda for the critic if options set one."""
    assert values is not None
    lambd: float | Tensor = config.lambd
    if lambd_critic is None:
        lambd_critic = config.lambd_critic

    if config.adaptive_lambd_alpha is not None:
        lambd = length_adaptive_lambda(action_mask, config.adaptive_lambd_alpha)
        if lambd_critic is None:
            lambd_critic = config.lambd

    return get_advantages_and_returns(
        values, rewards, action_mask, gamma=config.gamma, lambd=lambd, lambd_critic=lambd_critic
    )


@dataclass(frozen=True)
class Estimator:
    """One entry of ``ESTIMATORS``: two functions and their needs.

    >>> Estimator(centred(group_mean), normalize=False).normalizes("default")
    False
    """

    rewards: Rewards = plain_rewards
    """Applied before the KL penalty, which is neither centred nor divided."""
    advantages: Advantages = rewards_to_go
    uses_critic: bool = False
    """Needs the values of a critic."""
    needs_greedy: bool = False
    """Needs the reward of the greedy response to each prompt."""
    compares_responses: bool = False
    """Compares the responses to one prompt, of which there must be at least two."""
    compares_steps: bool = False
    """True if responses of equal whole reward count as different when the rewards of their steps differ."""
    normalize: bool = True
    """Default of ``--normalize_advantages``, over the action tokens of the whole buffer."""
    loss_agg: LossAggregation = "token_mean"
    """Default of ``--loss_agg``, by which the policy loss is summed."""

    def normalizes(self, choice: str) -> bool:
        """True if advantages are normalized; ``choice`` is ``default``, ``on`` or ``off``."""
        if choice == "default":
            return self.normalize
        return choice == "on"


def group_mean(totals: Tensor, groups: Tensor, greedy: Tensor | None) -> Tensor:
    """Mean reward of all responses to the prompt, this one included (arXiv 2501.03262, 2503.20783)."""
    _, mean, _ = _group_statistics(totals, groups)
    return mean.to(totals.dtype)


def leave_one_out_mean(totals: Tensor, groups: Tensor, greedy: Tensor | None) -> Tensor:
    """Mean reward of the other responses to the prompt (RLOO, arXiv 2402.14740)."""
    count, mean, _ = _group_statistics(totals, groups)
    _require_several(count, "--advantage_estimator rloo")
    sum_of_others = mean * count - totals.double()
    return (sum_of_others / (count - 1)).to(totals.dtype)


def greedy_reward(totals: Tensor, groups: Tensor, greedy: Tensor | None) -> Tensor:
    """Reward of the greedy response to the prompt (ReMax, arXiv 2310.10505)."""
    assert greedy is not None
    return greedy.to(totals)


def normalized_by_group(
    scores: Tensor, steps: StepRewards, groups: Tensor, greedy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Normalize scores (B,) and step rewards (B, L) by their group.

    This follows arXiv 2402.03300, section 4.1.3, with scores in addition to steps. From each kind its own mean is
    subtracted, and both are divided by the root of the sum of both unbiased variances + 1e-9, so that weights between
    the kinds keep their meaning. Steps with the same rewards in all responses of a group are left out. This is process
    supervision of single responses: an agent's turns belong to its score (``SampleRows.outcomes``).
    """
    ends = steps.ends & ~_are_alike(steps, groups)[:, None]
    count, mean, squares = _group_statistics(scores, groups)
    _require_several(count, "--advantage_estimator group_norm")
    n_steps, step_mean, step_squares = _group_statistics(steps.rewards, groups, ends)

    variance = squares / (count - 1)
    step_variance = step_squares / (n_steps - 1).clamp(min=1)
    std = (variance + step_variance).sqrt()
    alike = std <= _EQUAL * (1 + (mean.abs() + step_mean.abs()))  # rewards differ by rounding only
    scale = torch.where(alike, torch.inf, std + _EPS).to(scores.dtype)

    centred_scores = scores - mean.to(scores.dtype)
    centred_steps = steps.rewards - step_mean[:, None].to(scores.dtype)
    centred_steps = torch.where(ends, centred_steps, 0.0)
    return centred_scores / scale, centred_steps / scale[:, None]


def group_moments(totals: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased std + 1e-9 of the whole rewards (B,) in each row's group; both (B,).

    The std is infinite where rewards differ only by rounding, so that quotients by it are 0.
    """
    count, mean, squares = _group_statistics(totals, groups)
    _require_several(count, "--normalize_reward group")
    std = (squares / (count - 1)).sqrt()
    alike = std <= _EQUAL * (1 + mean.abs())
    scale = torch.where(alike, torch.inf, std + _EPS)
    return mean.to(totals.dtype), scale.to(totals.dtype)


def _group_statistics(
    rewards: Tensor, groups: Tensor, counted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and squared deviations per group, (B,) float64 each.

    ``rewards`` (B,), or (B, L) with the mask ``counted``. In float64 the mean of equal rewards is exactly that reward,
    so that such a group has advantages of exactly 0.
    """
    values = (rewards[:, None] if rewards.dim() == 1 else rewards).double()  # (B, 1) or (B, L)
    counts = torch.ones_like(values) if counted is None else counted.double()
    count = _group_sum(counts.sum(-1), groups)
    total = _group_sum((counts * values).sum(-1), groups)
    mean = total / count.clamp(min=1)
    deviations = counts * (values - mean[:, None]).square()
    return count, mean, _group_sum(deviations.sum(-1), groups)


def _group_sum(numbers: Tensor, groups: Tensor) -> Tensor:
    """Sum of ``numbers`` (B,) over each row's group, (B,)."""
    _, index = groups.unique(return_inverse=True)
    sums = torch.zeros_like(numbers).index_add_(0, index, numbers)
    return sums[index]


def _are_alike(steps: StepRewards, groups: Tensor) -> Tensor:
    """True for rows whose whole group has the same step rewards in order, bool (B,)."""
    n_steps = steps.ends.sum(-1)
    places = steps.ends.cumsum(-1) - 1
    packed = pack_actions(steps.rewards, steps.ends, places)  # (B, L), steps first

    ids, index = groups.unique(return_inverse=True)
    rows = torch.arange(len(groups), device=groups.device)
    first_rows = rows.new_zeros(len(ids))
    first_rows = first_rows.scatter_reduce(0, index, rows, "amin", include_self=False)
    first = first_rows[index]  # (B,), the first row of each row's group

    distance = (packed - packed[first]).abs().amax(-1)
    same_rewards = distance <= _EQUAL * (1 + packed.abs().amax(-1))
    same_number = n_steps == n_steps[first]
    n_different = _group_sum((~(same_rewards & same_number)).long(), groups)
    return n_different == 0


def _require_several(count: Tensor, name: str) -> None:
    if bool((count < 2).any()):
        raise ValueError(
            f"{name} met a prompt with a single response, which it cannot compare with others: "
            "use --n_samples_per_prompt of at least 2, and keep the responses to a prompt together."
        )


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(advantages=generalized_advantages, uses_critic=True),
    "reinforce": Estimator(),
    "reinforce_baseline": Estimator(centred(group_mean), compares_responses=True),
    "rloo": Estimator(centred(leave_one_out_mean), compares_responses=True),
    "group_norm": Estimator(
        normalized_by_group, compares_responses=True, compares_steps=True, normalize=False
    ),
    "dr_grpo": Estimator(
        centred(group_mean), compares_responses=True, normalize=False, loss_agg="constant"
    ),
    "remax": Estimator(centred(greedy_reward), needs_greedy=True, normalize=False),
}
"""Estimators by the names of ``--advantage_estimator``.

>>> list(ESTIMATORS)
['gae', 'reinforce', 'reinforce_baseline', 'rloo', 'group_norm', 'dr_grpo', 'remax']
"""
