"""Evaluations of a PPO trainer on held-out prompts."""

import sys
from typing import TYPE_CHECKING

from openppo import logger
from openppo.rollout.rollout import Rollout
from openppo.tracking.console import write_line
from openppo.trainer.callbacks import notify
from openppo.trainer.evaluation.evaluator import evaluation_table
from openppo.trainer.evaluation.held_out_kl import measure_held_out_kl
from openppo.types import Interrupted

if TYPE_CHECKING:
    from openppo.trainer.ppo import PPOTrainer


def evaluate_policy(trainer: "PPOTrainer") -> dict[str, float]:
    """Sample responses to the held-out prompts, show them, and return their metrics; empty if there are none."""
    components = trainer.components
    grading = components.grading
    samples = trainer.source.evaluate()
    if trainer.config.measures_held_out_kl and isinstance(samples, Rollout):
        with components.weights_to_save():
            measure_held_out_kl(trainer.maker, samples, samples.metrics)
    if grading.scorer is None:
        trainer.maker.reward_names.check(samples)
    is_last = trainer.config.evaluation.val_only or trainer.global_step >= trainer.total_steps
    trainer.pass_watch.look(grading, samples, is_last)

    metrics = grading.measure(samples)
    components.card.note(trainer.global_step, metrics)
    if metrics:
        trainer.view.show_evaluation(trainer.global_step, samples)
        notify(trainer.callbacks, "on_evaluate", trainer, metrics)
    return metrics


def evaluate_alone(trainer: "PPOTrainer") -> None:
    """Evaluate the model, log metrics and print their table, without training."""
    components = trainer.components
    with components.trackers:
        try:
            metrics = trainer.evaluate()
        except Interrupted as signal:
            logger.info("stopped by %s: --val_only has evaluated nothing", signal)
            return
        components.trackers.log(trainer.global_step, metrics)

    if components.strategy.is_main:
        sources = [prompt.task or prompt.source for prompt in components.data.held_out]
        lines = evaluation_table(metrics, sources)
        write_line("\n".join(lines), sys.stdout)
