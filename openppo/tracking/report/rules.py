"""The rules of health: what needs attention in the curves of a run, and what to do about it.

Each rule is a pure function of a run's history that gives the text of a warning, or None. docs/report.md lists them
with their thresholds.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from statistics import fmean, median

from openppo.tracking.report.health import FEW, LEVEL, WINDOW, History, Rule, halves

RULES: list[Rule] = []


def rule(
    *metrics: str,
    last: int = FEW,
    passes: Callable[[float, History], bool] = lambda mean, history: True,
) -> Callable[[Callable[[History, float], str | None]], None]:
    """Register a function under its name; its docstring is the row of docs/report.md."""

    def register(warn: Callable[[History, float], str | None]) -> None:
        about = str(warn.__doc__)
        RULES.append(Rule(warn.__name__, metrics, about, last=last, passes=passes, warn=warn))

    return register


@rule("kl", "reward", last=WINDOW)
def kl_without_reward(history: History, _: float) -> str | None:
    """KL half as large again within the window, and 0.01 nats per token more, while the reward does not rise."""
    window = history.last("kl", WINDOW)
    if not window or not history.flat_reward():
        return None

    earlier, later, _ = halves(window)
    floor = max(earlier, 0.0)
    if later < 1.5 * floor or later - floor < 0.01:
        return None

    has_penalty = history.option("init_kl_coef", 1)
    remedy = "raise --init_kl_coef" if has_penalty else "give an --init_kl_coef"
    return (
        f"KL grows ({earlier:.3g} to {later:.3g} per token) while the reward is flat since step {{since}}: lower "
        f"--actor_learning_rate or {remedy}."
    )


@rule("kl", last=LEVEL, passes=lambda kl, h: kl > 2 * h.option("kl_target", math.inf))
def kl_above_target(history: History, kl: float) -> str:
    """KL twice --kl_target."""
    target = history.option("kl_target")
    return (
        f"KL is {kl / target:.1f} times --kl_target {target:g} since step {{since}}: make kl_horizon shorter so that "
        "the coefficient follows sooner, raise --init_kl_coef, or lower --actor_learning_rate."
    )


@rule("kl_per_response", "kl", passes=lambda kl, h: kl > 30 and h.mean("kl", FEW) > 0.5)
def kl_far(history: History, kl_per_response: float) -> str:
    """KL above 30 nats per response and 0.5 nats per token, in a run with rewards."""
    return (
        f"The policy is far from the reference since step {{since}} (KL {kl_per_response:.0f} nats per response, "
        f"{history.mean('kl', FEW):.2g} per token): read the samples, as the reward may be exploited. Raise "
        "--init_kl_coef or lower --actor_learning_rate."
    )


@rule("kl", "kl_k3", last=LEVEL, passes=lambda kl, _: kl < -0.01)
def kl_negative(history: History, kl: float) -> str:
    """The estimate k1 0.01 nats per token below 0, where KL cannot be."""
    return (
        f"KL (k1) is {kl:.3g} since step {{since}}, and a KL is never below 0: the responses are not sampled from the "
        "policy whose log-probs are compared. Leave out --top_p and --top_k, and look at rollout_log_prob_gap."
    )


@rule("eval_reward", "reward", last=2)
def evaluation_falls(history: History, _: float) -> str | None:
    """The last two evaluations lost a quarter of what the best one had gained, while the reward did not fall."""
    evaluated, rewards = history.values("eval_reward"), history.values("reward")
    if len(evaluated) < 4 or len(rewards) < 2 * FEW:
        return None

    best = max(evaluated)
    gain = best - evaluated[0]
    loss = best - max(evaluated[-2:])
    if gain <= 0 or loss <= 0.25 * gain:
        return None

    step_of_best = history.steps("eval_reward")[evaluated.index(best)]
    n_before = bisect_right(history.steps("reward"), step_of_best)
    rewards_at_best = rewards[max(0, n_before - FEW) : n_before]
    if not rewards_at_best or fmean(rewards[-FEW:]) < fmean(rewards_at_best):
        return None

    return (
        f"eval_reward has fallen from {best:.3g} at step {step_of_best} to {evaluated[-1]:.3g} while the reward has "
        "not: the policy learns its prompts, or exploits the reward. Raise --init_kl_coef, use more prompts or fewer "
        "--num_episodes; --keep_best eval_reward keeps the best model."
    )


@rule(
    "entropy",
    "reward",
    passes=lambda entropy, h: entropy < 0.2 * h.start("entropy") and h.flat_reward(),
)
def entropy_collapse(history: History, entropy: float) -> str:
    """Entropy below a fifth of its start while the reward does not rise."""
    return (
        f"Entropy has fallen to {entropy / history.start('entropy'):.0%} of its start by step {{since}} and the reward "
        "is flat: the policy hardly explores. Raise --eps_clip_high (0.28), --entropy_coef or --init_kl_coef, or lower "
        "--actor_learning_rate."
    )


@rule(
    "entropy", passes=lambda entropy, h: entropy > h.start("entropy") + max(h.start("entropy"), 0.5)
)
def entropy_grows(history: History, entropy: float) -> str:
    """Entropy twice its start, and half a nat more, in a run with rewards."""
    start = history.start("entropy")
    coef = "lower --entropy_coef" if history.option("entropy_coef", 0) else "raise --init_kl_coef"
    return (
        f"Entropy is {entropy:.2g} nats since step {{since}}, {start:.2g} at the start: the policy drifts towards "
        f"noise. Lower --actor_learning_rate or {coef}."
    )


@rule(
    "clip_fraction",
    last=LEVEL,
    passes=lambda n, h: n > 0.3 and h.option("policy_loss_type", "ppo") == "ppo",
)
def many_clipped(history: History, share: float) -> str:
    """With the loss of PPO 30 % of the tokens outside the clip range."""
    return (
        f"{share:.0%} of the tokens leave the clip range since step {{since}}: the updates are too large. Lower "
        "--actor_learning_rate or --max_epochs, or raise --train_batch_size."
    )


@rule("kl_k3", "reward", last=WINDOW, passes=lambda kl, h: kl < 1e-5 and h.flat_reward())
def policy_stands_still(history: History, kl: float) -> str | None:
    """KL (k3) below 0.00001 nats per token after 20 reports, and a reward that does not rise."""
    freezing_steps = history.option("freezing_actor_steps", -1)
    pretrain_steps = history.option("value_pretrain_steps", 0)
    steps = history.steps("kl_k3")
    if steps[-WINDOW] <= max(freezing_steps, pretrain_steps):
        return None

    rate = history.option("actor_learning_rate")
    present = "" if rate is None else f" (now {rate:g})"
    return (
        f"The policy has hardly moved since step {{since}} (KL {kl:.1g} per token): raise --actor_learning_rate"
        f"{present}; small models and LoRA need more than large models."
    )


@rule("explained_variance", last=WINDOW)
def critic_misleads(history: History, _: float) -> str | None:
    """Median of explained variance below 0: returns are further from the critic's values than from their mean."""
    window = history.last("explained_variance", WINDOW)
    explained = median(window) if window else 0.0
    if explained >= 0:
        return None

    has_clip = history.option("value_clip") is not None
    alternative = ", or try --value_clip None" if has_clip else ""
    return (
        f"The critic foresees the returns worse than their mean does since step {{since}} (explained variance "
        f"{explained:.2g}): raise --critic_learning_rate, or let it learn first with --value_pretrain_steps"
        f"{alternative}."
    )


@rule("reward_std", "reward", passes=lambda spread, _: spread <= 1e-6)
def one_reward(history: History, spread: float) -> str:
    """All responses of each of the last 5 steps earned the same."""
    return (
        "All responses of a step earn the same since step {since}, so there is nothing to learn from: check the "
        "reward on the samples, use prompts that are harder or easier for this model, or raise --temperature."
    )


@rule("groups_without_signal", passes=lambda count, _: count >= 1)
def lost_groups(history: History, count: float) -> str:
    """In the last 5 steps on average one group or more whose rewards differ and whose advantages are all 0."""
    clip = history.option("reward_clip_range")
    bounds = f" {clip[0]:g} {clip[1]:g}" if clip else ""
    return (
        f"{count:.2g} groups per step have different rewards and no advantage since step {{since}}, so nothing is "
        f"learned from them: compare reward with shaped_reward; --reward_clip_range{bounds} may make scores equal."
    )


@rule("reward", "reward/of_tokens", "shaped_reward")
def reward_outside_clip(history: History, reward: float) -> str | None:
    """The mean reward, without that of single tokens, outside --reward_clip_range, without --normalize_reward."""
    clip = history.option("reward_clip_range")
    normalizes = history.option("normalize_reward") not in (None, False, "off")
    if not clip or normalizes or math.isnan(reward):
        return None

    low, high = clip
    if history.values("reward/of_tokens"):
        reward -= history.mean("reward/of_tokens", FEW)
    else:
        shaped = history.last("shaped_reward", 1)
        if shaped and not low <= shaped[0] <= high:
            return None  # a clipped score cannot lie there, so all rewards are of single tokens
    if not (reward < low or reward > high):
        return None  # also where there is no number

    return (
        f"The mean reward {reward:.3g} lies outside --reward_clip_range {low:g} {high:g} since step {{since}}, "
        "so that most responses look equally good to the training: widen the range, or use --normalize_reward."
    )


@rule("reward_errors", passes=lambda errors, _: errors > 0)
def reward_fails(history: History, errors: float) -> str:
    """The reward function raised on some sample of the last 5 steps."""
    return (
        f"The reward function raised on {errors * FEW:.0f} samples since step {{since}}, which got "
        "--reward_error_value instead: the log shows the first errors."
    )


@rule("truncated_fraction", passes=lambda share, _: share > 0.5)
def many_truncated(history: History, share: float) -> str:
    """Half of the responses cut at --generate_max_len, in a run with rewards."""
    if history.option("overlong_filter", False):
        effect = "left out by --overlong_filter, so that nothing is learned from them"
        remedy = "raise it, or ask for less"
    else:
        effect = "scored unfinished"
        remedy = "raise it, or leave such responses out with --overlong_filter"

    most = history.option("generate_max_len", "")
    cut = f"{share:.0%} of the responses are cut at --generate_max_len {most}".rstrip()
    return f"{cut} since step {{since}} and {effect}: {remedy}."


@rule(
    "response_length",
    "reward",
    passes=lambda n, h: n > 2 * h.start("response_length") and h.flat_reward(),
)
def lengths_run_away(history: History, length: float) -> str:
    """Responses twice as long as at the start while the reward does not rise."""
    return (
        f"Responses have grown from {history.start('response_length'):.0f} to {length:.0f} tokens by step {{since}} "
        "without more reward: penalize length with --overlong_buffer_len, and see if the reward likes it for itself."
    )


@rule("response_length", passes=lambda n, h: n < 0.25 * h.start("response_length"))
def lengths_collapse(history: History, length: float) -> str:
    """Responses a quarter as long as at the start."""
    remedy = "lower --actor_learning_rate"
    check = "check that the reward does not prefer an empty answer"
    if history.distils:
        check = "use --gamma 0, as with a discount of 1 short responses pay less KL"
    elif history.option("init_kl_coef", 1) and not history.option("use_kl_loss", False):
        remedy = (
            "lower --init_kl_coef, as the KL penalty is paid per token and short answers pay less"
        )
    return (
        f"Responses have shrunk from {history.start('response_length'):.0f} to {length:.0f} tokens by step {{since}}: "
        f"read the samples, and {check}; else {remedy}."
    )


@rule("actor_grad_norm", last=1)
def gradient_spike(history: History, _: float) -> str | None:
    """The actor's gradient ten times the median of the reports before."""
    norms = history.last("actor_grad_norm", LEVEL + 1)
    if not norms:
        return None
    *earlier, norm = norms
    usual = median(earlier)
    if norm <= 10 * usual:
        return None
    return (
        f"The actor's gradient was {norm / max(usual, 1e-12):.0f} times its usual size at step "
        "{since}: --max_norm bounds it. If it happens again, read the samples and lower --actor_learning_rate."
    )


@rule("skipped_steps", last=LEVEL)
def steps_skipped(history: History, _: float) -> str | None:
    """Optimizer steps left out among the last 10 reports."""
    counts = history.values("skipped_steps")
    if not counts:
        return None
    before = counts[-LEVEL] if len(counts) >= LEVEL else 0
    if counts[-1] <= before:
        return None
    return (
        f"{counts[-1]:.0f} optimizer steps so far were skipped because a loss or gradient was not finite (the run ends "
        "after max_skipped_steps in a row): lower the learning rate; their batches are in the folder 'skipped'."
    )


@rule(
    "rollout_kl",
    "rollout_log_prob_gap",
    passes=lambda kl, h: kl > 0.01 and not any(h.last("staleness_max", FEW)),
)
def engine_differs(history: History, kl: float) -> str:
    """KL 0.01 nats per token between the engine that samples and the actor of the same weights."""
    causes = []
    if history.option("top_p", 1) < 1:
        causes.append("--top_p")
    if history.option("top_k") is not None:
        causes.append("--top_k")
    if history.option("min_new_tokens", 0):
        causes.append("--min_new_tokens")
    if history.option("lora_rank", 0) and history.option("lora_dropout", 0):
        causes.append("--lora_dropout")

    remedy = "check the precision of the engine (--bf16, --rollout_engine)"
    if causes:
        remedy = f"leave out {' and '.join(causes)}"
    corrects_itself = history.option("policy_loss_type") in ("double_sided", "decoupled")
    if history.option("rollout_correction", "none") in ("none", [], ()) and not corrects_itself:
        remedy += ", or weight the tokens with --rollout_correction tis"
    return f"The log-probs at sampling differ from the actor's since step {{since}} (KL {kl:.2g} per token): {remedy}."


@rule("sampled_batches", "useful_groups")
def sampling_bound(history: History, _: float) -> str | None:
    """Dynamic sampling stopped by its bound, with too few useful groups, in each of the last 5 steps."""
    bound = history.option("dynamic_sampling", 0)
    wanted = history.option("rollout_batch_size", 0)
    batches = history.last("sampled_batches", FEW)
    groups = history.last("useful_groups", FEW)
    if not batches or not groups or min(batches) < bound or max(groups) >= wanted:
        return None

    return (
        f"Dynamic sampling stops at --dynamic_sampling {bound} in each step since {{since}}, with "
        f"{groups[-1]:.0f} of {wanted} useful groups. Use harder or easier prompts, or more --n_samples_per_prompt."
    )


@rule("agent/agent_error", "agent/tool_error", "agent/timeout")
def episodes_fail(history: History, _: float) -> str | None:
    """A tenth of an agent's episodes ended by an error or a time limit."""
    failures = ("agent_error", "tool_error", "timeout")
    share = sum(history.mean(f"agent/{name}", FEW) for name in failures)
    if not share > 0.1:
        return None  # also where there is no number

    return (
        f"{share:.0%} of the episodes fail and are not trained on since step {{since}}: the log shows the first error; "
        "--agent_timeout gives more time."
    )


@rule(
    "agent/malformed_calls",
    passes=lambda n, h: n > 0.05 and n > 0.25 * h.mean("agent/tool_calls", FEW),
)
def malformed_calls(history: History, calls: float) -> str:
    """A fifth of the tool calls cannot be read."""
    return f"{calls:.2g} calls per episode cannot be read since step {{since}}: is --tool_parser the model's format?"


@rule("agent/rerendered_turns", passes=lambda n, h: n > h.mean("agent/bridged_turns", FEW))
def turns_rerendered(history: History, turns: float) -> str | None:
    """More turns rendered anew than continue the recorded tokens, with history: verbatim."""
    if history.option("history") == "template":
        return None

    return (
        f"{turns:.2g} turns per episode are rendered anew since step {{since}}: the agent changes earlier messages or "
        "the template refuses the bridge, so that episodes fall apart. Append messages only; see the option history."
    )


@rule("eval_loss", "loss", last=2)
def overfitting(history: History, _: float) -> str | None:
    """Supervised: the last two evaluations 2 % above the lowest eval_loss."""
    evaluated = history.values("eval_loss")
    best = min(evaluated, default=math.nan)
    if len(evaluated) < 3 or min(evaluated[-2:]) <= 1.02 * best:
        return None

    step_of_best = history.steps("eval_loss")[evaluated.index(best)]
    return (
        f"eval_loss rises since step {step_of_best} ({best:.3g} to {evaluated[-1]:.3g}): the model overfits. "
        "Use fewer --max_epochs; --keep_best eval_loss keeps the best model."
    )
