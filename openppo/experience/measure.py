"""What is logged about scores and experience."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openppo.experience.replay_buffer import join_rows
from openppo.models.correction import RatioRange
from openppo.models.log_probs import KLEstimator, compute_approx_kl, masked_sum, policy_ratio
from openppo.rollout.episodes import by_episode, episode_reward, whole_rewards
from openppo.tracking import Histogram, Metrics, histogram
from openppo.types import Comm, Experience, Trajectory

_EQUAL = 1e-6


def measure_scores(
    trajectories: Sequence[Trajectory],
    weights: Mapping[str, float],
    metrics: Metrics,
    prefix: str = "",
) -> None:
    """All that was earned as ``reward``, and each named part before weights as ``reward/<name>``, of each episode.

    No part where the total says it all. What reward functions gave to be logged is ``extra/<name>``.
    """
    for parts in by_episode(trajectories):
        earned = episode_reward(parts, weights)
        metrics.add(f"{prefix}reward", earned)
        metrics.add(f"{prefix}reward_std", earned, reduce="std")
        metrics.add(f"{prefix}reward_max", earned, reduce="max")
        metrics.add(f"{prefix}reward_min", earned, reduce="min")
        for name, score in parts[-1].scores.items():
            if name != "reward" or name in weights:
                metrics.add(f"{prefix}reward/{name}", score)
        rewarded = [part.token_rewards for part in parts if part.token_rewards is not None]
        if rewarded and parts[-1].scores:
            metrics.add(f"{prefix}reward/of_tokens", sum(map(sum, rewarded)))
        for name, extra in parts[-1].extras.items():
            metrics.add(f"{prefix}extra/{name}", extra)


def measure_sources(
    trajectories: Sequence[Trajectory],
    names: Mapping[str, str],
    weights: Mapping[str, float],
    metrics: Metrics,
) -> None:
    """Of each data source by its name, where there are several: scores, lengths, and the share that was cut off."""
    for source, name in names.items() if len(names) > 1 else ():
        mine, prefix = [t for t in trajectories if t.prompt.source == source], f"source/{name}/"
        measure_scores(mine, weights, metrics, prefix=prefix)
        for trajectory in mine:
            metrics.add(f"{prefix}response_length", sum(trajectory.action_mask))
            metrics.add(f"{prefix}truncated_fraction", trajectory.truncated)


def measure_tasks(
    trajectories: Sequence[Trajectory],
    batch: Experience,
    weights: Mapping[str, float],
    n_done: int,
    metrics: Metrics,
) -> None:
    """Of each task of a run of several: reward, length, KL and staleness; rows of ``batch`` are ``trajectories``."""
    for name in sorted({t.prompt.task for t in trajectories} - {""}):
        rows = torch.tensor(
            [t.prompt.task == name for t in trajectories], device=batch.action_mask.device
        )
        mine, mask = [t for t in trajectories if t.prompt.task == name], batch.action_mask[rows]
        for parts in by_episode(mine):
            metrics.add(f"task/{name}/reward", episode_reward(parts, weights))
        metrics.add_tensor(f"task/{name}/response_length", mask.sum(-1).float())
        behind = [staleness(t, n_done)[torch.tensor(t.loss_mask)] for t in mine]
        metrics.add_tensor(f"task/{name}/staleness", torch.cat(behind))
        if batch.ref_log_probs is not None:
            kl = compute_approx_kl(
                batch.old_or_rollout_log_probs[rows], batch.ref_log_probs[rows], mask
            )
            metrics.add_tensor(f"task/{name}/kl", kl, mask)


def staleness(trajectory: Trajectory, n_done: int) -> Tensor:
    """Versions by which actions in the losses are behind the policy after ``n_done`` steps: (L,) float32, else 0."""
    tokens = zip(trajectory.versions, trajectory.loss_mask, strict=True)
    return torch.tensor(
        [float(n_done - version) if is_trained else 0.0 for version, is_trained in tokens]
    )


def measure_staleness(trajectories: Sequence[Trajectory], n_done: int, metrics: Metrics) -> None:
    """Versions by which action tokens are behind the policy that is trained on them, as mean and maximum."""
    of_each = [staleness(t, n_done)[torch.tensor(t.loss_mask)] for t in trajectories]
    behind = torch.cat([torch.zeros(0), *of_each])
    metrics.add_tensor("staleness", behind)
    metrics.add_tensor("staleness_max", behind, reduce="max")


def measure_signal(
    trajectories: Sequence[Trajectory],
    advantages: Tensor,
    action_mask: Tensor,
    weights: Mapping[str, float],
    metrics: Metrics,
) -> None:
    """Count groups whose rewards differ and whose advantages (B, L) are all 0: nothing is learned from them.

    Rewards that differ by rounding only are equal. Nothing is counted where each prompt has one response.
    """
    groups: dict[int, list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(row)
    if all(len(rows) == 1 for rows in groups.values()):
        return

    rewards = whole_rewards(trajectories, weights)
    teaches = ((advantages != 0) & action_mask).any(-1).tolist()
    for rows in groups.values():
        earned = [rewards[row] for row in rows]
        tolerance = _EQUAL * max(1.0, *map(abs, earned))
        differ = max(earned) - min(earned) > tolerance
        is_lost = differ and not any(teaches[row] for row in rows)
        metrics.add("groups_without_signal", is_lost, reduce="sum")


def measure_masked(found: RatioRange, mask: Tensor, metrics: Metrics) -> None:
    """Shares of action tokens that are left out since their ratio is too low, if one can be, or too high."""
    if found.low > 0:
        metrics.add_tensor("masked_low_fraction", (found.ratio < found.low).float(), mask)
    metrics.add_tensor("masked_high_fraction", (found.ratio > found.high).float(), mask)


def measure_mismatch(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    metrics: Metrics,
    behind: Tensor | None = None,
) -> None:
    """Distance of the engine's log-probs from the actor's, both (B, L), over ``mask``.

    ``rollout_kl`` estimates KL(rollout || actor) by k3, ``rollout_kl_k1`` by k1; ``rollout_kl/lag_<n>`` of tokens that
    are n versions ``behind`` (B, L), where any is.
    """
    mask = mask.bool()
    log_probs = log_probs.detach()
    rollout_log_probs = rollout_log_probs.detach()
    kl = compute_approx_kl(rollout_log_probs, log_probs, mask, kl_estimator="k3")
    metrics.add_tensor("rollout_kl", kl, mask)
    for lag in [] if behind is None else behind[mask].unique().tolist():
        metrics.add_tensor(f"rollout_kl/lag_{lag:.0f}", kl, mask & (behind == lag))
    metrics.add_tensor(
        "rollout_kl_k1",
        compute_approx_kl(rollout_log_probs, log_probs, mask, kl_estimator="k1"),
        mask,
    )
    metrics.add_tensor(
        "rollout_ratio_max", policy_ratio(log_probs, rollout_log_probs, mask), mask, reduce="max"
    )
    gap = (log_probs - rollout_log_probs).abs()
    metrics.add_tensor("rollout_log_prob_gap", gap, mask)
    metrics.add_tensor("rollout_log_prob_gap_max", gap, mask, reduce="max")
    difference = (log_probs.exp() - rollout_log_probs.exp()).abs()
    metrics.add_tensor("rollout_prob_gap", difference, mask)
    metrics.add_tensor("rollout_prob_gap_max", difference, mask, reduce="max")
    metrics.add_tensor("rollout_prob_gap_std", difference, mask, reduce="std")


def measure_experience(batch: Experience, metrics: Metrics) -> None:
    """Means over responses and over action tokens of everything that is known of ``batch``.

    Where log-probs were not recomputed, entropy is estimated by minus the mean log-prob of what was sampled.
    """
    mask = batch.action_mask
    if batch.ref_log_probs is not None:
        estimators: dict[str, KLEstimator] = {"kl": "k1", "kl_k3": "k3"}
        for name, estimator in estimators.items():
            kl = compute_approx_kl(
                batch.old_or_rollout_log_probs, batch.ref_log_probs, mask, kl_estimator=estimator
            )
            metrics.add_tensor(name, kl, mask)
            metrics.add_tensor(f"{name}_per_response", masked_sum(kl, mask, -1))
    if batch.entropy is not None:
        measure_mismatch(
            batch.old_or_rollout_log_probs,
            batch.rollout_log_probs,
            mask,
            metrics=metrics,
            behind=batch.staleness,
        )
    entropy = -batch.old_or_rollout_log_probs if batch.entropy is None else batch.entropy
    named = {
        "entropy": entropy,
        "values": batch.values,
        "returns": batch.returns,
        "advantages": batch.advantages,
    }
    for name, tensor in named.items():
        if tensor is not None:
            metrics.add_tensor(name, tensor, mask)
    if batch.values is not None and batch.returns is not None:
        metrics.add_tensor("returns_std", batch.returns, mask, reduce="std")
        metrics.add_tensor("value_error_std", batch.returns - batch.values, mask, reduce="std")
    if batch.advantages is not None:
        metrics.add_tensor("advantages_std", batch.advantages, mask, reduce="std")
    for name in ("advantages", "returns"):
        if (tensor := named[name]) is not None:
            metrics.add_tensor(f"{name}_max", tensor, mask, reduce="max")
            metrics.add_tensor(f"{name}_min", tensor, mask, reduce="min")
    metrics.add_tensor("response_length", mask.sum(-1).float())
    before = (
        mask.float().argmax(-1).float()
    )  # of the first action; an episode without any says nothing
    metrics.add_tensor("prompt_length", before, mask.any(-1))
    metrics.add_tensor("prompt_length_max", before, mask.any(-1), reduce="max")
    metrics.add_tensor("prompt_length_min", before, mask.any(-1), reduce="min")
    metrics.add_tensor("truncated_fraction", batch.truncated.float())


def experience_histograms(
    samples: Sequence[Experience], rewards: Sequence[float], comm: Comm
) -> dict[str, Histogram]:
    """Distributions over all ranks' samples: ``reward`` of episodes, ``response_length`` of responses; ``kl`` (k1),
    ``values``, ``returns`` and ``advantages`` of action tokens. Metrics that no sample has are left out. Collective.
    """
    found = dict.fromkeys(
        ("response_length", "kl", "values", "returns", "advantages"), torch.zeros(0)
    )
    if samples:
        batch = join_rows(samples)
        mask, tensors = batch.action_mask, batch.tensors()
        if batch.ref_log_probs is not None:
            tensors["kl"] = compute_approx_kl(
                batch.old_or_rollout_log_probs, batch.ref_log_probs, mask
            )
        found |= {name: tensor[mask] for name, tensor in tensors.items() if name in found}
        found["response_length"] = mask.sum(-1).float()
    found["reward"] = torch.tensor(rewards, dtype=torch.float32)
    of_ranks = {name: histogram(tensor.cpu(), comm) for name, tensor in found.items()}
    return {name: made for name, made in of_ranks.items() if made is not None}
