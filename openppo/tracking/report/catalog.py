"""Charts of several metrics, with a sentence for the reader; other metrics get charts of their own."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from openppo.types import Ending


class Chart(NamedTuple):
    """``metrics`` in one chart, by name, with * for any part; ``target`` is an option drawn as a line."""

    title: str
    metrics: tuple[str, ...]
    about: str = ""
    target: str | None = None


TRAINED_ENDINGS = tuple(ending.value for ending in Ending if ending.is_trained)
OTHER_ENDINGS = tuple(ending.value for ending in Ending if not ending.is_trained)

PHASES = ("generation", "scoring", "experience", "training", "step")

GROUPS: dict[str, tuple[Chart, ...]] = {
    "Reward": (
        Chart(
            "Reward",
            ("reward", "eval_reward"),
            "Mean reward of what was sampled, and of held-out prompts.",
        ),
        Chart(
            "Spread of the reward",
            ("reward_std", "eval_reward_std"),
            "At 0 all earn the same: nothing to learn.",
        ),
        Chart(
            "Best and worst",
            ("reward_max", "reward_min", "eval_reward_max", "eval_reward_min"),
            "Of all responses.",
        ),
        Chart(
            "Named rewards",
            ("reward/*", "eval_reward/*"),
            "Each part of the reward, before its weight.",
        ),
        Chart(
            "Reward that training gets",
            ("shaped_reward", "sampled_reward"),
            "After normalization and clipping.",
        ),
        Chart(
            "Mean of all scores",
            ("reward_mean", "eval_reward_mean"),
            "Of a reward model, of both sides of pairs.",
        ),
        Chart(
            "Both sides",
            ("chosen_reward", "rejected_reward", "eval_chosen_reward", "eval_rejected_reward"),
        ),
        Chart(
            "Reward errors",
            ("reward_errors", "eval_reward_errors"),
            "Samples on which the reward function raised.",
        ),
        Chart(
            "95 % intervals",
            ("eval_*_ci95",),
            "Half their width, of means over held-out prompts.",
        ),
        Chart(
            "Held-out pass rate",
            ("eval_pass@*",),
            "Share of held-out prompts with a passing response among k.",
        ),
        Chart(
            "Extras",
            ("extra/*", "eval_extra/*"),
            "Numbers that reward functions gave to be logged.",
        ),
        Chart("Reward by source", ("source/*/reward",), "Of each data source of the prompts."),
        Chart("Length by source", ("source/*/response_length",), "Tokens."),
        Chart("Other numbers by source", ("source/*",)),
        Chart("Held-out by source", ("eval/*",), "The same for each data source."),
    ),
    "Policy": (
        Chart(
            "KL from the reference",
            ("kl", "kl_k3", "eval_kl"),
            "Nats per token. It should grow slowly, or fall in a distillation.",
            target="kl_target",
        ),
        Chart(
            "KL per response",
            ("kl_per_response", "kl_k3_per_response"),
            "Nats: what the reward has cost.",
        ),
        Chart("KL coefficient", ("kl_coef",), "Weight of the penalty; moves with --kl_target."),
        Chart("Entropy", ("entropy",), "Nats per token. Near 0 the policy has stopped exploring."),
        Chart(
            "Clip fraction",
            ("clip_fraction",),
            "Share of tokens outside the clip range; usually below 0.2.",
        ),
        Chart(
            "Update size",
            ("approx_kl",),
            "KL between the policy before the step and the one that is trained.",
        ),
        Chart("Largest ratio", ("ratio_max",), "Of the new to the old probability of a token."),
    ),
    "Losses": (
        Chart("Policy loss", ("policy_loss",), "Near 0, and no measure of success."),
        Chart("Value loss", ("value_loss",), "Falls as the critic learns."),
        Chart("Loss", ("loss", "eval_loss")),
        Chart("Accuracy", ("accuracy", "eval_accuracy")),
        Chart("Other losses", ("kl_loss", "ptx_loss")),
    ),
    "Critic": (
        Chart(
            "Explained variance",
            ("explained_variance",),
            "1: foresees returns; 0: knows their mean.",
        ),
        Chart("Values and returns", ("values", "returns"), "Means over tokens; they should meet."),
        Chart(
            "Spread of the returns",
            ("returns_std", "value_error_std"),
            "And what the critic leaves of it.",
        ),
        Chart("Advantages", ("advantages", "advantages_std"), "Before normalization."),
        Chart("Range of the advantages", ("advantages_max", "advantages_min"), "Of single tokens."),
        Chart("Range of the returns", ("returns_max", "returns_min"), "Of single tokens."),
    ),
    "Responses": (
        Chart("Response length", ("response_length", "eval_response_length"), "Tokens."),
        Chart(
            "Prompt length", ("prompt_length", "prompt_length_max", "prompt_length_min"), "Tokens."
        ),
        Chart(
            "Truncated",
            ("truncated_fraction", "eval_truncated_fraction"),
            "Share cut at --generate_max_len.",
        ),
        Chart("Dynamic sampling", ("sampled_batches", "useful_groups")),
        Chart(
            "Groups without signal",
            ("groups_without_signal",),
            "Rewards differ, advantages are 0; should be 0.",
        ),
    ),
    "Agents": (
        Chart(
            "Endings that are trained on",
            tuple(f"agent/{name}" for name in TRAINED_ENDINGS),
            "Share of episodes.",
        ),
        Chart(
            "Endings that are not",
            tuple(f"agent/{name}" for name in OTHER_ENDINGS),
            "Share of episodes; near 0.",
        ),
        Chart("Turns", ("agent/turns", "eval_agent/turns"), "Of the model, per episode."),
        Chart("Tokens per turn", ("agent/tokens_per_turn",)),
        Chart(
            "Tool calls",
            ("agent/tool_calls", "agent/tool_errors", "agent/malformed_calls"),
            "Per episode.",
        ),
        Chart(
            "Prompts of turns",
            ("agent/bridged_turns", "agent/rerendered_turns"),
            "Continued, or rendered anew.",
        ),
        Chart(
            "Prefix reuse",
            ("agent/prefix_reuse",),
            "Tokens kept between turns, for each one that was read.",
        ),
        Chart("Other counts", ("agent/*",), "Per episode."),
        Chart("Endings of held-out episodes", ("eval_agent/*",)),
    ),
    "Optimizer": (
        Chart(
            "Gradient norms",
            ("actor_grad_norm", "critic_grad_norm", "grad_norm"),
            "Before clipping.",
        ),
        Chart("Learning rates", ("actor_learning_rate", "critic_learning_rate", "learning_rate")),
        Chart(
            "Skipped steps",
            ("skipped_steps",),
            "So far, because a loss or gradient was not finite.",
        ),
    ),
    "Sampling against training": (
        Chart(
            "KL of engine and actor",
            ("rollout_kl", "rollout_kl_k1"),
            "Near 0 where both have the same weights.",
        ),
        Chart("KL by staleness", ("rollout_kl/*",), "Of tokens that are so many versions behind."),
        Chart("Log-prob gap", ("rollout_log_prob_gap", "rollout_log_prob_gap_max")),
        Chart(
            "Probability gap",
            ("rollout_prob_gap", "rollout_prob_gap_max", "rollout_prob_gap_std"),
            "0 to 1.",
        ),
        Chart("Largest ratio of both", ("rollout_ratio_max",)),
        Chart("Correction", ("rollout_weight", "rollout_masked_fraction")),
        Chart(
            "Tokens left out",
            ("masked_low_fraction", "masked_high_fraction"),
            "Their ratio is too low, too high.",
        ),
        Chart(
            "Staleness",
            ("staleness", "staleness_max"),
            "Global steps between sampling and training.",
        ),
    ),
    "Rollouts that do not wait": (
        Chart(
            "Seconds of waiting",
            ("async/wait_for_batch_s", "async/wait_for_samplers_s", "async/sync_s"),
        ),
        Chart(
            "Idle engines",
            ("async/engine_idle_share",),
            "Share of the time in which they have no requests.",
        ),
        Chart(
            "Groups", ("async/buffered_groups", "async/running_groups"), "Complete, and under way."
        ),
        Chart(
            "Groups lost",
            ("async/filtered_groups", "async/stale_groups", "async/failed_groups"),
            "Of the run.",
        ),
        Chart(
            "Episodes too old",
            ("stale/share", "stale/share_by_length/*"),
            "Share, of each quarter by length.",
        ),
        Chart("Other numbers", ("async/*",)),
    ),
    "Tasks": (
        Chart("Reward by task", ("task/*/reward",)),
        Chart(
            "Shares of the accepted episodes",
            ("task/*/share", "task/*/ratio"),
            "Reached, and wanted.",
        ),
        Chart("Accepted episodes", ("task/*/accepted_episodes",), "Of the whole run."),
        Chart("KL by task", ("task/*/kl",), "Nats per token."),
        Chart("Response length by task", ("task/*/response_length",), "Tokens."),
        Chart(
            "Staleness by task",
            ("task/*/staleness",),
            "Global steps between sampling and training.",
        ),
        Chart("Seconds of a group", ("task/*/group_s",), "Mean over the run."),
        Chart("Groups under way, failed", ("task/*/running_groups", "task/*/failed_groups")),
    ),
    "Speed": (
        Chart(
            "Seconds per phase", tuple(f"time/{name}_s" for name in PHASES), "Of the slowest rank."
        ),
        Chart("Seconds per role", ("time/*",), "Parts of phases, and what lies between steps."),
        Chart("Tokens per second", ("speed/*_tokens_per_s",), "Of all ranks together."),
        Chart(
            "Tokens per second and device",
            ("speed/step_tokens_per_s_per_device",),
            "Of whole steps.",
        ),
        Chart(
            "Imbalance of the ranks",
            ("speed/*_imbalance",),
            "Tokens of the rank with the most over the mean, - 1.",
        ),
        Chart(
            "GPU memory per phase",
            ("memory/*",),
            "GiB at the peak, of the rank that took most, and as estimated.",
        ),
    ),
    "Progress": (
        Chart("Samples trained on", ("consumed_samples",), "Of the whole run."),
        Chart("Tokens trained on", ("consumed_tokens",), "Of the whole run, prompts included."),
        Chart("Episode", ("episode",), "Passes over the prompts."),
    ),
}


def charts_of(names: Iterable[str]) -> list[dict[str, object]]:
    """List charts for the metrics ``names``, in order: group, title, metrics, about, target.

    Each metric is in one chart.
    """
    left = sorted(set(names) - {"step", "time"})
    charts: list[dict[str, object]] = []
    for group, group_charts in GROUPS.items():
        for chart in group_charts:
            shown = [name for pattern in chart.metrics for name in left if matches(name, pattern)]
            left = [name for name in left if name not in shown]
            if shown:
                charts.append({"group": group, **chart._asdict(), "metrics": shown})

    for name in left:
        charts.append({"group": "Other", **Chart(name, (name,))._asdict()})
    return charts


def matches(name: str, pattern: str) -> bool:
    """True if ``pattern``, a name in a chart, stands for metric ``name``."""
    return fnmatchcase(name, pattern)
