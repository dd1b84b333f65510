"""Optimizer steps of the critic: clipped value loss, also in one pass with its values."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.experience.maker import ExperienceMaker
from openppo.experience.measure import measure_staleness
from openppo.experience.own_estimator import loss_aggregation
from openppo.experience.replay_buffer import MiniBatch, ReplayBuffer, join_rows, mini_batches
from openppo.models.loss import ValueLoss, token_weights
from openppo.models.padding import on_device
from openppo.rollout.rollout import unscored
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics
from openppo.tracking.phase import timed
from openppo.types import Comm, Experience, Sample, segments_of

Complete = Callable[[int, Experience, Tensor], Experience]
"""Adds old values and returns to a micro-batch, from its number, itself and its current values (B, L)."""


class CriticStep:
    """Adds up the gradients of all micro-batches and steps once; normalized like the actor's loss."""

    def __init__(
        self, model: TrainableModel, config: TrainPPOConfig, comm: Comm, device: torch.device
    ) -> None:
        self.model = model
        self.config = config
        self.comm = comm
        self.device = device
        self.loss_agg = loss_aggregation(config)
        self._ahead: tuple[float, Metrics] | None = None
        """Norm and metrics of a step that was taken ahead, until ``train`` reports it."""

    def train(self, batch: MiniBatch, metrics: Metrics, clip: bool = True) -> float:
        """Update the critic on one mini-batch, and return the gradient's norm before clipping.

        Without ``clip`` values may move any distance. Nothing changes when the norm is not finite. A step that
        ``train_ahead`` has taken is only reported.
        """
        if self._ahead is None:
            return self._train(batch, metrics, clip)
        norm, measured = self._ahead
        self._ahead = None
        metrics.merge(measured)
        return norm

    def train_ahead(self, batch: MiniBatch, clip: bool, complete: Complete) -> None:
        """Update the critic on a mini-batch without values and returns, which ``complete`` adds.

        The next call of ``train`` reports the step.
        """
        metrics = Metrics()
        norm = self._train(batch, metrics, clip, complete=complete)
        self._ahead = norm, metrics

    @timed("critic_training")
    def _train(
        self, batch: MiniBatch, metrics: Metrics, clip: bool, complete: Complete | None = None
    ) -> float:
        value_loss = ValueLoss(
            clip_eps=self.config.loss.value_clip if clip else None, reduction="none"
        )
        last = len(batch.micro_batches) - 1
        for i, micro in enumerate(batch.micro_batches):
            values = self.model(micro.inputs)
            micro = micro.to(self.device, on_device)
            if complete is not None:
                micro = complete(i, micro, values.detach())
            assert micro.values is not None and micro.returns is not None
            loss = value_loss(values, micro.values, micro.returns, micro.action_mask)  # (B, L)
            metrics.add_tensor("value_loss", loss, micro.action_mask)
            weights = token_weights(
                micro.action_mask,
                self.loss_agg,
                batch.n_tokens,
                n_sequences=batch.n_sequences,
                max_len=self.config.generation.generate_max_len,
                weight=micro.weight,
                fraction=micro.fraction,
            )
            mean = (loss * weights).sum() * self.comm.world_size
            self.model.backward(mean, last=i == last)

        metrics.add("critic_learning_rate", self.model.learning_rate, reduce="max")
        norm = self.model.step()
        metrics.add("critic_grad_norm", norm)
        return norm


class OnePassCritic(ExperienceMaker):
    """Maker that trains the critic while it makes experience.

    It does so where one optimizer step takes the whole rollout. The step's forward runs with the weights that
    experience is made with, so its outputs are the values, and no other forward is needed. ``critic_step.train`` then
    only reports the step. Longer rollouts are made and trained on as usual. ``build_ppo_trainer`` chooses it; nothing
    else depends on it.
    """

    def __init__(self, critic_step: CriticStep, **parts: Any) -> None:
        super().__init__(**parts)
        self.critic_step = critic_step

    @staticmethod
    def is_exact(config: TrainPPOConfig) -> bool:
        """True if both ways agree: no sample is dropped after its values, and adapters have no dropout."""
        return not config.shaping.overlong_filter and config.lora.lora_dropout == 0

    def make(
        self, samples: Sequence[Sample], metrics: Metrics, n_done: int = 0
    ) -> list[Experience]:
        """Make experience as ``ExperienceMaker`` does; signals are polled before the critic is trained, not after."""
        n_rows = self.count(segments_of(unscored(samples)))
        if n_rows == 0 or n_rows > self.config.batch.train_batch_size:
            return super().make(samples, metrics, n_done)

        batch = self._rewarded(samples, metrics, n_done, values=False)
        measure_staleness(samples, n_done, metrics)
        with self.hooks.timer.phase("training"):
            rows = self._with_values(batch, n_done)
        completed = join_rows(rows).to(self.device) if rows else None
        return self._completed(completed, samples, metrics, n_done=n_done)

    def _with_values(self, rows: Experience | None, n_done: int) -> list[Experience]:
        """This rank's ``rows`` with values, by an optimizer step on all ranks' rows."""
        buffer = ReplayBuffer(self.comm, zero_stage=self.config.deepspeed.zero_stage)
        if rows is not None:
            buffer.append(rows)
        batch = next(mini_batches(buffer, self.config, n_done, resolved=self.resolved))
        # values (L,) by place among the samples of all ranks
        values_by_place: dict[int, Tensor] = {}

        def with_returns(number: int, micro: Experience, values: Tensor) -> Experience:
            values = torch.where(micro.action_mask, values, 0.0)
            rows = map(Tensor.clone, values.cpu())
            values_by_place.update(zip(batch.places[number], rows, strict=False))
            return self._add_returns(micro.with_fields(values=values), n_done)

        model = self.critic_step.model
        model.train()
        if self.config.ppo.offload_idle:
            model.load_adam_moments()
        clip = n_done >= self.config.ppo.value_pretrain_steps
        self.critic_step.train_ahead(batch, clip, complete=with_returns)

        all_values: dict[int, Tensor] = {}
        counts = []
        for n_samples, values in self.comm.all_gather_object((len(buffer), values_by_place)):
            counts.append(n_samples)
            all_values |= values
        first = sum(counts[: self.comm.rank])
        return [
            row.with_fields(values=all_values[place][None, : row.sequences.shape[1]])
            for place, row in enumerate(buffer.items, start=first)
        ]
