"""The loop that all supervised training shares: epochs, exact accumulation, evaluation, reports."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from openppo.config.commands import SupervisedCommand
from openppo.datasets import BatchSampler
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.engine import TrainingEngine
from openppo.tracking import Metrics, PhaseTimer, Trackers, progress
from openppo.tracking.position import phase, position

logger = logging.getLogger("openppo")

Example = TypeVar("Example")
ModelCall = Callable[..., Tensor]


class StepBatch(Protocol):
    """One rank's share of an optimizer step: equally many micro-batches on all ranks."""

    @property
    def micro_batches(self) -> Sequence[Any]:
        """In whatever form the trainer's ``loss`` takes."""
        ...

    @property
    def n_input_tokens(self) -> int:
        """Real tokens that this rank feeds to the model."""
        ...


@dataclass
class SupervisedParts(Generic[Example]):
    """What a supervised trainer works with. The data are the same on all ranks."""

    strategy: DeepspeedStrategy
    tokenizer: Any
    engine: TrainingEngine
    train_examples: Sequence[Example]
    eval_examples: Sequence[Example]
    trackers: Trackers


def total_optimizer_steps(config: SupervisedCommand, n_examples: int) -> int:
    """Optimizer steps of a whole run: ``--max_epochs`` of them, or ``--max_steps`` if that is fewer."""
    steps = config.batch.max_epochs * -(-n_examples // config.batch.train_batch_size)
    return steps if config.supervised.max_steps == -1 else min(steps, config.supervised.max_steps)


class SupervisedTrainer(ABC, Generic[Example]):
    """Base of the trainers beside it: they say what a batch costs, this says when to step."""

    def __init__(self, config: SupervisedCommand, parts: SupervisedParts[Example]) -> None:
        self.config = config
        self.parts = parts
        self.comm = parts.strategy.comm
        self.device = parts.strategy.device
        self.sampler = BatchSampler(len(parts.train_examples), config.batch.train_batch_size, config.deepspeed.seed)
        self.total_steps = total_optimizer_steps(config, len(parts.train_examples))
        self.global_step = 0

    @abstractmethod
    def make_batch(self, examples: Sequence[Example]) -> StepBatch:
        """This rank's ``StepBatch`` of ``examples``, which are those of the whole step."""

    @abstractmethod
    def loss(self, model: ModelCall, batch: Any, micro: Any, metrics: Metrics, prefix: str) -> Tensor:
        """A scalar whose sum over all micro-batches and ranks is the step's mean loss; adds ``prefix``ed metrics."""

    def fit(self) -> None:
        """Train, evaluate when due, and save to ``save_path``."""
        with progress(self.total_steps, "training", enabled=self.parts.strategy.is_main) as bar:
            for epoch in range(self.config.batch.max_epochs):
                for indices in self.sampler.batches(epoch):
                    if self.global_step == self.total_steps:
                        break
                    self.report(self.step([self.parts.train_examples[i] for i in indices]))
                    bar.update()
        self.save()
        self.parts.trackers.close()

    def close(self) -> None:
        """Leave the process group; the trainer is of no use afterwards."""
        self.parts.strategy.close()

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on ``examples``, given alike on all ranks; returns its metrics."""
        metrics, timer, engine = Metrics(), PhaseTimer(), self.parts.engine
        position.step = self.global_step + 1
        with timer.phase("step"):
            engine.train()
            metrics.add("learning_rate", engine.learning_rate, reduce="max")
            batch = self.make_batch(examples)
            for i, micro in enumerate(batch.micro_batches):
                loss = self.loss(engine, batch, micro, metrics, prefix="")
                engine.backward(loss * self.comm.world_size, last=i == len(batch.micro_batches) - 1)
            metrics.add("grad_norm", engine.step())
        timer.count_tokens("step", batch.n_input_tokens)
        self.global_step += 1
        return metrics.reduced(self.comm) | timer.metrics(self.comm)

    @torch.no_grad()
    @phase("evaluation")
    def evaluate(self, examples: Sequence[Example] | None = None) -> dict[str, float]:
        """Metrics of ``examples``, the same on all ranks (default: all held-out ones), with the prefix ``eval_``."""
        examples = self.parts.eval_examples if examples is None else examples
        metrics, size = Metrics(), self.config.batch.train_batch_size
        self.parts.engine.train(False)
        starts = range(0, len(examples), size)
        for start in progress(starts, "evaluation", enabled=self.parts.strategy.is_main):
            batch = self.make_batch(examples[start : start + size])
            for micro in batch.micro_batches:
                self.loss(self.parts.engine, batch, micro, metrics, prefix="eval_")
        return metrics.reduced(self.comm)

    def report(self, metrics: dict[str, float]) -> None:
        """Evaluate and log when due."""
        step, run, last = self.global_step, self.config.run, self.global_step == self.total_steps
        every = self.config.supervised.eval_steps
        due = step % (len(self.sampler) if every == -1 else every) == 0 or last
        if due and len(self.parts.eval_examples) > 0:
            metrics |= self.evaluate()
        if due or step % run.logging_steps == 0:
            self.parts.trackers.log(step, metrics)

    @phase("saving")
    def save(self) -> None:
        """Write the model as a Hugging Face folder with tokenizer."""
        strategy, folder = self.parts.strategy, Path(self.config.run.save_path)
        strategy.save_pretrained(self.parts.engine.module.model, folder, self.parts.tokenizer)
        logger.info("saved the trained model to %s", folder)
