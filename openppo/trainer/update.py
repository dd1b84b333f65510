"""Optimizer steps of actor and critic over a replay buffer, which complete a global step."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from openppo import logger
from openppo.config import RunConfig, TrainPPOConfig
from openppo.datasets import cyclic_batches, shuffled
from openppo.experience.replay_buffer import MiniBatch, ReplayBuffer, mini_batches
from openppo.models.batching import MicroBatchSize
from openppo.models.pretrained import pad_token_id
from openppo.tracking import Metrics, progress_bar
from openppo.tracking.phase import timed
from openppo.trainer.actor_step import ActorStep, Observe
from openppo.trainer.components import PPOComponents
from openppo.trainer.supervised.batches import StepBatch, token_batch
from openppo.types import Comm
from openppo.weight_files import save_tensors


class SkippedSteps:
    """Counter of skipped optimizer steps, which keeps their batches and ends a run after too many in a row.

    Batches are written to ``<save_path>/skipped``. All ranks see the same norms, since a gradient that is not finite on
    one rank is not finite on any.
    """

    def __init__(self, run: RunConfig, comm: Comm) -> None:
        self.run = run
        self.comm = comm
        self.total = 0
        self.in_a_row: dict[str, int] = {}

    def accept(self, norm: float, role: str, place: str, **batch: list[dict[str, Any]]) -> bool:
        """Return True if the gradient ``norm`` is finite, which means that the step was taken.

        Otherwise write this rank's ``batch``. ``place`` names the step in messages. ``FloatingPointError`` once
        ``max_skipped_steps`` steps in a row were skipped.
        """
        if math.isfinite(norm):
            self.in_a_row[role] = 0
            return True

        self.total += 1
        self.in_a_row[role] = self.in_a_row.get(role, 0) + 1
        name = f"{place.replace(' ', '_')}_{role}_rank{self.comm.rank}.safetensors"
        file = Path(self.run.save_path, "skipped", name)
        _write(batch, file)

        problem = f"a loss or the gradient of the {role} was not finite in {place}"
        if self.in_a_row[role] >= self.run.max_skipped_steps:
            raise FloatingPointError(
                f"{problem}, and {self.in_a_row[role]} optimizer steps in a row were skipped (max_skipped_steps). "
                f"Lower the learning rate, and look at the batches in {file.parent}. "
                "Skipped steps do not change the weights."
            )
        if self.comm.rank == 0:
            logger.warning(
                "%s: this optimizer step is skipped on all ranks; its batch is in %s", problem, file
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the counts for ``load_state_dict``, as JSON."""
        return {"total": self.total, "in_a_row": dict(self.in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of an earlier session."""
        self.total = state["total"]
        self.in_a_row = dict(state["in_a_row"])


class Update:
    """Training of actor and critic on a filled replay buffer, which completes the global step.

    Steps are counted in ``components.state``. ``observe`` receives the forwards that train the actor. All ranks call
    every method together.
    """

    def __init__(
        self, config: TrainPPOConfig, components: PPOComponents, observe: Observe | None = None
    ) -> None:
        self.config = config
        self.components = components
        self.state = components.state
        self.timer = components.maker.hooks.timer
        self.comm = components.strategy.comm
        self.actor_step = ActorStep(
            components.actor,
            config,
            self.comm,
            device=components.strategy.device,
            observe=observe,
        )
        self.skipped = SkippedSteps(config.run, self.comm)
        self.models = [components.actor]
        if components.critic is not None:
            self.models.append(components.critic)
        self._documents = self._document_batches()
        self.set_training(False)

    def __call__(self, buffer: ReplayBuffer, metrics: Metrics) -> dict[str, float]:
        """Train for ``--max_epochs`` epochs, and return the metrics of the whole step, the same on all ranks.

        ``FloatingPointError`` after ``max_skipped_steps`` optimizer steps in a row were skipped.
        """
        maker = self.components.maker
        kl = maker.kl_controller
        state = self.state
        n_samples = maker.count(buffer.items)
        n_tokens = sum(int(item.attention_mask.sum()) for item in buffer.items)
        self.timer.count_tokens("step", n_tokens)

        trains_actor = state.global_step >= maker.frozen_steps
        with self.timer.phase("training"):
            self._train(buffer, n_samples, metrics, kl_coef=kl.value if trains_actor else None)
        n_tokens_of_all = int(self.comm.all_reduce(torch.tensor(n_tokens)))
        state.count_step(n_samples, n_tokens_of_all)

        reduced = metrics.reduced(self.comm)
        variance = reduced.get("returns_std", 0.0) ** 2
        if variance > 0:  # 1 for a perfect critic, 0 for one that predicts only the mean
            reduced["explained_variance"] = 1 - reduced["value_error_std"] ** 2 / variance
        reduced["skipped_steps"] = float(self.skipped.total)
        reduced["consumed_samples"] = float(state.consumed_samples)
        reduced["consumed_tokens"] = float(state.consumed_tokens)

        if "kl" in reduced:
            reduced["kl_coef"] = kl.value
            if trains_actor:  # while the actor is frozen, the KL is 0 for any coefficient
                kl.update(reduced["kl"], n_samples)
        return reduced

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the counts of ``components.state``; call it after the models are restored."""
        self.skipped.load_state_dict(state)
        self._move_moments(to_host=True)
        self._documents = self._document_batches()

    def set_training(self, mode: bool) -> None:
        """Switch actor and critic between training and evaluation mode."""
        for model in self.models:
            model.train(mode)

    def _train(
        self, buffer: ReplayBuffer, n_samples: int, metrics: Metrics, kl_coef: float | None
    ) -> None:
        """Take all optimizer steps of the critic, and of the actor unless ``kl_coef`` is None."""
        batch = self.config.batch
        strategy = self.components.strategy
        self.set_training(True)
        self._move_moments(to_host=False)

        n_updates = batch.max_epochs * -(-n_samples // batch.train_batch_size)
        progress = progress_bar(n_updates, "training", enabled=strategy.is_main)
        with strategy.training(), progress as bar:
            resolved = self.components.maker.resolved
            batches = mini_batches(buffer, self.config, self.state.global_step, resolved=resolved)
            for number, mini_batch in enumerate(batches):
                self._count_tokens(mini_batch)
                self._step(mini_batch, metrics, kl_coef, number=number)
                bar.update()

        self._move_moments(to_host=True)
        self.set_training(False)

    def _count_tokens(self, batch: MiniBatch) -> None:
        """Count the tokens of micro-batches, except stand-ins, which hold none of the samples."""
        for micro, places in zip(batch.micro_batches, batch.places, strict=True):
            n_tokens = int(micro.attention_mask.sum()) if places else 0
            self.timer.count_tokens("training", n_tokens)

    def _step(self, batch: MiniBatch, metrics: Metrics, kl_coef: float | None, number: int) -> None:
        """Take optimizer step ``number`` of the critic, and of the actor unless ``kl_coef`` is None."""
        samples = [micro.inputs.tensors() | micro.tensors() for micro in batch.micro_batches]
        place = f"global step {self.state.global_step + 1} optimizer step {number + 1}"
        if kl_coef is not None:
            self._step_actor(batch, metrics, kl_coef, number=number, samples=samples, place=place)
        self._step_critic(batch, metrics, samples, place=place)

    def _step_actor(
        self,
        batch: MiniBatch,
        metrics: Metrics,
        kl_coef: float,
        number: int,
        samples: list[dict[str, Any]],
        place: str,
    ) -> None:
        components = self.components
        documents = next(self._documents) if components.data.documents else None
        measured = Metrics()
        with timed("actor_training"):
            norm = self.actor_step.train(
                batch, documents, measured, kl_coef=kl_coef, on_policy=number == 0
            )

        rows: list[dict[str, Any]] = []
        if documents is not None:
            for micro in documents.micro_batches:
                rows.append(micro.inputs.tensors() | {"loss_mask": micro.loss_mask})

        if self.skipped.accept(norm, "actor", place, samples=samples, documents=rows):
            metrics.merge(measured)
            if components.ema is not None:
                components.ema.update()
        if documents is not None:
            self.state.count_documents()

    def _step_critic(
        self, batch: MiniBatch, metrics: Metrics, samples: list[dict[str, Any]], place: str
    ) -> None:
        critic_step = self.components.critic_step
        if critic_step is None:
            return
        measured = Metrics()
        clip = self.state.global_step >= self.config.ppo.value_pretrain_steps
        norm = critic_step.train(batch, measured, clip)
        if self.skipped.accept(norm, "critic", place, samples=samples):
            metrics.merge(measured)

    def _move_moments(self, to_host: bool) -> None:
        """Move Adam's moments to the host or back to the device, with ``--offload_idle``."""
        if not self.config.ppo.offload_idle:
            return
        for model in self.models:
            if to_host:
                model.offload_adam_moments()
            else:
                model.load_adam_moments()

    def _document_batches(self) -> Iterator[StepBatch]:
        """Yield for each optimizer step as many documents as it has samples, in endless reshuffled passes."""
        components = self.components
        documents = components.data.documents
        pad = pad_token_id(components.tokenizer)
        pack_to = components.pack_documents_to
        longest = max((len(document.token_ids) for document in documents), default=1)
        tokens = components.maker.resolved.micro_train_tokens
        limit = MicroBatchSize(self.config.batch.micro_rows, tokens)
        rows = limit.rows_of(pack_to or longest)
        batches = cyclic_batches(
            len(documents),
            self.config.batch.train_batch_size,
            shuffled(len(documents), self.config.deepspeed.seed),
            start=self.state.document_batches,
        )
        for indices in batches:
            chosen = [documents[i] for i in indices]
            yield token_batch(chosen, rows, pad, comm=self.comm, pack_to=pack_to)


def _write(batch: Mapping[str, list[dict[str, Any]]], file: Path) -> None:
    """Save tensors under "kind/number of the micro-batch/field"; only log a failure."""
    tensors: dict[str, Tensor] = {}
    for kind, micro_batches in batch.items():
        for number, micro in enumerate(micro_batches):
            for name, value in micro.items():
                if value is not None:
                    tensor = torch.as_tensor(value).detach().cpu().contiguous()
                    tensors[f"{kind}/{number}/{name}"] = tensor
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, file)
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be written (%s)", file, error)
