"""The loop that all supervised training shares: epochs, exact accumulation, evaluation, reports."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from openppo import logger
from openppo.config.commands import SupervisedCommand
from openppo.datasets import BatchSampler
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.fault_report import MemoryView
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics, PhaseTimer, StepProfiler, Trackers, progress_bar
from openppo.tracking.phase import current, evaluation, phase
from openppo.trainer.callbacks import STOPPED_EARLY, StopWhen
from openppo.trainer.checkpointer import Checkpointer, ensure_checkpoint_on_save_error, stopped
from openppo.trainer.memory.estimate import Estimate
from openppo.trainer.memory.shortage import explain_shortage
from openppo.trainer.supervised.batches import StepBatch, equal_micro_batches
from openppo.trainer.supervised.self_check import show_examples
from openppo.trainer.update import SkippedSteps
from openppo.types import Interrupted, StopCheck

Example = TypeVar("Example")


@dataclass
class SupervisedComponents(Generic[Example]):
    """What a supervised trainer works with. The data are the same on all ranks."""

    strategy: DeepspeedStrategy
    tokenizer: Any
    model: TrainableModel
    train_examples: Sequence[Example]
    eval_examples: Sequence[Example]
    trackers: Trackers
    checkpointer: Checkpointer
    stop: StopCheck = field(default_factory=StopCheck)
    estimate: Estimate | None = None


def total_optimizer_steps(config: SupervisedCommand, n_examples: int) -> int:
    """Optimizer steps of a whole run: ``--max_epochs`` of them, or ``--max_steps`` if that is fewer."""
    steps = config.batch.max_epochs * -(-n_examples // config.batch.train_batch_size)
    return steps if config.supervised.max_steps == -1 else min(steps, config.supervised.max_steps)


class SupervisedTrainer(ABC, Generic[Example]):
    """Base of the three trainers, which say what a batch costs; this says when to step."""

    kind: ClassVar[str]  # of its checkpoints, and of the command
    headline: ClassVar[Sequence[str]]  # metrics to show first

    def __init__(
        self, config: SupervisedCommand, components: SupervisedComponents[Example]
    ) -> None:
        self.config = config
        self.components = components
        self.model = components.model
        self.comm, self.device = components.strategy.comm, components.strategy.device
        n_examples = len(components.train_examples)
        self.sampler = BatchSampler(
            n_examples, config.batch.train_batch_size, config.deepspeed.seed
        )
        self.total_steps = total_optimizer_steps(config, n_examples)
        self.global_step = 0
        self.skipped = SkippedSteps(config.run, self.comm)
        self.unreported: dict[str, float] | None = (
            None  # metrics of a step that ``report`` has not seen through
        )
        self.stopping, self.should_stop = StopWhen(config.run.stop_conditions), False
        self.traced = StepProfiler(config.run.save_path, config.tracking, self.comm.rank).phase
        self._shows_next = config.tracking.self_check and self.comm.rank == 0

    def explain_memory(self, phase: str) -> MemoryView:
        """The memory estimate beside what is measured, for a report."""
        return explain_shortage(self.components.estimate, phase)

    @staticmethod
    def rows_of(example: Any) -> list[list[int]]:
        """Token ids of an example's rows."""
        return [example.token_ids]

    @staticmethod
    def n_scored(example: Any) -> int:
        """Most tokens of an example that get logits: its targets, where ``make_batch`` is not overridden."""
        return len(example.token_ids)

    def make_batch(self, examples: Sequence[Example]) -> StepBatch:
        """This rank's share of the ``examples`` of the whole step."""
        micro_batches = equal_micro_batches(examples, self.config.batch.micro_rows, self.comm)
        n_tokens = sum(
            len(row)
            for micro in micro_batches
            for example in micro
            for row in self.rows_of(example)
        )
        return StepBatch(micro_batches, sum(map(self.n_scored, examples)), n_tokens)

    @abstractmethod
    def loss(self, micro: Any, n_targets: int, metrics: Metrics) -> Tensor:
        """A scalar whose sum over micro-batches and ranks is the mean over the step's ``n_targets``; adds metrics."""

    def fit(self) -> None:
        """Train, evaluate when due, and save to ``save_path``.

        A signal (see ``openppo.strategy.signals``) lets the step finish and drops an evaluation, which the resumed
        run repeats; then a checkpoint is written instead of the trained model.
        """
        parts = self.components
        with parts.trackers:
            try:
                self.stopping.on_fit_start(self)
                if self.should_stop:
                    logger.info(STOPPED_EARLY)
                if self.unreported is not None:
                    self.report(self.unreported)
                with progress_bar(
                    self.total_steps, "training", enabled=parts.strategy.is_main
                ) as bar:
                    bar.update(self.global_step)
                    while self.global_step < self.total_steps and not self.should_stop:
                        parts.stop()
                        indices = next(
                            self.sampler.batches(*divmod(self.global_step, len(self.sampler)))
                        )
                        self.report(self.step([parts.train_examples[i] for i in indices]))
                        bar.update()
                self.save()
            except Interrupted as signal:
                logger.info(
                    stopped(
                        str(signal),
                        self.global_step,
                        self.total_steps,
                        checkpoint=self.save_checkpoint(),
                    )
                )

    def close(self) -> None:
        """Wait for all ranks; the trainer is of no use afterwards, and another may be built."""
        self.components.strategy.close()

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on ``examples``, given alike on all ranks; returns its metrics.

        ``FloatingPointError`` as of ``SkippedSteps``.
        """
        metrics = Metrics()
        model = self.model
        estimate = self.components.estimate
        timer = PhaseTimer(self.traced, estimate.peaks if estimate else None)
        current.step = self.global_step + 1
        with timer.phase("step"):
            model.train()
            metrics.add("learning_rate", model.learning_rate, reduce="max")
            batch = self.make_batch(examples)
            if self._shows_next:
                self._shows_next = False
                show_examples(examples, self.components.tokenizer)
            with self.components.strategy.training():
                for i, micro in enumerate(batch.micro_batches):
                    loss = self.loss(micro, batch.n_targets, metrics)
                    model.backward(
                        loss * self.comm.world_size, last=i == len(batch.micro_batches) - 1
                    )
            norm = model.step()
            if self.skipped.accept(
                norm, "model", f"step {self.global_step + 1}", examples=list(map(vars, examples))
            ):
                metrics.add("grad_norm", norm)
            else:
                metrics = Metrics()
        timer.count_tokens("step", batch.n_input_tokens)
        self.global_step += 1
        skipped = {"skipped_steps": float(self.skipped.total)}
        return metrics.reduced(self.comm) | skipped | timer.take_metrics(self.comm)

    @evaluation
    @torch.no_grad()
    def evaluate(
        self, examples: Sequence[Example] | None = None, stop: StopCheck | None = None
    ) -> dict[str, float]:
        """Metrics of ``examples``, the same on all ranks (default: all held-out ones), with the prefix ``eval_``."""
        examples = self.components.eval_examples if examples is None else examples
        stop = stop or self.components.stop
        metrics, size = Metrics(), self.config.batch.train_batch_size
        self.model.train(False)
        starts = range(0, len(examples), size)
        with self.components.strategy.uncompiled():
            for start in progress_bar(
                starts, "evaluation", enabled=self.components.strategy.is_main
            ):
                batch = self.make_batch(examples[start : start + size])
                for micro in batch.micro_batches:
                    stop()
                    self.loss(micro, batch.n_targets, metrics)
        return {f"eval_{name}": value for name, value in metrics.reduced(self.comm).items()}

    def report(self, metrics: dict[str, float]) -> None:
        """Evaluate, log, and save a checkpoint when due."""
        self.unreported = dict(metrics)
        step = self.global_step
        run = self.config.run
        last = self.global_step == self.total_steps
        every, checkpointer = self.config.supervised.eval_steps, self.components.checkpointer
        epoch_ended = step % len(self.sampler) == 0
        due = (epoch_ended if every == -1 else step % every == 0) or last
        if due and len(self.components.eval_examples) > 0:
            metrics |= self.evaluate()
            checkpointer.save_if_best(step, metrics, self.write_model)
        self.stopping.on_step_end(self, metrics)
        if due or self.should_stop or step % run.logging_steps == 0:
            self.components.trackers.log(step, metrics)
        self.unreported = None
        if self.should_stop or checkpointer.due(step, epoch_ended or last):
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
        """Write all that ``--load_checkpoint`` needs to resume here; ``CheckpointError`` when the disk is full."""
        state = {"global_step": self.global_step, "skipped": self.skipped.state_dict()}
        state |= {"unreported": self.unreported, **self.stopping.state_dict()}
        return self.components.checkpointer.save(self.global_step, state, self.write_model)

    def load_checkpoint(self) -> None:
        """Resume from the checkpoint that ``--load_checkpoint`` has found, as if the run had never stopped."""
        state = self.components.checkpointer.load()
        self.global_step, self.unreported = state["global_step"], state["unreported"]
        self.stopping.load_state_dict(state)
        self.skipped.load_state_dict(state["skipped"])

    def write_model(self, folder: Path) -> None:
        """Write the model in Hugging Face format to ``folder``, on all ranks together."""
        self.components.strategy.save_pretrained(
            self.model.module.model, folder, self.components.tokenizer
        )
