"""Optimizer steps of the critic: clipped value loss, after its values or in one pass with them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.experience.estimators import loss_aggregation
from openppo.experience.maker import ExperienceMaker
from openppo.experience.measure import measure_staleness
from openppo.experience.replay_buffer import MiniBatch, ReplayBuffer, join_rows, mini_batches
from openppo.models.loss import ValueLoss, token_weights
from openppo.models.padding import on_device
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics
from openppo.tracking.phase import timed
from openppo.types import Comm, Experience, Trajectory


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
        self.taken: tuple[float, Metrics] | None = None
        """Norm and metrics of a step that ``OnePassCritic`` has taken, until ``train`` reports it."""

    @timed("critic_training")
    def train(
        self,
        batch: MiniBatch,
        metrics: Metrics,
        clip: bool = True,
        complete: Callable[[int, Experience, Tensor], Experience] | None = None,
    ) -> float:
        """Update the critic on one mini-batch; without ``clip`` values may move as far as they like.

        ``complete`` adds old values and returns to a micro-batch, of which it gets number, experience and the values of
        now (B, L). Returns the gradient's norm before clipping. Nothing changes when it is not finite.
        """
        if self.taken is not None:
            (norm, measured) = self.taken
            self.taken = None
            metrics.merge(measured)
            return norm
        value_loss = ValueLoss(
            clip_eps=self.config.loss.value_clip if clip else None, reduction="none"
        )
        counts = batch.n_tokens, batch.n_sequences, self.config.generation.generate_max_len
        for i, micro in enumerate(batch.micro_batches):
            values = self.model(micro.sequences, micro.attention_mask, **micro.model_inputs)
            micro = micro.to(self.device, on_device)
            if complete is not None:
                micro = complete(i, micro, values.detach())
            assert micro.values is not None and micro.returns is not None
            loss = value_loss(values, micro.values, micro.returns, micro.action_mask)  # (B, L)
            metrics.add_tensor("value_loss", loss, micro.action_mask)
            weights = token_weights(
                micro.action_mask, self.loss_agg, *counts, micro.weight, micro.share
            )
            mean = (loss * weights).sum() * self.comm.world_size
            self.model.backward(mean, last=i == len(batch.micro_batches) - 1)
        metrics.add("critic_learning_rate", self.model.learning_rate, reduce="max")
        norm = self.model.step()
        metrics.add("critic_grad_norm", norm)
        return norm


class OnePassCritic(ExperienceMaker):
    """A maker that trains the critic while it makes experience, where the whole rollout fits in one optimizer step.

    That step's forward runs with the weights that experience is made with: its outputs are the values, which a forward
    of its own would give again. ``critic_step.train`` then stands for the step that is taken already. Longer rollouts
    are made and trained on as usual. ``build_ppo_trainer`` chooses it; nothing else depends on it.
    """

    def __init__(self, critic_step: CriticStep, **parts: Any) -> None:
        super().__init__(**parts)
        self.critic_step = critic_step

    @staticmethod
    def is_exact(config: TrainPPOConfig) -> bool:
        """Whether both ways give the same: no sample is dropped after values, and adapters have no dropout."""
        dropped = config.shaping.overlong_filter or config.ppo.buffer_limit > 0
        return not dropped and config.lora.lora_dropout == 0

    def make(
        self, trajectories: Sequence[Trajectory], metrics: Metrics, n_done: int = 0
    ) -> list[Experience]:
        """As of ``ExperienceMaker``; signals are looked at before the critic is trained, not after."""
        if not 0 < self.count(trajectories) <= self.config.batch.train_batch_size:
            return super().make(trajectories, metrics, n_done)
        batch = self._rewarded(trajectories, metrics, n_done, values=False)
        measure_staleness(trajectories, n_done, metrics)
        with self.hooks.timer.phase("training"):
            rows = self._with_values(batch, n_done)
        completed = join_rows(rows).to(self.device) if rows else None
        return self._completed(completed, trajectories, metrics, n_done=n_done)

    def _with_values(self, own: Experience | None, n_done: int) -> list[Experience]:
        """This rank's samples with values, by an optimizer step on all ranks' samples."""
        buffer, measured = (
            ReplayBuffer(self.comm, zero_stage=self.config.deepspeed.zero_stage),
            Metrics(),
        )
        if own is not None:
            buffer.append(own)
        model, clip = self.critic_step.model, n_done >= self.config.ppo.value_pretrain_steps
        model.train()
        if self.config.ppo.offload_idle:
            model.load_adam_moments()
        batch = next(mini_batches(buffer, self.config, n_done))
        found: dict[int, Tensor] = {}  # values (L,) by place among the samples of all ranks

        def with_returns(number: int, micro: Experience, values: Tensor) -> Experience:
            values = torch.where(micro.action_mask, values, 0.0)
            found.update(zip(batch.places[number], map(Tensor.clone, values.cpu()), strict=False))
            return self._add_returns(micro.with_fields(values=values), n_done)

        self.critic_step.taken = (
            self.critic_step.train(batch, measured, clip, complete=with_returns),
            measured,
        )
        of_ranks = self.comm.all_gather_object((len(buffer), found))
        everyones = {place: values for _, of_rank in of_ranks for place, values in of_rank.items()}
        first = sum(n for n, _ in of_ranks[: self.comm.rank])
        return [
            row.with_fields(values=everyones[place][None, : row.sequences.shape[1]])
            for place, row in enumerate(buffer.items, start=first)
        ]
