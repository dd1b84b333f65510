"""Frame of a run: logs, overdue reports, remaining rollouts, and the outcome that is saved."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openppo import logger
from openppo.rollout.failures import NothingTrainedError
from openppo.sources.synchronous import prompt_source
from openppo.tracking import progress_bar
from openppo.trainer.callbacks import STOPPED_EARLY, notify
from openppo.trainer.checkpointer import (
    ended_by_failures,
    ensure_checkpoint_on_save_error,
    stopped,
)
from openppo.types import Interrupted, Prompt, Sample

if TYPE_CHECKING:
    from openppo.trainer.ppo import PPOTrainer


@contextmanager
def session(trainer: "PPOTrainer") -> Iterator[None]:
    """Open the logs and make overdue reports before the steps of ``fit``; save the outcome after them."""
    trackers = trainer.components.trackers
    with trackers:
        notify(trainer.callbacks, "on_fit_start", trainer)
        if trainer.should_stop:
            logger.info(STOPPED_EARLY)
        trainer.rollback.mark()

        try:
            # an earlier session may have stopped during a report
            if trainer.state.unreported is not None:
                trainer.report(trainer.state.unreported)
            if trainer.config.evaluation.eval_before_training and not trainer.state.has_begun:
                trackers.log(trainer.global_step, trainer.evaluate())
            trainer.state.begin()
            yield
        except Interrupted as signal:
            path = _save_before_step(trainer)
            message = stopped(
                str(signal), trainer.global_step, trainer.total_steps, checkpoint=path
            )
            logger.info(message)
        except NothingTrainedError as failure:
            trainer.view.show_failed(trainer.global_step + 1, failure.failed)
            raise ended_by_failures(failure, _save_before_step(trainer)) from None
        else:
            trainer.save()
            notify(trainer.callbacks, "on_fit_end", trainer)


def rollouts(trainer: "PPOTrainer") -> Iterator[Sequence[Sample]]:
    """Yield the samples of each remaining step, until ``should_stop``."""
    strategy = trainer.components.strategy
    source = iter(trainer.source)
    with progress_bar(trainer.total_steps, "PPO", enabled=strategy.is_main) as bar:
        bar.update(trainer.global_step)
        while trainer.global_step < trainer.total_steps:
            if strategy.any_rank(trainer.should_stop):
                return
            trainer.rollback.mark()
            trainer.components.stop()
            samples = next(source, None)
            if samples is None:
                _end_early(trainer)
                return
            yield samples
            # dynamic sampling may have used up prompts of later steps
            bar.update(total=trainer.total_steps)


def remaining_batches(trainer: "PPOTrainer") -> Iterator[list[Prompt]]:
    """Yield at most one batch of prompts for each remaining step, after an overdue report."""
    if trainer.state.unreported is not None:
        trainer.report(trainer.state.unreported)
    batches = prompt_source(trainer.source).prompt_batches()
    for _ in range(trainer.total_steps - trainer.global_step):
        batch = next(batches, None)
        if batch is None or trainer.global_step >= trainer.total_steps:
            return
        yield batch


def save_models(trainer: "PPOTrainer") -> None:
    """Write the policy and, with ``--save_value_network``, the critic beside it."""
    components = trainer.components
    folder = Path(trainer.config.run.save_path).resolve()
    with ensure_checkpoint_on_save_error(
        components.checkpointer, trainer.global_step, trainer.save_checkpoint
    ):
        components.write_policy(folder)
        if trainer.config.model.save_value_network:
            components.write_critic(folder.with_name(folder.name + "_critic"))
    logger.info("saved the trained model to %s", folder)
    notify(trainer.callbacks, "on_save", trainer, folder)


def _end_early(trainer: "PPOTrainer") -> None:
    """Evaluate and save as after the last step, because the source has ended early."""
    step = trainer.global_step
    logger.info("no more samples after %d of %d steps", step, trainer.total_steps)
    evaluated = trainer.evaluate()
    if evaluated:
        trainer.components.trackers.log(step, evaluated)
    if trainer.components.checkpointer.due(step, True):
        trainer.save_checkpoint()


def _save_before_step(trainer: "PPOTrainer") -> Path:
    """Drop the current step and write a checkpoint of the state before it."""
    return trainer.save_checkpoint(trainer.rollback.to_mark())
