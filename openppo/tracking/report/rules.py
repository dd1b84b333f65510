"""The rules of health: what in the curves of a run asks for attention, and what to do about it.

Each rule is a pure function of a run's history. docs/report.md lists them with their thresholds. A curve "rises"
between two halves of a window when their means differ by more than two standard errors.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from openppo.tracking.report.history import FEW, LEVEL, WINDOW, History, halves, rises


@dataclass(frozen=True)
class Found:
    """What a rule says now, with ``{since}`` in place of the step from which on it shows."""

    text: str
    since: int


@dataclass(frozen=True)
class Rule:
    """``check`` is asked at each report that has the first of ``metrics``."""

    name: str
    metrics: tuple[str, ...]
    check: Callable[[History], Found | None]


RULES: list[Rule] = []


def rule(*metrics: str) -> Callable[[Callable[[History], Found | None]], Callable[[History], Found | None]]:
    """Register a function under its name as a rule about ``metrics``."""

    def register(check: Callable[[History], Found | None]) -> Callable[[History], Found | None]:
        RULES.append(Rule(check.__name__, metrics, check))
        return check

    return register


def flat_reward(history: History) -> bool:
    """Whether there is a window of rewards that does not rise."""
    rewards = history.last("reward", WINDOW)
    return bool(rewards) and not rises(rewards)


@rule("kl", "reward")
def kl_without_reward(history: History) -> Found | None:
    """KL half as large again within the window, and 0.01 nats per token more, while the reward does not rise."""
    window = history.last("kl", WINDOW)
    if not window or not flat_reward(history):
        return None
    earlier, later, _ = halves(window)
    if later < 1.5 * max(earlier, 0.0) or later - max(earlier, 0.0) < 0.01:
        return None
    since = history.step("kl", WINDOW)
    remedy = "raise --init_kl_coef" if history.option("init_kl_coef", 1) else "give an --init_kl_coef"
    return Found(
        f"KL grows ({earlier:.3g} to {later:.3g} per token) while the reward is flat since step {{since}}: lower "
        f"--actor_learning_rate or {remedy}.",
        since,
    )


@rule("kl")
def kl_above_target(history: History) -> Found | None:
    """KL twice --kl_target."""
    target, kl = history.option("kl_target"), history.mean("kl", LEVEL)
    if target is None or not kl > 2 * target:
        return None
    since = history.first("kl", LEVEL, lambda value: value > 2 * target)
    return Found(
        f"KL is {kl / target:.1f} times --kl_target {target:g} since step {{since}}: make --kl_horizon shorter so "
        "that the coefficient follows sooner, raise --init_kl_coef, or lower --actor_learning_rate.",
        since,
    )


@rule("kl_per_response", "kl")
def kl_far(history: History) -> Found | None:
    """KL above 30 nats per response and 0.5 nats per token."""
    whole, kl = history.mean("kl_per_response", FEW), history.mean("kl", FEW)
    if not (whole > 30 and kl > 0.5):
        return None
    since = history.first("kl_per_response", FEW, lambda value: value > 30)
    return Found(
        f"The policy is far from the reference since step {{since}} (KL {whole:.0f} nats per response, {kl:.2g} per "
        "token): read the samples before you believe the reward, which may be exploited. Raise --init_kl_coef or lower "
        "--actor_learning_rate.",
        since,
    )


@rule("kl", "kl_k3")
def kl_negative(history: History) -> Found | None:
    """The estimate k1 0.01 nats per token below 0, where KL cannot be."""
    kl = history.mean("kl", LEVEL)
    if not kl < -0.01:
        return None
    since = history.first("kl", LEVEL, lambda value: value < -0.01)
    return Found(
        f"KL (k1) is {kl:.3g} since step {{since}}, and a KL is never below 0: the responses are not sampled from the "
        "policy whose log-probs are compared. Leave out --top_p and --top_k, and look at rollout_log_prob_gap.",
        since,
    )


@rule("eval_reward", "reward")
def evaluation_falls(history: History) -> Found | None:
    """The last two evaluations lost a quarter of what the best one had gained, while the reward did not fall."""
    evaluated, rewards = history.values("eval_reward"), history.values("reward")
    if len(evaluated) < 4 or len(rewards) < 2 * FEW:
        return None
    best = max(range(len(evaluated)), key=evaluated.__getitem__)
    gain, lost = evaluated[best] - evaluated[0], evaluated[best] - max(evaluated[-2:])
    since = history.series["eval_reward"][0][best]
    n_before = bisect_right(history.series["reward"][0], since)
    around = rewards[max(0, n_before - FEW) : n_before]
    if gain <= 0 or lost <= 0.25 * gain or not around or fmean(rewards[-FEW:]) < fmean(around):
        return None
    return Found(
        f"eval_reward has fallen from {evaluated[best]:.3g} at step {{since}} to {evaluated[-1]:.3g} while the reward "
        "has not: the policy learns its prompts, or exploits the reward. Raise --init_kl_coef, use more prompts or "
        "fewer --num_episodes; --keep_best eval_reward keeps the best model.",
        since,
    )


@rule("entropy", "reward")
def entropy_collapse(history: History) -> Found | None:
    """Entropy below a fifth of its start while the reward does not rise."""
    start, now = history.start("entropy"), history.mean("entropy", FEW)
    if not now < 0.2 * start or not flat_reward(history):
        return None
    since = history.first("entropy", FEW, lambda value: value < 0.2 * start)
    return Found(
        f"Entropy has fallen to {now / start:.0%} of its start by step {{since}} and the reward is flat: the policy "
        "hardly explores any more. If the reward is not yet where you want it, raise --eps_clip_high (0.28), "
        "--entropy_coef or --init_kl_coef, or lower --actor_learning_rate.",
        since,
    )


@rule("entropy")
def entropy_grows(history: History) -> Found | None:
    """Entropy twice its start, and half a nat more."""
    start, now = history.start("entropy"), history.mean("entropy", FEW)
    bound = max(2 * start, start + 0.5)
    if not now > bound:
        return None
    since = history.first("entropy", FEW, lambda value: value > bound)
    coef = "lower --entropy_coef" if history.option("entropy_coef", 0) else "raise --init_kl_coef"
    return Found(
        f"Entropy is {now:.2g} nats since step {{since}}, {start:.2g} at the start: the policy drifts towards noise. "
        f"Lower --actor_learning_rate or {coef}.",
        since,
    )


@rule("clip_fraction")
def many_clipped(history: History) -> Found | None:
    """With the loss of PPO 30 % of the tokens outside the clip range."""
    share = history.mean("clip_fraction", LEVEL)
    if history.option("policy_loss_type", "ppo") != "ppo" or not share > 0.3:
        return None
    since = history.first("clip_fraction", LEVEL, lambda value: value > 0.3)
    return Found(
        f"{share:.0%} of the tokens leave the clip range since step {{since}}: the updates are too large. Lower "
        "--actor_learning_rate or --max_epochs, or raise --train_batch_size.",
        since,
    )


@rule("kl_k3", "reward")
def policy_stands_still(history: History) -> Found | None:
    """KL (k3) below 0.00001 nats per token after 20 reports, and a reward that does not rise."""
    kl = history.mean("kl_k3", WINDOW)
    frozen = max(history.option("freezing_actor_steps", -1), history.option("value_pretrain_steps", 0))
    if not kl < 1e-5 or not flat_reward(history) or history.step("kl_k3", WINDOW) <= frozen:
        return None
    since = history.step("kl_k3", WINDOW)
    rate = history.option("actor_learning_rate")
    return Found(
        f"The policy has hardly moved since step {{since}} (KL {kl:.1g} per token): raise --actor_learning_rate"
        f"{'' if rate is None else f' (now {rate:g})'}; small models and LoRA need more than large models.",
        since,
    )


@rule("explained_variance")
def critic_misleads(history: History) -> Found | None:
    """Median of explained variance below 0: returns are further from the critic's values than from their mean."""
    window = history.last("explained_variance", WINDOW)
    if not window or (explained := median(window)) >= 0:
        return None
    since = history.step("explained_variance", WINDOW)
    clips = history.option("value_clip") is not None
    return Found(
        f"The critic foresees the returns worse than their mean does since step {{since}} (explained variance "
        f"{explained:.2g}): raise --critic_learning_rate, or let it learn first with --value_pretrain_steps"
        f"{', or try --value_clip None' if clips else ''}.",
        since,
    )


@rule("reward_std", "reward")
def one_reward(history: History) -> Found | None:
    """All responses of each of the last 5 steps earned the same."""
    spread = history.last("reward_std", FEW)
    if not spread or max(spread) > 1e-6:
        return None
    since = history.step("reward_std", FEW)
    return Found(
        "All responses of a step earn the same since step {since}, so there is nothing to learn from: check the "
        "reward on the samples, use prompts that are harder or easier for this model, or raise --temperature.",
        since,
    )


@rule("reward", "reward/of_tokens", "shaped_reward")
def reward_outside_clip(history: History) -> Found | None:
    """The mean reward, without that of single tokens, outside --reward_clip_range, without --normalize_reward."""
    clip, reward = history.option("reward_clip_range"), history.mean("reward", FEW)
    if not clip or history.option("normalize_reward", False) or math.isnan(reward):
        return None
    if history.values("reward/of_tokens"):
        reward -= history.mean("reward/of_tokens", FEW)
    elif not clip[0] <= (history.last("shaped_reward", 1) or clip)[0] <= clip[1]:
        return None  # what is clipped cannot lie there, so all rewards are of single tokens
    if not (reward < clip[0] or reward > clip[1]):
        return None
    since = history.step("reward", FEW)
    return Found(
        f"The mean reward {reward:.3g} lies outside --reward_clip_range {clip[0]:g} {clip[1]:g} since step {{since}}, "
        "so that most responses look equally good to the training: widen the range, or use --normalize_reward.",
        since,
    )


@rule("reward_errors")
def reward_fails(history: History) -> Found | None:
    """The reward function raised on some sample of the last 5 steps."""
    errors = history.last("reward_errors", FEW)
    if not errors or not sum(errors):
        return None
    since = history.first("reward_errors", FEW, lambda value: value > 0)
    return Found(
        f"The reward function raised on {sum(errors):.0f} samples since step {{since}}, which got --reward_error_value "
        "instead: the log shows the first errors.",
        since,
    )


@rule("truncated_fraction")
def many_truncated(history: History) -> Found | None:
    """Half of the responses cut at --generate_max_len."""
    share = history.mean("truncated_fraction", FEW)
    if not share > 0.5:
        return None
    since = history.first("truncated_fraction", FEW, lambda value: value > 0.5)
    most = history.option("generate_max_len")
    what = "scored unfinished: raise it, or leave such responses out with --overlong_filter"
    if history.option("overlong_filter", False):
        what = "left out by --overlong_filter, so that nothing is learned from them: raise it, or ask for less"
    return Found(
        f"{share:.0%} of the responses are cut at --generate_max_len{'' if most is None else f' {most}'} since step "
        f"{{since}} and {what}.",
        since,
    )


@rule("response_length", "reward")
def lengths_run_away(history: History) -> Found | None:
    """Responses twice as long as at the start while the reward does not rise."""
    start, now = history.start("response_length"), history.mean("response_length", FEW)
    if not now > 2 * start or not flat_reward(history):
        return None
    since = history.first("response_length", FEW, lambda value: value > 2 * start)
    return Found(
        f"Responses have grown from {start:.0f} to {now:.0f} tokens by step {{since}} without more reward: penalize "
        "length with --overlong_buffer_len, and look whether the reward likes length for its own sake.",
        since,
    )


@rule("response_length")
def lengths_collapse(history: History) -> Found | None:
    """Responses a quarter as long as at the start."""
    start, now = history.start("response_length"), history.mean("response_length", FEW)
    if not now < 0.25 * start:
        return None
    since = history.first("response_length", FEW, lambda value: value < 0.25 * start)
    remedy = "lower --actor_learning_rate"
    if history.option("init_kl_coef", 1) and not history.option("use_kl_loss", False):
        remedy = "lower --init_kl_coef, as the KL penalty is paid per token and short answers pay less"
    return Found(
        f"Responses have shrunk from {start:.0f} to {now:.0f} tokens by step {{since}}: read the samples, and check "
        f"that the reward does not prefer an empty answer; else {remedy}.",
        since,
    )


@rule("actor_grad_norm")
def gradient_spike(history: History) -> Found | None:
    """The actor's gradient ten times the median of the reports before."""
    norms = history.last("actor_grad_norm", LEVEL + 1)
    if not norms or norms[-1] <= 10 * median(norms[:-1]):
        return None
    since = history.step("actor_grad_norm", 1)
    return Found(
        f"The actor's gradient was {norms[-1] / max(median(norms[:-1]), 1e-12):.0f} times its usual size at step "
        "{since}: --max_norm bounds what it does. If it happens again, read the samples of these steps and lower "
        "--actor_learning_rate.",
        since,
    )


@rule("skipped_steps")
def steps_skipped(history: History) -> Found | None:
    """Optimizer steps left out among the last 10 reports."""
    counts = history.last("skipped_steps", min(LEVEL, len(history.values("skipped_steps"))))
    if not counts or counts[-1] <= (counts[0] if len(counts) == LEVEL else 0):
        return None
    since = history.step("skipped_steps", len(counts))
    return Found(
        f"{counts[-1]:.0f} optimizer steps so far were skipped because a loss or gradient was not finite (the run ends "
        "after --max_skipped_steps in a row): lower the learning rate; their batches are in the folder 'skipped' "
        "beside the logs.",
        since,
    )


@rule("rollout_kl", "rollout_log_prob_gap")
def engine_differs(history: History) -> Found | None:
    """KL 0.01 nats per token between the engine that samples and the actor of the same weights."""
    kl = history.mean("rollout_kl", FEW)
    if not kl > 0.01:
        return None
    since = history.first("rollout_kl", FEW, lambda value: value > 0.01)
    causes = []
    if history.option("top_p", 1) < 1:
        causes.append("--top_p")
    if history.option("top_k") is not None:
        causes.append("--top_k")
    if history.option("lora_rank", 0) and history.option("lora_dropout", 0):
        causes.append("--lora_dropout")
    remedy = (
        f"leave out {' and '.join(causes)}"
        if causes
        else "check the precision of the engine (--bf16, --rollout_engine)"
    )
    if history.option("rollout_correction", "none") == "none":
        remedy += ", or weight the tokens with --rollout_correction tis"
    return Found(
        f"The log-probs at sampling differ from the actor's since step {{since}} (KL {kl:.2g} per token): {remedy}.",
        since,
    )


@rule("sampled_batches", "useful_groups")
def sampling_bound(history: History) -> Found | None:
    """Dynamic sampling stopped by its bound, with too few useful groups, in each of the last 5 steps."""
    bound, wanted = history.option("dynamic_sampling_max_batches"), history.option("rollout_batch_size")
    batches, groups = history.last("sampled_batches", FEW), history.last("useful_groups", FEW)
    if bound is None or wanted is None or not batches or not groups or min(batches) < bound or max(groups) >= wanted:
        return None
    since = history.step("sampled_batches", FEW)
    return Found(
        f"Dynamic sampling stops at --dynamic_sampling_max_batches {bound} in each step since {{since}}, with "
        f"{groups[-1]:.0f} of {wanted} useful groups: most prompts give responses of one reward. Use harder or easier "
        "prompts, or more --n_samples_per_prompt.",
        since,
    )


@rule("eval_loss", "loss")
def overfitting(history: History) -> Found | None:
    """Supervised: the last two evaluations 2 % above the lowest eval_loss."""
    evaluated = history.values("eval_loss")
    if len(evaluated) < 3 or min(evaluated[-2:]) <= 1.02 * min(evaluated):
        return None
    best = min(range(len(evaluated)), key=evaluated.__getitem__)
    since = history.series["eval_loss"][0][best]
    return Found(
        f"eval_loss rises since step {{since}} ({evaluated[best]:.3g} to {evaluated[-1]:.3g}): the model learns its "
        "data by heart. Use fewer --max_epochs; --keep_best eval_loss keeps the best model.",
        since,
    )
