"""Each rule of health on curves made by hand: one that it must warn of, and near ones that it must not."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from openppo.config import TrainPPOConfig, TrainSFTConfig
from openppo.config.fields import rules_of
from openppo.config.train_supervised import TrainPRMConfig, TrainRMConfig
from openppo.tracking.report.health import QUIET, Health
from openppo.tracking.report.rules import RULES

REPO = Path(__file__).parents[4]
STEPS = 60


def findings(curves, config=None, steps=STEPS):
    """What is found in curves over the steps from 1 on; where one is None its metric is not reported."""
    health = Health(config or {}, RULES)
    for step in range(1, steps + 1):
        reported = {name: curve(step) for name, curve in curves.items()}
        health.look(step, {name: value for name, value in reported.items() if value is not None})
    return health.findings


def found(curves, config=None, steps=STEPS):
    """Names of the rules that fire."""
    return [finding.rule for finding in findings(curves, config, steps)]


def flat(value):
    """A curve with a little noise around ``value``, which is nothing but noise."""
    return lambda step: value + 0.01 * ((7 * step) % 5 - 2)


def at(value):
    """A curve without noise."""
    return lambda step: value


def rising(step):
    """A reward that is learned throughout."""
    return 0.02 * step


def ramp(low, high, start=0, end=STEPS):
    """From ``low`` at ``start`` to ``high`` at ``end``."""
    return lambda step: low + (high - low) * min(1.0, max(0.0, (step - start) / (end - start)))


def every_tenth(curve):
    """Of evaluations."""
    return lambda step: None if step % 10 else curve(step)


CLIP, FLAT_REWARD = {"reward_clip_range": [-10.0, 10.0]}, {"reward": flat(0.5)}
BOUND_10, BOUND_1 = ({"dynamic_sampling": n, "rollout_batch_size": 8} for n in (10, 1))
DISTILS = {"reward_fn": "none"}
RISES_AND_FALLS = every_tenth(lambda s: {10: 0.1, 20: 0.5, 30: 0.9}.get(s, 0.6))
CASES = {
    "kl_without_reward": ({"kl": ramp(0.0, 0.3), **FLAT_REWARD}, {}),
    "kl_above_target": ({"kl": flat(0.21)}, {"kl_target": 0.1}),
    "kl_far": ({"kl": flat(0.8), "kl_per_response": flat(80.0), "reward": rising}, {}),
    "kl_negative": ({"kl": flat(-0.05)}, {}),
    "evaluation_falls": ({"reward": rising, "eval_reward": RISES_AND_FALLS}, {}),
    "entropy_collapse": ({"entropy": ramp(2.0, 0.1), **FLAT_REWARD}, {}),
    "entropy_grows": ({"entropy": ramp(1.0, 3.0)}, {}),
    "many_clipped": ({"clip_fraction": flat(0.35)}, {"policy_loss_type": "ppo"}),
    "policy_stands_still": ({"kl_k3": at(1e-7), **FLAT_REWARD}, {"actor_learning_rate": 1e-6}),
    "critic_misleads": ({"explained_variance": flat(-0.3)}, {}),
    "one_reward": ({"reward_std": at(0.0), "reward": flat(1.0)}, {}),
    "lost_groups": ({"groups_without_signal": at(2.0)}, CLIP),
    "reward_outside_clip": ({"reward": flat(-25.0)}, CLIP),
    "reward_fails": ({"reward_errors": lambda s: float(s == 30)}, {}),
    "many_truncated": ({"truncated_fraction": flat(0.8)}, {"generate_max_len": 64}),
    "lengths_run_away": ({"response_length": ramp(50, 200), **FLAT_REWARD}, {}),
    "lengths_collapse": ({"response_length": ramp(100, 5), "reward": rising}, {}),
    "gradient_spike": ({"actor_grad_norm": lambda s: 40.0 if s == 40 else 1.0}, {}),
    "steps_skipped": ({"skipped_steps": lambda s: 0.0 if s < 20 else 1.0}, {}),
    "engine_differs": ({"rollout_kl": flat(0.04)}, {}),
    "sampling_bound": ({"sampled_batches": at(10.0), "useful_groups": at(7.0)}, BOUND_10),
    "episodes_fail": (
        {"agent/agent_error": at(0.05), "agent/tool_error": at(0.0), "agent/timeout": at(0.1)},
        {},
    ),
    "malformed_calls": ({"agent/malformed_calls": flat(0.5), "agent/tool_calls": flat(1.5)}, {}),
    "turns_rerendered": (
        {"agent/rerendered_turns": flat(2.0), "agent/bridged_turns": flat(1.0)},
        {},
    ),
    "overfitting": (
        {"loss": ramp(2, 0), "eval_loss": every_tenth(lambda s: 1.0 + abs(s - 30) / 50)},
        {},
    ),
}
WELL = {
    **{
        "kl": flat(0.0),
        "kl_per_response": flat(80.0),
        "kl_k3": at(1e-3),
        "reward_std": lambda s: float(s != 30),
    },
    **{
        "clip_fraction": flat(0.1),
        "reward": flat(-5.0),
        "reward_errors": at(0.0),
        "rollout_kl": at(1e-4),
    },
    **{
        "truncated_fraction": flat(0.2),
        "response_length": ramp(100, 40),
        "actor_grad_norm": flat(1.0),
    },
    **{"skipped_steps": at(0.0), "groups_without_signal": lambda s: float(s == 30)},
}
HALF_THEN_LESS = every_tenth(lambda s: 0.5 if s == 10 else 1 - s / 60)
OF_TOKENS = {"reward": flat(-25.0), "shaped_reward": flat(-25.0)}
HEALTHY = {
    "a run in which all is well": (WELL, {**CLIP, "kl_target": None}),
    "KL that grows with the reward": ({"kl": ramp(0.0, 0.3), "reward": rising}, {}),
    "KL that grows by a tenth": ({"kl": ramp(0.3, 0.6), **FLAT_REWARD}, {}),
    "KL that falls while the reward is flat": ({"kl": ramp(0.3, 0.1), **FLAT_REWARD}, {}),
    "KL near its target": ({"kl": flat(0.15)}, {"kl_target": 0.1}),
    "a distillation from far away, of a teacher with more entropy": (
        {
            "kl": ramp(2.0, 0.2),
            "kl_per_response": flat(80.0),
            "entropy": ramp(1.0, 3.0),
            "truncated_fraction": flat(0.8),
        },
        DISTILS,
    ),
    "many nats per token in short ones": (
        {"kl": flat(0.8), "kl_per_response": flat(4.0), "reward": rising},
        {},
    ),
    "one bad evaluation": (
        {"reward": rising, "eval_reward": every_tenth(lambda s: 0.5 if s == 40 else s / 100)},
        {},
    ),
    "both rewards fall": ({"reward": ramp(1, 0), "eval_reward": HALF_THEN_LESS}, {}),
    "entropy that falls while the reward rises": (
        {"entropy": ramp(2.0, 0.1), "reward": rising},
        {},
    ),
    "entropy that falls by half": ({"entropy": ramp(2.0, 1.0), **FLAT_REWARD}, {}),
    "entropy that grows by half": ({"entropy": ramp(1.0, 1.5)}, {}),
    "clipped sequences of gspo": ({"clip_fraction": flat(0.35)}, {"policy_loss_type": "gspo"}),
    "an engine of older weights": ({"rollout_kl": flat(0.04), "staleness_max": flat(1.0)}, {}),
    "a frozen policy": ({"kl_k3": at(0.0), **FLAT_REWARD}, {"freezing_actor_steps": STEPS}),
    "a critic that begins badly": ({"explained_variance": ramp(-20, 0.9, 0, 8)}, {}),
    "a normalized reward": ({"reward": flat(-25.0)}, {**CLIP, "normalize_reward": True}),
    "lengths that grow with the reward": ({"response_length": ramp(50, 200), "reward": rising}, {}),
    "the last prompts of a run": ({"sampled_batches": at(3.0), "useful_groups": at(7.0)}, BOUND_10),
    "a last batch that fills the groups": (
        {"sampled_batches": at(1.0), "useful_groups": at(8.0)},
        BOUND_1,
    ),
    "rewards of tokens beside a score within its range": (
        {**OF_TOKENS, "reward/of_tokens": flat(-20.0)},
        CLIP,
    ),
    "rewards of tokens alone, which are not clipped": (OF_TOKENS, CLIP),
    "eval_loss that falls": (
        {"loss": ramp(2, 0), "eval_loss": every_tenth(lambda s: 2 - s / 60)},
        {},
    ),
    "few episodes that fail": (
        dict.fromkeys(("agent/agent_error", "agent/tool_error", "agent/timeout"), at(0.03)),
        {},
    ),
    "few malformed calls": (
        {"agent/malformed_calls": flat(0.2), "agent/tool_calls": flat(1.5)},
        {},
    ),
    "turns that continue": (
        {"agent/rerendered_turns": flat(1.0), "agent/bridged_turns": flat(2.0)},
        {},
    ),
    "turns as in deployment": (
        {"agent/rerendered_turns": flat(2.0), "agent/bridged_turns": flat(1.0)},
        {"history": "template"},
    ),
    "numbers that are not finite": ({"kl": at(float("nan")), "reward": at(None)}, {}),
}


@pytest.mark.parametrize("name", [*CASES, *HEALTHY])
def test_a_rule_warns_of_its_curve_and_of_no_healthy_one(name):
    assert found(*(CASES | HEALTHY)[name]) == ([name] if name in CASES else [])


def test_every_rule_has_a_curve_and_needs_enough_reports_to_judge_by():
    assert sorted(CASES) == sorted(rule.name for rule in RULES)
    for name, case in CASES.items():
        if name not in ("reward_fails", "gradient_spike", "steps_skipped"):
            assert found(*case, steps=4) == []
    assert found({"kl": ramp(-0.2, -0.01), **FLAT_REWARD}) == ["kl_negative"], (
        "towards 0 from below"
    )


def test_a_warning_names_the_step_from_which_on_it_shows():
    """For a trend the window in which it begins; for a level its first report."""
    (finding,) = findings({"kl": ramp(0.1, 0.5, start=40, end=60), "reward": flat(0.5)})
    assert 20 < finding.since <= 40
    assert (
        f"flat since step {finding.since}: lower --actor_learning_rate or raise --init_kl_coef"
        in finding.text
    )
    assert (finding.last, finding.ended) == (60, False)
    (finding,) = findings(
        {"kl_per_response": lambda s: 50.0 * (s > 3), "kl": lambda s: 1.0}, steps=7
    )
    assert "far from the reference since step 3 (KL" in finding.text


FLICKERING = [1.0] * 10 + ([0.0] * 3 + [1.0] * 5) * 4


@pytest.mark.parametrize(
    ("values", "begun", "ended"),
    [
        ([1.0] * 50, [4], [False]),
        (FLICKERING, [4], [False]),  # a dip of a few reports is no end
        ([1.0] * 10 + [0.0] * 20, [4], [True]),
        ([1.0] * 10 + [0.0] * (QUIET + 5) + [1.0] * 10, [4, 27], [True, False]),
        ([1.0] * 5 + [None] * 2 * QUIET + [1.0], [4], [False]),  # reports without the metric
    ],
)
def test_a_warning_comes_once_and_again_only_after_it_was_gone(values, begun, ended):
    health = Health({}, RULES)
    rows = [{} if value is None else {"truncated_fraction": value} for value in values]
    looks = [health.look(step, row) for step, row in enumerate(rows)]
    assert [step for step, look in enumerate(looks) if look] == begun
    assert [finding.ended for finding in health.findings] == ended


def test_a_score_that_is_clipped_is_found_with_and_without_rewards_of_tokens():
    assert found({"reward": flat(-25.0), "shaped_reward": flat(-10.0)}, CLIP) == [
        "reward_outside_clip"
    ]
    both = {"reward": flat(5.0), "reward/of_tokens": flat(-20.0), "shaped_reward": flat(-10.0)}
    (finding,) = findings(both, CLIP)
    assert finding.text.startswith(
        "The mean reward 25 lies outside --reward_clip_range -10 10 since step 1"
    )


ADVICE = [
    (
        "lengths_collapse",
        {"init_kl_coef": 0.01},
        ["lower --init_kl_coef"],
        ["raise --init_kl_coef"],
    ),
    (
        "lengths_collapse",
        {"init_kl_coef": 0.0},
        ["lower --actor_learning_rate"],
        ["--init_kl_coef"],
    ),
    (
        "lengths_collapse",
        {"init_kl_coef": 0.01, "use_kl_loss": True},
        ["--actor_learning_rate"],
        ["--init_kl_coef"],
    ),
    ("lengths_collapse", {**DISTILS, "init_kl_coef": 1.0}, ["--gamma 0"], ["reward"]),
    ("many_truncated", {"overlong_filter": False}, ["out with --overlong_filter"], []),
    (
        "many_truncated",
        {"overlong_filter": True},
        ["left out by --overlong_filter"],
        ["out with --overlong_filter"],
    ),
    ("critic_misleads", {"value_clip": 0.2}, ["--value_clip None"], []),
    ("critic_misleads", {"value_clip": None}, ["--value_pretrain_steps"], ["--value_clip"]),
    (
        "engine_differs",
        {"rollout_correction": "none"},
        ["--rollout_correction tis"],
        ["--top_p", "--top_k", "--lora"],
    ),
    (
        "engine_differs",
        {"rollout_correction": "tis"},
        ["the precision of the engine"],
        ["--rollout_correction"],
    ),
    (
        "engine_differs",
        {"policy_loss_type": "decoupled"},
        ["the precision of the engine"],
        ["--rollout_correction"],
    ),
    (
        "engine_differs",
        {"top_p": 0.9, "top_k": 50},
        ["leave out --top_p and --top_k"],
        ["precision", "--lora"],
    ),
    (
        "engine_differs",
        {"lora_rank": 8, "lora_dropout": 0.1},
        ["leave out --lora_dropout"],
        ["precision", "--top"],
    ),
    (
        "engine_differs",
        {"lora_rank": 0, "lora_dropout": 0.1, "top_p": 1.0},
        ["precision"],
        ["--lora", "--top"],
    ),
]


COMMANDS = (TrainPPOConfig, TrainSFTConfig, TrainRMConfig, TrainPRMConfig)
GROUPS = {group for command in COMMANDS for group in typing.get_type_hints(command).values()}
OPTIONS = [field for group in GROUPS for field in dataclasses.fields(group)]
OF_FILES = {field.name for field in OPTIONS if rules_of(field).of_files}
FLAGS = {field.name for field in OPTIONS} - OF_FILES


@pytest.mark.parametrize(
    ("rule", "options", "said", "unsaid"), [*ADVICE, *((name, {}, [], []) for name in CASES)]
)
def test_a_warning_names_flags_that_exist_and_fit_the_options_of_the_run(
    rule, options, said, unsaid
):
    curves, config = CASES[rule]
    (finding,) = findings(curves, {**config, **options})
    assert [text for text in said if text not in finding.text] == []
    assert [text for text in unsaid if text in finding.text] == []
    named = re.findall(r"--(\w+)", finding.text)
    assert set(named) <= FLAGS
    assert named or OF_FILES & set(re.findall(r"\w+", finding.text))
    assert "{" not in finding.text


def test_the_document_lists_every_rule_as_its_docstring_says_it():
    text = (REPO / "docs" / "report.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, flags=re.MULTILINE))
    assert {name: row.replace("`", "") for name, row in rows.items()} == {
        rule.name: rule.about for rule in RULES
    }
