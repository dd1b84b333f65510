"""Callbacks of the trainer itself: what follows each step, before and after the user's."""

from collections.abc import Mapping, Sequence

from openppo.trainer.callbacks import Callback, PPOTrainer


def reporting(callbacks: Sequence[Callback]) -> list[Callback]:
    """Put the user's ``callbacks`` in their place among the trainer's own."""
    before = (ShowSamples(), Evaluate(), KeepBest())
    after = (AgreeOnStopping(), Log(), SaveCheckpoint())
    return [*before, *callbacks, *after]


class ShowSamples(Callback):
    """Logs samples, self-checks and histograms of the step."""

    def on_step_end(self, trainer: PPOTrainer, metrics: dict[str, float]) -> None:
        trainer.view.show_step(trainer.global_step, trainer.replay_buffer, metrics)


class Evaluate(Callback):
    """Adds the metrics of an evaluation, when one is due."""

    def on_step_end(self, trainer: PPOTrainer, metrics: dict[str, float]) -> None:
        if evaluation_is_due(trainer, metrics):
            metrics |= trainer.evaluate()


class KeepBest(Callback):
    """Keeps the model of the best evaluation, with ``--keep_best``."""

    def on_step_end(self, trainer: PPOTrainer, metrics: dict[str, float]) -> None:
        if evaluation_is_due(trainer, metrics):
            components = trainer.components
            components.checkpointer.save_if_best(
                trainer.global_step, metrics, components.write_policy
            )


class AgreeOnStopping(Callback):
    """Ends the run on all ranks if one of them stops it."""

    def on_step_end(self, trainer: PPOTrainer, metrics: dict[str, float]) -> None:
        trainer.should_stop = trainer.components.strategy.any_rank(trainer.should_stop)


class Log(Callback):
    """Logs the metrics every ``--logging_steps`` steps, of each evaluation, and of the last step."""

    def on_step_end(self, trainer: PPOTrainer, metrics: dict[str, float]) -> None:
        step = trainer.global_step
        is_due = step % trainer.config.run.logging_steps == 0
        is_evaluated = any(name.startswith("eval") for name in metrics)
        if is_due or is_evaluated or trainer.should_stop or step == trainer.total_steps:
            trainer.components.trackers.log(step, metrics)


class SaveCheckpoint(Callback):
    """Writes a checkpoint when one is due, or when the run stops early; the step counts as reported in it."""

    def on_step_end(self, trainer: PPOTrainer, metrics: dict[str, float]) -> None:
        step = trainer.global_step
        pass_ended = trainer.state.ends_episode(metrics) or step == trainer.total_steps
        trainer.state.end_report(metrics)
        if trainer.should_stop or trainer.components.checkpointer.due(step, pass_ended):
            trainer.save_checkpoint()


def evaluation_is_due(trainer: PPOTrainer, metrics: Mapping[str, float]) -> bool:
    """True if ``--eval_steps`` wants an evaluation after this step, or if it is the last."""
    if trainer.global_step == trainer.total_steps:
        return True
    every: int = trainer.config.evaluation.eval_steps
    if every == -1:
        return bool(trainer.state.ends_episode(metrics))
    return bool(trainer.global_step % every == 0)
