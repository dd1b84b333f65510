"""Metrics of scores and experience."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openppo.experience.replay_buffer import join_rows
from openppo.models.correction import RatioRange
from openppo.models.log_probs import KLEstimator, compute_approx_kl, masked_sum, policy_ratio
from openppo.tracking import Histogram, Metrics, histogram
from openppo.types import Comm, Experience, Sample, Segment, segments_of

_EQUAL = 1e-6


def measure_scores(
    samples: Sequence[Sample],
    weights: Mapping[str, float] | None,
    metrics: Metrics,
    prefix: str = "",
) -> None:
    """Measure the total ``reward`` of each sample, and each named score before weights as ``reward/<name>``.

    A score is left out where it equals the total. Numbers that reward functions return for logs are ``extra/<name>``.
    Where nothing gives rewards (``weights`` None) nothing is measured.
    """
    if weights is None:
        return
    for sample in samples:
        earned = sample.total_reward(weights)
        metrics.add(f"{prefix}reward", earned)
        metrics.add(f"{prefix}reward_std", earned, reduce="std")
        metrics.add(f"{prefix}reward_max", earned, reduce="max")
        metrics.add(f"{prefix}reward_min", earned, reduce="min")

        for name, score in sample.scores.items():
            if name != "reward" or name in weights:
                metrics.add(f"{prefix}reward/{name}", score)
        token_rewards = [
            segment.token_rewards
            for segment in sample.segments
            if segment.token_rewards is not None
        ]
        if token_rewards and sample.scores:
            metrics.add(f"{prefix}reward/of_tokens", sum(map(sum, token_rewards)))
        for name, extra in sample.extras.items():
            metrics.add(f"{prefix}extra/{name}", extra)


def measure_shaped(rewards: Tensor, weights: Mapping[str, float] | None, metrics: Metrics) -> None:
    """Measure whole ``rewards`` (B,) after penalties and clipping; ``weights`` are as in ``measure_scores``."""
    if weights is not None:
        metrics.add_tensor("shaped_reward", rewards)


def measure_sources(
    samples: Sequence[Sample],
    names: Mapping[str, str],
    weights: Mapping[str, float] | None,
    metrics: Metrics,
) -> None:
    """Measure scores, lengths and the truncated fraction of each data source, if there are several.

    ``weights`` are as in ``measure_scores``.
    """
    if len(names) < 2:
        return
    for source, name in names.items():
        prefix = f"source/{name}/"
        source_samples = [sample for sample in samples if sample.prompt.source == source]
        measure_scores(source_samples, weights, metrics, prefix=prefix)
        measure_lengths(source_samples, metrics, prefix=prefix)


def measure_lengths(samples: Sequence[Sample], metrics: Metrics, prefix: str) -> None:
    """Measure actions of each segment, and the fraction that ``--generate_max_len`` cut."""
    for sample in samples:
        for segment in sample.segments:
            metrics.add(f"{prefix}response_length", segment.n_actions)
            metrics.add(f"{prefix}truncated_fraction", sample.truncates(segment))


def measure_tasks(
    samples: Sequence[Sample],
    batch: Experience,
    weights: Mapping[str, float],
    n_done: int,
    metrics: Metrics,
) -> None:
    """Measure reward, length, KL and staleness of each task, if there are several.

    Rows of ``batch`` are the segments of ``samples``.
    """
    for name in sorted({sample.prompt.task for sample in samples} - {""}):
        prefix = f"task/{name}/"
        task_samples = [sample for sample in samples if sample.prompt.task == name]
        for sample in task_samples:
            metrics.add(f"{prefix}reward", sample.total_reward(weights))

        in_task = [sample.prompt.task == name for sample in samples for _ in sample.segments]
        rows = torch.tensor(in_task, device=batch.action_mask.device)
        mask = batch.action_mask[rows]
        metrics.add_tensor(f"{prefix}response_length", mask.sum(-1).float())
        metrics.add_tensor(f"{prefix}staleness", _staleness_of_actions(task_samples, n_done))
        if batch.ref_log_probs is not None:
            log_probs = batch.old_or_rollout_log_probs[rows]
            kl = compute_approx_kl(log_probs, batch.ref_log_probs[rows], mask)
            metrics.add_tensor(f"{prefix}kl", kl, mask)


def staleness(segment: Segment, n_done: int) -> Tensor:
    """Number of versions by which trained actions lag behind the policy after ``n_done`` steps, (L,) float32.

    0 for all other tokens.
    """
    tokens = zip(segment.versions, segment.loss_mask, strict=True)
    lags = [float(n_done - version) if is_trained else 0.0 for version, is_trained in tokens]
    return torch.tensor(lags)


def measure_staleness(samples: Sequence[Sample], n_done: int, metrics: Metrics) -> None:
    """Measure mean and maximum number of versions by which trained actions lag behind the policy."""
    lags = _staleness_of_actions(samples, n_done)
    metrics.add_tensor("staleness", lags)
    metrics.add_tensor("staleness_max", lags, reduce="max")


def _staleness_of_actions(samples: Sequence[Sample], n_done: int) -> Tensor:
    """Staleness of all trained actions, one after the other, (N,) float32."""
    lags = [
        staleness(segment, n_done)[torch.tensor(segment.loss_mask)]
        for segment in segments_of(samples)
    ]
    return torch.cat([torch.zeros(0), *lags])


def measure_signal(
    samples: Sequence[Sample],
    advantages: Tensor,
    action_mask: Tensor,
    weights: Mapping[str, float] | None,
    metrics: Metrics,
) -> None:
    """Count groups whose rewards differ, but whose advantages (B, L) are all 0.

    Nothing is learned from such groups. Rewards that differ only by rounding count as equal. No group is counted if
    each prompt has one response, or without rewards (``weights`` None).
    """
    if weights is None:
        return
    has_signal = ((advantages != 0) & action_mask).any(-1)  # (B,)
    has_signal_by_sample = has_signal.split([len(sample.segments) for sample in samples])
    rewards: dict[int, list[float]] = {}
    teaches: dict[int, bool] = {}
    for sample, rows in zip(samples, has_signal_by_sample, strict=True):
        rewards.setdefault(sample.group, []).append(sample.total_reward(weights))
        teaches[sample.group] = teaches.get(sample.group, False) or bool(rows.any())
    if all(len(earned) == 1 for earned in rewards.values()):
        return

    for group, earned in rewards.items():
        tolerance = _EQUAL * max(1.0, *map(abs, earned))
        differ = max(earned) - min(earned) > tolerance
        is_lost = differ and not teaches[group]
        metrics.add("groups_without_signal", is_lost, reduce="sum")


def measure_masked(ratios: RatioRange, mask: Tensor, metrics: Metrics) -> None:
    """Measure fractions of action tokens that are masked because their ratio is too low or too high."""
    if ratios.low > 0:
        is_low = ratios.ratio < ratios.low
        metrics.add_tensor("masked_low_fraction", is_low.float(), mask)
    is_high = ratios.ratio > ratios.high
    metrics.add_tensor("masked_high_fraction", is_high.float(), mask)


def measure_mismatch(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    metrics: Metrics,
    behind: Tensor | None = None,
) -> None:
    """Measure the distance of the engine's log-probs from the actor's, both (B, L), over ``mask``.

    ``rollout_kl`` estimates KL(rollout || actor) by k3, ``rollout_kl_k1`` by k1; ``rollout_kl/lag_<n>`` covers only the
    tokens that are n versions ``behind`` (B, L), if there are any.
    """
    mask = mask.bool()
    log_probs = log_probs.detach()
    rollout_log_probs = rollout_log_probs.detach()

    kl = compute_approx_kl(rollout_log_probs, log_probs, mask, kl_estimator="k3")
    metrics.add_tensor("rollout_kl", kl, mask)
    if behind is not None:
        for lag in behind[mask].unique().tolist():
            metrics.add_tensor(f"rollout_kl/lag_{lag:.0f}", kl, mask & (behind == lag))
    kl_k1 = compute_approx_kl(rollout_log_probs, log_probs, mask, kl_estimator="k1")
    metrics.add_tensor("rollout_kl_k1", kl_k1, mask)

    ratio = policy_ratio(log_probs, rollout_log_probs, mask)
    metrics.add_tensor("rollout_ratio_max", ratio, mask, reduce="max")
    log_prob_gap = (log_probs - rollout_log_probs).abs()
    metrics.add_tensor("rollout_log_prob_gap", log_prob_gap, mask)
    metrics.add_tensor("rollout_log_prob_gap_max", log_prob_gap, mask, reduce="max")
    prob_gap = (log_probs.exp() - rollout_log_probs.exp()).abs()
    metrics.add_tensor("rollout_prob_gap", prob_gap, mask)
    metrics.add_tensor("rollout_prob_gap_max", prob_gap, mask, reduce="max")
    metrics.add_tensor("rollout_prob_gap_std", prob_gap, mask, reduce="std")


def measure_experience(batch: Experience, metrics: Metrics) -> None:
    """Measure means over responses and over action tokens of all fields of ``batch``.

    Where log-probs were not recomputed, entropy is estimated by minus the mean log-prob of the sampled tokens.
    """
    mask = batch.action_mask
    log_probs = batch.old_or_rollout_log_probs
    if batch.ref_log_probs is not None:
        estimators: dict[str, KLEstimator] = {"kl": "k1", "kl_k3": "k3"}
        for name, estimator in estimators.items():
            kl = compute_approx_kl(log_probs, batch.ref_log_probs, mask, kl_estimator=estimator)
            metrics.add_tensor(name, kl, mask)
            metrics.add_tensor(f"{name}_per_response", masked_sum(kl, mask, -1))
    if batch.entropy is not None:
        measure_mismatch(
            log_probs, batch.rollout_log_probs, mask, metrics=metrics, behind=batch.staleness
        )

    entropy = -log_probs if batch.entropy is None else batch.entropy
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
        tensor = named[name]
        if tensor is not None:
            metrics.add_tensor(f"{name}_max", tensor, mask, reduce="max")
            metrics.add_tensor(f"{name}_min", tensor, mask, reduce="min")

    metrics.add_tensor("response_length", mask.sum(-1).float())
    # Tokens before the first action, of episodes with any action.
    prompt_length = mask.float().argmax(-1).float()
    has_actions = mask.any(-1)
    metrics.add_tensor("prompt_length", prompt_length, has_actions)
    metrics.add_tensor("prompt_length_max", prompt_length, has_actions, reduce="max")
    metrics.add_tensor("prompt_length_min", prompt_length, has_actions, reduce="min")
    metrics.add_tensor("truncated_fraction", batch.truncated.float())


def experience_histograms(
    rows: Sequence[Experience], rewards: Sequence[float], comm: Comm
) -> dict[str, Histogram]:
    """Distributions over the samples of all ranks, by metric. Collective.

    ``reward`` of episodes, ``response_length`` of responses; ``kl`` (k1), ``values``, ``returns`` and ``advantages`` of
    action tokens. Metrics that no sample has are left out.
    """
    names = ("response_length", "kl", "values", "returns", "advantages")
    values = dict.fromkeys(names, torch.zeros(0))
    if rows:
        batch = join_rows(rows)
        mask = batch.action_mask
        tensors = batch.tensors()
        if batch.ref_log_probs is not None:
            log_probs = batch.old_or_rollout_log_probs
            tensors["kl"] = compute_approx_kl(log_probs, batch.ref_log_probs, mask)
        for name in names:
            if name in tensors:
                values[name] = tensors[name][mask]
        values["response_length"] = mask.sum(-1).float()
    values["reward"] = torch.tensor(rewards, dtype=torch.float32)

    histograms = {}
    for name, tensor in values.items():
        distribution = histogram(tensor.cpu(), comm)
        if distribution is not None:
            histograms[name] = distribution
    return histograms
