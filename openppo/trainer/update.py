"""Optimizer steps of actor and critic over a replay buffer, which complete a global step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.datasets import cyclic_batches, shuffled
from openppo.experience.replay_buffer import MiniBatch, ReplayBuffer, join_rows, mini_batches
from openppo.models.batching import MicroBatchSize
from openppo.models.pretrained import pad_token_id
from openppo.tracking import Metrics, progress_bar
from openppo.tracking.console import ProgressBar
from openppo.tracking.phase import timed
from openppo.trainer.actor_step import ActorStep, Observe
from openppo.trainer.components import PPOComponents
from openppo.trainer.critic_step import Complete
from openppo.trainer.skipped_steps import SkippedSteps
from openppo.trainer.supervised.batches import StepBatch, token_batch
from openppo.types import Experience, Sample


class Update:
    """Training of actor and critic on a filled replay buffer, which completes the global step.

    ``Update.of`` chooses between this class and ``OnePassUpdate``. Steps are counted in ``components.state``.
    ``observe`` receives the forwards that train the actor. All ranks call every method together.
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

    @staticmethod
    def of(
        config: TrainPPOConfig, components: PPOComponents, observe: Observe | None = None
    ) -> "Update":
        """Make the update that belongs to the experience maker of ``components``."""
        kind = OnePassUpdate if components.maker.values_in_training else Update
        return kind(config, components, observe)

    def __call__(
        self, buffer: ReplayBuffer, samples: Sequence[Sample], metrics: Metrics
    ) -> dict[str, float]:
        """Train for ``--max_epochs`` epochs on ``samples``, whose experience is in ``buffer``.

        Returns the metrics of the whole step, the same on all ranks. ``FloatingPointError`` after
        ``max_skipped_steps`` optimizer steps in a row were skipped.
        """
        maker = self.components.maker
        kl = maker.kl_controller
        state = self.state
        n_samples = maker.count(buffer.items)
        n_tokens = sum(int(item.attention_mask.sum()) for item in buffer.items)
        self.timer.count_tokens("step", n_tokens)

        trains_actor = state.global_step >= maker.frozen_steps
        kl_coef = kl.value if trains_actor else None
        with self.timer.phase("training"), self._training(n_samples) as bar:
            self._train(buffer, samples, metrics, kl_coef=kl_coef, bar=bar)
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

    @contextmanager
    def _training(self, n_samples: int) -> Iterator[ProgressBar]:
        """Prepare both models for the optimizer steps on ``n_samples``, and count these steps in a progress bar."""
        batch = self.config.batch
        strategy = self.components.strategy
        self.set_training(True)
        self._move_moments(to_host=False)

        n_updates = batch.max_epochs * -(-n_samples // batch.train_batch_size)
        progress = progress_bar(n_updates, "training", enabled=strategy.is_main)
        with strategy.training(), progress as bar:
            yield bar

        self._move_moments(to_host=True)
        self.set_training(False)

    def _train(
        self,
        buffer: ReplayBuffer,
        samples: Sequence[Sample],
        metrics: Metrics,
        kl_coef: float | None,
        bar: ProgressBar,
    ) -> None:
        """Take all optimizer steps of the critic, and of the actor unless ``kl_coef`` is None."""
        for number, batch in enumerate(self._mini_batches(buffer)):
            self._count_tokens(batch)
            if kl_coef is not None:
                self._step_actor(batch, metrics, kl_coef, number=number)
            if self.components.critic_step is not None:
                self._step_critic(batch, metrics, number)
            bar.update()

    def _mini_batches(self, buffer: ReplayBuffer) -> Iterator[MiniBatch]:
        """Mini-batches of the global step under way."""
        resolved = self.components.maker.resolved
        return mini_batches(buffer, self.config, self.state.global_step, resolved=resolved)

    def _count_tokens(self, batch: MiniBatch) -> None:
        """Count the tokens of micro-batches, except stand-ins, which hold none of the samples."""
        for micro, places in zip(batch.micro_batches, batch.places, strict=True):
            n_tokens = int(micro.attention_mask.sum()) if places else 0
            self.timer.count_tokens("training", n_tokens)

    def _step_actor(self, batch: MiniBatch, metrics: Metrics, kl_coef: float, number: int) -> None:
        """Take optimizer step ``number`` of the actor."""
        components = self.components
        documents = next(self._documents) if components.data.documents else None
        measured = Metrics()
        with timed("actor_training"):
            norm = self.actor_step.train(
                batch, documents, measured, kl_coef=kl_coef, on_policy=number == 0
            )

        if self._accept(norm, "actor", batch, number=number, documents=documents):
            metrics.merge(measured)
            if components.ema is not None:
                components.ema.update()
        if documents is not None:
            self.state.count_documents()

    def _step_critic(self, batch: MiniBatch, metrics: Metrics, number: int) -> None:
        """Take optimizer step ``number`` of the critic."""
        measured = Metrics()
        norm = self._train_critic(batch, measured)
        if self._accept(norm, "critic", batch, number=number):
            metrics.merge(measured)

    def _train_critic(
        self, batch: MiniBatch, measured: Metrics, complete: Complete | None = None
    ) -> float:
        """Train the critic on one mini-batch; values may move any distance while it is pretrained."""
        critic_step = self.components.critic_step
        assert critic_step is not None
        clip = self.state.global_step >= self.config.ppo.value_pretrain_steps
        return critic_step.train(batch, measured, clip, complete=complete)

    def _accept(
        self,
        norm: float,
        role: str,
        batch: MiniBatch,
        number: int,
        documents: StepBatch | None = None,
    ) -> bool:
        """Return True if optimizer step ``number`` was taken; see ``SkippedSteps.accept``."""
        place = f"global step {self.state.global_step + 1} optimizer step {number + 1}"
        samples = [micro.inputs.tensors() | micro.tensors() for micro in batch.micro_batches]
        rows: list[dict[str, Any]] = []
        if documents is not None:
            for micro in documents.micro_batches:
                rows.append(micro.inputs.tensors() | {"loss_mask": micro.loss_mask})
        return self.skipped.accept(norm, role, place, samples=samples, documents=rows)

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


class OnePassUpdate(Update):
    """Update that passes the rollout through the critic once, for its values and its first optimizer step.

    Where one optimizer step takes the whole rollout, its forwards run with the weights that the values come from. The
    maker then leaves values out, and here the critic steps first: each micro-batch gets the values of its forward, and
    from them the returns of its loss. Then the buffer gets values and advantages, and the actor steps. Rollouts with
    values are trained on as in ``Update``.
    """

    @staticmethod
    def is_exact(config: TrainPPOConfig) -> bool:
        """True if both ways agree: no sample is dropped after its values, and adapters have no dropout."""
        return not config.shaping.overlong_filter and config.lora.lora_dropout == 0

    def _train(
        self,
        buffer: ReplayBuffer,
        samples: Sequence[Sample],
        metrics: Metrics,
        kl_coef: float | None,
        bar: ProgressBar,
    ) -> None:
        """Take the critic's first step and complete the experience, then take all other steps."""
        without_values = [item for item in buffer.items if item.values is None]
        if self.components.maker.count(without_values) == 0:
            super()._train(buffer, samples, metrics, kl_coef=kl_coef, bar=bar)
            return

        measured = Metrics()
        norm, values = self._critic_pass(buffer, measured)
        self._complete(buffer, values, samples, metrics=metrics)

        for number, batch in enumerate(self._mini_batches(buffer)):
            self._count_tokens(batch)
            if kl_coef is not None:
                self._step_actor(batch, metrics, kl_coef, number=number)
            if number > 0:
                self._step_critic(batch, metrics, number)
            elif self._accept(norm, "critic", batch, number=number):
                metrics.merge(measured)
            bar.update()

    def _critic_pass(
        self, buffer: ReplayBuffer, measured: Metrics
    ) -> tuple[float, dict[int, Tensor]]:
        """Take the critic's first optimizer step; return its norm, and values (L,) by place among all ranks' rows."""
        maker = self.components.maker
        batch = next(self._mini_batches(buffer))
        values_by_place: dict[int, Tensor] = {}

        def complete(number: int, micro: Experience, values: Tensor) -> Experience:
            values = torch.where(micro.action_mask, values, 0.0)
            rows = map(Tensor.clone, values.cpu())
            values_by_place.update(zip(batch.places[number], rows, strict=False))
            return maker.add_returns(micro.with_fields(values=values), self.state.global_step)

        norm = self._train_critic(batch, measured, complete)
        return norm, values_by_place

    def _complete(
        self,
        buffer: ReplayBuffer,
        values_by_place: Mapping[int, Tensor],
        samples: Sequence[Sample],
        metrics: Metrics,
    ) -> None:
        """Add values, advantages and returns to the buffer, and measure them."""
        rows = []
        for row, values in zip(buffer.items, buffer.own_entries(values_by_place), strict=True):
            rows.append(row.with_fields(values=values[None, : row.sequences.shape[1]]))

        if rows:
            batch = join_rows(rows).to(self.components.strategy.device)
            n_done = self.state.global_step
            rows = [self.components.maker.complete(batch, samples, metrics, n_done=n_done)]
        buffer.fill(rows)
