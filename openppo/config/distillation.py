"""Checks of a run without any reward, which learns from the KL to another model alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from openppo.config.fields import declared_options, given_options
from openppo.config.rewards import NONE, RewardConfig, RewardShapingConfig

if TYPE_CHECKING:
    from openppo.config.train_ppo import TrainPPOConfig

_FLAG = f"--reward_fn {NONE}"
_ESTIMATORS = ("gae", "reinforce")
"""Estimators that compare no rewards."""
_OF_EVALUATIONS = ("reward_error_value", "reward_workers", "reward_timeout", "step_separator")
"""Options of rewards that ``--eval_reward_fn`` reads too."""
_OF_OTHER_GROUPS = ("dynamic_sampling", "kl_target", "pass_reward", "pass_on")
"""Options about rewards that no group of rewards has."""


def problems_without_reward(config: TrainPPOConfig) -> Iterator[str]:
    """Yield messages about options that contradict ``--reward_fn none``, each with a remedy."""
    if not config.rewards.are_none:
        return
    if config.orchestrator.tasks is not None:
        yield f"{_FLAG} is for a run of one task: leave it out, or --tasks."
    yield from _about_rewards(config)

    if config.model.ref_pretrain is None:
        yield f"{_FLAG} learns from the KL to another model: name it with --ref_pretrain."
    if config.kl.init_kl_coef == 0:
        yield f"{_FLAG} learns from the KL penalty alone: give a positive --init_kl_coef (usual: 1)."

    estimator = config.advantage.advantage_estimator
    if estimator not in _ESTIMATORS:
        yield f"--advantage_estimator {estimator} compares rewards, and {_FLAG} gives none: use reinforce or gae."
    if estimator == "gae" and config.kl.use_kl_loss:
        yield f"--use_kl_loss: {_FLAG} leaves a critic nothing to learn: add --advantage_estimator reinforce."
    yield from _about_evaluations(config)


def problems_of_own_rewards(config: TrainPPOConfig, own_rewards: bool | None) -> Iterator[str]:
    """Yield a message about an agent whose own rewards would count.

    ``own_rewards`` is as in ``TrainingConfig.validate``.
    """
    if not config.rewards.are_none:
        return
    form = config.agents.form
    if form == "tools" and own_rewards:
        yield f"--tools {config.agents.tools} gives rewards, and {_FLAG} says that none is: add --tool_rewards none."
    elif own_rewards or form not in (None, "tools"):
        agent = "the agent" if form is None else f"--{form}"
        yield f"{_FLAG}: {agent} gives rewards of its own: leave one of them out."


def _about_rewards(config: TrainPPOConfig) -> Iterator[str]:
    """Yield messages about options that give, shape or compare rewards."""
    options = given_options(config)
    declared = declared_options(type(config))
    names = [*declared_options(RewardConfig), *declared_options(RewardShapingConfig)]
    names += _OF_OTHER_GROUPS

    allowed = {"reward_fn", "overlong_filter"}  # the latter leaves responses out
    if config.evaluation.eval_reward_fn is not None:
        allowed |= {*_OF_EVALUATIONS, "pass_reward", "pass_on"}
    for name in names:
        if name not in allowed and options[name] != declared[name].default:
            yield f"--{name} is about rewards, and {_FLAG} gives none: leave one of them out."


def _about_evaluations(config: TrainPPOConfig) -> Iterator[str]:
    """Yield messages about evaluations that lack what options look at."""
    evaluation = config.evaluation
    scores = evaluation.eval_reward_fn is not None
    remedy = f"add --eval_temperature {config.generation.temperature:g}"

    if evaluation.eval_data is not None and not (scores or config.measures_held_out_kl):
        samples = "measures the KL to --ref_pretrain, of samples at --temperature"
        yield f"--eval_data with {_FLAG} {samples}: {remedy}, or an --eval_reward_fn."

    watched = {f"--stop_when {each.text!r}": each.metric for each in config.run.stop_conditions}
    best = config.checkpoint.keep_best
    if best is not None:
        watched[f"--keep_best {best}"] = best
    for where, metric in watched.items():
        of_training = metric.startswith(("reward", "shaped_reward"))
        of_evaluation = metric.startswith(("eval_reward", "eval_pass@"))
        if of_training or (of_evaluation and not scores):
            yield f"{where} looks at a reward, and {_FLAG} gives none: look at kl, or eval_kl."
        if metric == "eval_kl" and not config.measures_held_out_kl:
            yield f"{where} looks at samples at --temperature: {remedy}."
