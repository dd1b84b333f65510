"""Loop of all supervised training: epochs, exact accumulation, evaluation, reports."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from openppo import logger
from openppo.config.train_supervised import SupervisedCommand
from openppo.datasets import BatchSampler, shuffled
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.fault_report import ExplainMemory, explain_nothing
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics, PhaseTimer, StepProfiler, Trackers, progress_bar
from openppo.tracking.phase import evaluation, phase
from openppo.trainer.callbacks import STOPPED_EARLY, StopWhen
from openppo.trainer.cards.run_card import RunCard
from openppo.trainer.checkpointer import Checkpointer, ensure_checkpoint_on_save_error, stopped
from openppo.trainer.skipped_steps import SkippedSteps
from openppo.trainer.supervised.batches import StepBatch, equal_micro_batches
from openppo.trainer.supervised.self_check import show_examples
from openppo.types import Interrupted, StopCheck

Example = TypeVar("Example")


@dataclass
class SupervisedComponents(Generic[Example]):
    """Model, data and reporting of a supervised trainer; all ranks have the same data."""

    strategy: DeepspeedStrategy
    tokenizer: Any
    model: TrainableModel
    train_examples: Sequence[Example]
    eval_examples: Sequence[Example]
    trackers: Trackers
    checkpointer: Checkpointer
    stop: StopCheck = field(default_factory=StopCheck)
    explain_memory: ExplainMemory = explain_nothing
    """Compares estimated and measured memory in a fault report."""
    peaks: Mapping[str, int] | None = None
    """Estimated bytes by phase, None where a model cannot be counted."""
    card: RunCard = field(default_factory=RunCard)


def total_optimizer_steps(config: SupervisedCommand, n_examples: int) -> int:
    """Optimizer steps of a whole run: ``--max_epochs`` epochs, or ``--max_steps`` if that is fewer."""
    n_steps = config.batch.max_epochs * -(-n_examples // config.batch.train_batch_size)
    max_steps = config.supervised.max_steps
    return n_steps if max_steps == -1 else min(n_steps, max_steps)


class SupervisedTrainer(ABC, Generic[Example]):
    """Base of the three trainers, which define the loss of a batch."""

    kind: ClassVar[str]
    """Kind of its checkpoints, and of the command."""
    headline: ClassVar[Sequence[str]]
    """Metrics on the console, in this order."""

    def __init__(
        self, config: SupervisedCommand, components: SupervisedComponents[Example]
    ) -> None:
        self.config = config
        self.components = components
        self.model = components.model
        self.comm = components.strategy.comm
        self.device = components.strategy.device

        n_examples = len(components.train_examples)
        batch_size = config.batch.train_batch_size
        self.sampler = BatchSampler(
            n_examples, batch_size, shuffled(n_examples, config.deepspeed.seed)
        )
        self.total_steps = total_optimizer_steps(config, n_examples)
        self.global_step = 0
        self.skipped = SkippedSteps(config.run, self.comm)
        self.unreported: dict[str, float] | None = None
        """Metrics of the last step until its ``report`` is complete."""
        self.stopping = StopWhen(config.run.stop_conditions)
        self.should_stop = False
        self.explain_memory = components.explain_memory
        self.traced = StepProfiler(config.run.save_path, config.tracking, self.comm.rank).phase
        self._shows_next = config.tracking.self_check and self.comm.rank == 0

    @staticmethod
    def rows_of(example: Any) -> list[list[int]]:
        """Token ids of an example's rows."""
        return [example.token_ids]

    @staticmethod
    def n_scored(example: Any) -> int:
        """Most tokens of an example that get logits: its targets, unless ``make_batch`` is overridden."""
        return len(example.token_ids)

    def make_batch(self, examples: Sequence[Example]) -> StepBatch:
        """Make this rank's share of the ``examples`` of the whole step."""
        micro_batches = equal_micro_batches(examples, self.config.batch.micro_rows, self.comm)
        n_tokens = 0
        for micro in micro_batches:
            for example in micro:
                n_tokens += sum(len(row) for row in self.rows_of(example))
        return StepBatch(micro_batches, sum(map(self.n_scored, examples)), n_tokens)

    @abstractmethod
    def loss(self, micro: Any, n_targets: int, metrics: Metrics) -> Tensor:
        """Return a scalar whose sum over micro-batches and ranks is the mean over ``n_targets``; add metrics."""

    def fit(self) -> None:
        """Train, evaluate when due, and save to ``save_path``.

        A signal (see ``openppo.strategy.signals``) lets the step finish and drops an evaluation, which the resumed
        run repeats; then a checkpoint is written instead of the trained model.
        """
        with self.components.trackers:
            try:
                self.stopping.on_fit_start(self)
                if self.should_stop:
                    logger.info(STOPPED_EARLY)
                if self.unreported is not None:
                    self.report(self.unreported)
                self._train_to_end()
                self.save()
            except Interrupted as signal:
                checkpoint = self.save_checkpoint()
                message = stopped(
                    str(signal), self.global_step, self.total_steps, checkpoint=checkpoint
                )
                logger.info(message)

    def _train_to_end(self) -> None:
        """Train and report until the last step, or until ``should_stop``."""
        components = self.components
        is_main = components.strategy.is_main
        with progress_bar(self.total_steps, "training", enabled=is_main) as bar:
            bar.update(self.global_step)
            while self.global_step < self.total_steps and not self.should_stop:
                components.stop()
                epoch, first_batch = divmod(self.global_step, len(self.sampler))
                indices = next(self.sampler.batches(epoch, first_batch))
                self.report(self.step([components.train_examples[i] for i in indices]))
                bar.update()

    def close(self) -> None:
        """Wait for all ranks; afterwards this trainer is unusable, and another may be built."""
        self.components.strategy.close()

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """Take one optimizer step on ``examples``, the same on all ranks; return its metrics.

        ``FloatingPointError`` as of ``SkippedSteps``.
        """
        model = self.model
        metrics = Metrics()
        timer = PhaseTimer(self.traced, self.components.peaks)

        with timer.step(self.global_step + 1):
            model.train()
            metrics.add("learning_rate", model.learning_rate, reduce="max")
            batch = self.make_batch(examples)
            if self._shows_next:
                self._shows_next = False
                show_examples(examples, self.components.tokenizer)
            self._accumulate(batch, metrics)
            norm = model.step()

            step_name = f"step {self.global_step + 1}"
            columns = [vars(example) for example in examples]
            if self.skipped.accept(norm, "model", step_name, examples=columns):
                metrics.add("grad_norm", norm)
            else:
                metrics = Metrics()

        timer.count_tokens("step", batch.n_input_tokens)
        self.global_step += 1
        skipped = {"skipped_steps": float(self.skipped.total)}
        return metrics.reduced(self.comm) | skipped | timer.take_metrics(self.comm)

    def _accumulate(self, batch: StepBatch, metrics: Metrics) -> None:
        """Accumulate the gradients of all micro-batches."""
        with self.components.strategy.training():
            for number, micro in enumerate(batch.micro_batches, start=1):
                loss = self.loss(micro, batch.n_targets, metrics)
                is_last = number == len(batch.micro_batches)
                self.model.backward(loss * self.comm.world_size, last=is_last)

    @evaluation
    @torch.no_grad()
    def evaluate(
        self, examples: Sequence[Example] | None = None, stop: StopCheck | None = None
    ) -> dict[str, float]:
        """Return metrics of ``examples`` with the prefix ``eval_``.

        ``examples`` are the same on all ranks, by default all held-out ones.
        """
        strategy = self.components.strategy
        if examples is None:
            examples = self.components.eval_examples
        stop = stop or self.components.stop
        size = self.config.batch.train_batch_size
        starts = range(0, len(examples), size)

        metrics = Metrics()
        self.model.train(False)
        with strategy.uncompiled():
            for start in progress_bar(starts, "evaluation", enabled=strategy.is_main):
                batch = self.make_batch(examples[start : start + size])
                for micro in batch.micro_batches:
                    stop()
                    self.loss(micro, batch.n_targets, metrics)
        return {f"eval_{name}": value for name, value in metrics.reduced(self.comm).items()}

    def report(self, metrics: dict[str, float]) -> None:
        """Evaluate, log, and save a checkpoint when due."""
        self.unreported = dict(metrics)
        step = self.global_step
        components = self.components
        checkpointer = components.checkpointer

        is_last = step == self.total_steps
        epoch_ended = step % len(self.sampler) == 0
        interval = self.config.supervised.eval_steps
        interval_ended = epoch_ended if interval == -1 else step % interval == 0
        evaluation_due = interval_ended or is_last

        if evaluation_due and len(components.eval_examples) > 0:
            metrics |= self.evaluate()
            components.card.note(step, metrics)
            checkpointer.save_if_best(step, metrics, self.write_model)
        self.stopping.on_step_end(self, metrics)

        logging_due = step % self.config.run.logging_steps == 0
        if evaluation_due or self.should_stop or logging_due:
            components.trackers.log(step, metrics)
        self.unreported = None
        if self.should_stop or checkpointer.due(step, epoch_ended or is_last):
            self.save_checkpoint()

    @phase("saving")
    def save(self) -> None:
        """Write the model as a Hugging Face folder with tokenizer."""
        folder = Path(self.config.run.save_path)
        with ensure_checkpoint_on_save_error(
            self.components.checkpointer, self.global_step, self.save_checkpoint
        ):
            self.write_model(folder)
        logger.info("saved the trained model to %s", folder)

    @phase("saving")
    def save_checkpoint(self) -> Path:
        """Write a checkpoint from which ``--load_checkpoint`` resumes; ``CheckpointError`` if the disk is full."""
        state = {
            "global_step": self.global_step,
            "skipped": self.skipped.state_dict(),
            "unreported": self.unreported,
            "evaluations": self.components.card.evaluations,
            **self.stopping.state_dict(),
        }
        return self.components.checkpointer.save(self.global_step, state, self.write_model)

    def load_checkpoint(self) -> None:
        """Resume from the checkpoint that ``--load_checkpoint`` has found, as if the run had never stopped."""
        state = self.components.checkpointer.load()
        self.global_step = state["global_step"]
        self.unreported = state["unreported"]
        self.components.card.resume(state)
        self.stopping.load_state_dict(state)
        self.skipped.load_state_dict(state["skipped"])

    def write_model(self, folder: Path) -> None:
        """Write the model in Hugging Face format with its card to ``folder``, on all ranks together."""
        components = self.components
        components.strategy.save_pretrained(self.model.module.model, folder, components.tokenizer)
        samples = self.global_step * self.config.batch.train_batch_size
        components.card.write(folder, self.global_step, samples, comm=self.comm)
