"""The rules of health: what needs attention in the curves of a run, and what to do about it.

Each rule is a pure function of a run's history. docs/report.md lists them with their thresholds.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from statistics import fmean, median

from openppo.tracking.report.health import FEW, LEVEL, WINDOW, Check, Found, History, Rule, halves

RULES: list[Rule] = []


def rule(*metrics: str) -> Callable[[Check], Check]:
    """Register a function under its name as a rule about ``metrics``."""

    def register(check: Check) -> Check:
        RULES.append(Rule(check.__name__, metrics, check))
        return check

    return register


@rule("kl", "reward")
def kl_without_reward(history: History) -> Found | None:
    """KL half as large again within the window, and 0.01 nats per token more, while the reward does not rise."""
    window = history.last("kl", WINDOW)
    if not window or not history.flat_reward():
        return None
    earlier, later, _ = halves(window)
    if later < 1.5 * max(earlier, 0.0) or later - max(earlier, 0.0) < 0.01:
        return None
    remedy = "raise --init_kl_coef" if history.option("init_kl_coef", 1) else "give an --init_kl_coef"
    return (
        f"KL grows ({earlier:.3g} to {later:.3g} per token) while the reward is flat since step {{since}}: lower "
        f"--actor_learning_rate or {remedy}.",
        history.step("kl", WINDOW),
    )


@rule("kl")
def kl_above_target(history: History) -> Found | None:
    """KL twice --kl_target."""
    target = history.option("kl_target", math.inf)
    if (now := history.level("kl", LEVEL, lambda kl: kl > 2 * target)) is None:
        return None
    return (
        f"KL is {now.mean / target:.1f} times --kl_target {target:g} since step {{since}}: make --kl_horizon shorter "
        "so that the coefficient follows sooner, raise --init_kl_coef, or lower --actor_learning_rate.",
        now.since,
    )


@rule("kl_per_response", "kl")
def kl_far(history: History) -> Found | None:
    """KL above 30 nats per response and 0.5 nats per token."""
    now, kl = history.level("kl_per_response", FEW, lambda whole: whole > 30), history.mean("kl", FEW)
    if now is None or not kl > 0.5:
        return None
    return (
        f"The policy is far from the reference since step {{since}} (KL {now.mean:.0f} nats per response, {kl:.2g} per "
        "token): read the samples before you believe the reward, which may be exploited. Raise --init_kl_coef or lower "
        "--actor_learning_rate.",
        now.since,
    )


@rule("kl", "kl_k3")
def kl_negative(history: History) -> Found | None:
    """The estimate k1 0.01 nats per token below 0, where KL cannot be."""
    if (now := history.level("kl", LEVEL, lambda kl: kl < -0.01)) is None:
        return None
    return (
        f"KL (k1) is {now.mean:.3g} since step {{since}}, and a KL is never below 0: the responses are not sampled "
        "from the policy whose log-probs are compared. Leave out --top_p and --top_k, and look at "
        "rollout_log_prob_gap.",
        now.since,
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
    return (
        f"eval_reward has fallen from {evaluated[best]:.3g} at step {{since}} to {evaluated[-1]:.3g} while the reward "
        "has not: the policy learns its prompts, or exploits the reward. Raise --init_kl_coef, use more prompts or "
        "fewer --num_episodes; --keep_best eval_reward keeps the best model.",
        since,
    )


@rule("entropy", "reward")
def entropy_collapse(history: History) -> Found | None:
    """Entropy below a fifth of its start while the reward does not rise."""
    start = history.start("entropy")
    now = history.level("entropy", FEW, lambda entropy: entropy < 0.2 * start)
    if now is None or not history.flat_reward():
        return None
    return (
        f"Entropy has fallen to {now.mean / start:.0%} of its start by step {{since}} and the reward is flat: the "
        "policy hardly explores any more. If the reward is not yet where you want it, raise --eps_clip_high (0.28), "
        "--entropy_coef or --init_kl_coef, or lower --actor_learning_rate.",
        now.since,
    )


@rule("entropy")
def entropy_grows(history: History) -> Found | None:
    """Entropy twice its start, and half a nat more."""
    start = history.start("entropy")
    bound = max(2 * start, start + 0.5)
    if (now := history.level("entropy", FEW, lambda entropy: entropy > bound)) is None:
        return None
    coef = "lower --entropy_coef" if history.option("entropy_coef", 0) else "raise --init_kl_coef"
    return (
        f"Entropy is {now.mean:.2g} nats since step {{since}}, {start:.2g} at the start: the policy drifts towards "
        f"noise. Lower --actor_learning_rate or {coef}.",
        now.since,
    )


@rule("clip_fraction")
def many_clipped(history: History) -> Found | None:
    """With the loss of PPO 30 % of the tokens outside the clip range."""
    now = history.level("clip_fraction", LEVEL, lambda share: share > 0.3)
    if now is None or history.option("policy_loss_type", "ppo") != "ppo":
        return None
    return (
        f"{now.mean:.0%} of the tokens leave the clip range since step {{since}}: the updates are too large. Lower "
        "--actor_learning_rate or --max_epochs, or raise --train_batch_size.",
        now.since,
    )


@rule("kl_k3", "reward")
def policy_stands_still(history: History) -> Found | None:
    """KL (k3) below 0.00001 nats per token after 20 reports, and a reward that does not rise."""
    kl = history.mean("kl_k3", WINDOW)
    frozen = max(history.option("freezing_actor_steps", -1), history.option("value_pretrain_steps", 0))
    if not kl < 1e-5 or not history.flat_reward() or (since := history.step("kl_k3", WINDOW)) <= frozen:
        return None
    rate = history.option("actor_learning_rate")
    return (
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
    clips = history.option("value_clip") is not None
    return (
        f"The critic foresees the returns worse than their mean does since step {{since}} (explained variance "
        f"{explained:.2g}): raise --critic_learning_rate, or let it learn first with --value_pretrain_steps"
        f"{', or try --value_clip None' if clips else ''}.",
        history.step("explained_variance", WINDOW),
    )


@rule("reward_std", "reward")
def one_reward(history: History) -> Found | None:
    """All responses of each of the last 5 steps earned the same."""
    spread = history.last("reward_std", FEW)
    if not spread or max(spread) > 1e-6:
        return None
    return (
        "All responses of a step earn the same since step {since}, so there is nothing to learn from: check the "
        "reward on the samples, use prompts that are harder or easier for this model, or raise --temperature.",
        history.step("reward_std", FEW),
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
        return None  # a clipped score cannot lie there, so all rewards are of single tokens
    if not (reward < clip[0] or reward > clip[1]):
        return None
    return (
        f"The mean reward {reward:.3g} lies outside --reward_clip_range {clip[0]:g} {clip[1]:g} since step {{since}}, "
        "so that most responses look equally good to the training: widen the range, or use --normalize_reward.",
        history.step("reward", FEW),
    )


@rule("reward_errors")
def reward_fails(history: History) -> Found | None:
    """The reward function raised on some sample of the last 5 steps."""
    if (now := history.level("reward_errors", FEW, lambda errors: errors > 0)) is None:
        return None
    return (
        f"The reward function raised on {now.mean * FEW:.0f} samples since step {{since}}, which got "
        "--reward_error_value instead: the log shows the first errors.",
        now.since,
    )


@rule("truncated_fraction")
def many_truncated(history: History) -> Found | None:
    """Half of the responses cut at --generate_max_len."""
    if (now := history.level("truncated_fraction", FEW, lambda share: share > 0.5)) is None:
        return None
    most = history.option("generate_max_len")
    what = "scored unfinished: raise it, or leave such responses out with --overlong_filter"
    if history.option("overlong_filter", False):
        what = "left out by --overlong_filter, so that nothing is learned from them: raise it, or ask for less"
    return (
        f"{now.mean:.0%} of the responses are cut at --generate_max_len{'' if most is None else f' {most}'} since step "
        f"{{since}} and {what}.",
        now.since,
    )


@rule("response_length", "reward")
def lengths_run_away(history: History) -> Found | None:
    """Responses twice as long as at the start while the reward does not rise."""
    start = history.start("response_length")
    now = history.level("response_length", FEW, lambda length: length > 2 * start)
    if now is None or not history.flat_reward():
        return None
    return (
        f"Responses have grown from {start:.0f} to {now.mean:.0f} tokens by step {{since}} without more reward: "
        "penalize length with --overlong_buffer_len, and look whether the reward likes length for its own sake.",
        now.since,
    )


@rule("response_length")
def lengths_collapse(history: History) -> Found | None:
    """Responses a quarter as long as at the start."""
    start = history.start("response_length")
    if (now := history.level("response_length", FEW, lambda length: length < 0.25 * start)) is None:
        return None
    remedy = "lower --actor_learning_rate"
    if history.option("init_kl_coef", 1) and not history.option("use_kl_loss", False):
        remedy = "lower --init_kl_coef, as the KL penalty is paid per token and short answers pay less"
    return (
        f"Responses have shrunk from {start:.0f} to {now.mean:.0f} tokens by step {{since}}: read the samples, and "
        f"check that the reward does not prefer an empty answer; else {remedy}.",
        now.since,
    )


@rule("actor_grad_norm")
def gradient_spike(history: History) -> Found | None:
    """The actor's gradient ten times the median of the reports before."""
    norms = history.last("actor_grad_norm", LEVEL + 1)
    if not norms or norms[-1] <= 10 * median(norms[:-1]):
        return None
    return (
        f"The actor's gradient was {norms[-1] / max(median(norms[:-1]), 1e-12):.0f} times its usual size at step "
        "{since}: --max_norm bounds what it does. If it happens again, read the samples of these steps and lower "
        "--actor_learning_rate.",
        history.step("actor_grad_norm", 1),
    )


@rule("skipped_steps")
def steps_skipped(history: History) -> Found | None:
    """Optimizer steps left out among the last 10 reports."""
    counts = history.last("skipped_steps", min(LEVEL, len(history.values("skipped_steps"))))
    if not counts or counts[-1] <= (counts[0] if len(counts) == LEVEL else 0):
        return None
    return (
        f"{counts[-1]:.0f} optimizer steps so far were skipped because a loss or gradient was not finite (the run ends "
        "after --max_skipped_steps in a row): lower the learning rate; their batches are in the folder 'skipped' "
        "beside the logs.",
        history.step("skipped_steps", len(counts)),
    )


@rule("rollout_kl", "rollout_log_prob_gap")
def engine_differs(history: History) -> Found | None:
    """KL 0.01 nats per token between the engine that samples and the actor of the same weights."""
    if (now := history.level("rollout_kl", FEW, lambda kl: kl > 0.01)) is None:
        return None
    causes = ["--top_p"] if history.option("top_p", 1) < 1 else []
    causes += ["--top_k"] if history.option("top_k") is not None else []
    causes += ["--min_new_tokens"] if history.option("min_new_tokens", 0) else []
    causes += ["--lora_dropout"] if history.option("lora_rank", 0) and history.option("lora_dropout", 0) else []
    precision = "check the precision of the engine (--bf16, --rollout_engine)"
    remedy = f"leave out {' and '.join(causes)}" if causes else precision
    if history.option("rollout_correction", "none") == "none":
        remedy += ", or weight the tokens with --rollout_correction tis"
    return (
        f"The log-probs at sampling differ from the actor's since step {{since}} (KL {now.mean:.2g} per token): "
        f"{remedy}.",
        now.since,
    )


@rule("sampled_batches", "useful_groups")
def sampling_bound(history: History) -> Found | None:
    """Dynamic sampling stopped by its bound, with too few useful groups, in each of the last 5 steps."""
    bound, wanted = history.option("dynamic_sampling_max_batches"), history.option("rollout_batch_size")
    batches, groups = history.last("sampled_batches", FEW), history.last("useful_groups", FEW)
    if bound is None or wanted is None or not batches or not groups or min(batches) < bound or max(groups) >= wanted:
        return None
    return (
        f"Dynamic sampling stops at --dynamic_sampling_max_batches {bound} in each step since {{since}}, with "
        f"{groups[-1]:.0f} of {wanted} useful groups: most prompts give responses of one reward. Use harder or easier "
        "prompts, or more --n_samples_per_prompt.",
        history.step("sampled_batches", FEW),
    )


@rule("eval_loss", "loss")
def overfitting(history: History) -> Found | None:
    """Supervised: the last two evaluations 2 % above the lowest eval_loss."""
    evaluated = history.values("eval_loss")
    if len(evaluated) < 3 or min(evaluated[-2:]) <= 1.02 * min(evaluated):
        return None
    best = min(range(len(evaluated)), key=evaluated.__getitem__)
    return (
        f"eval_loss rises since step {{since}} ({evaluated[best]:.3g} to {evaluated[-1]:.3g}): the model learns its "
        "data by heart. Use fewer --max_epochs; --keep_best eval_loss keeps the best model.",
        history.series["eval_loss"][0][best],
    )
