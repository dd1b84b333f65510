"""Optimizer steps of the critic: clipped value loss, after its values or in one pass with them."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.experience.estimators import loss_aggregation
from openppo.experience.maker import ExperienceMaker
from openppo.experience.measure import measure_staleness
from openppo.experience.replay_buffer import MiniBatch, ReplayBuffer, join_rows, mini_batches, split_rows
from openppo.models.loss import ValueLoss, token_weights
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics, progress_bar
from openppo.types import Comm, Experience, Trajectory


class CriticUpdate(Protocol):
    """What takes the optimizer steps of the critic."""

    def train(self, batch: MiniBatch, metrics: Metrics, clip: bool) -> float:
        """Update the critic on one mini-batch; the gradient's norm."""
        ...


class CriticStep:
    """Adds up the gradients of all micro-batches and steps once; normalized like the actor's loss."""

    def __init__(self, model: TrainableModel, config: TrainPPOConfig, comm: Comm, device: torch.device) -> None:
        self.model = model
        self.comm = comm
        self.device = device
        self.loss_agg = loss_aggregation(config)
        self.max_len = config.generation.generate_max_len
        self.clipped_loss = ValueLoss(clip_eps=config.loss.value_clip, reduction="none")
        self.plain_loss = ValueLoss(clip_eps=None, reduction="none")

    def train(self, batch: MiniBatch, metrics: Metrics, clip: bool = True) -> float:
        """Update the critic on one mini-batch; without ``clip`` values may move as far as they like.

        Returns the gradient's norm. Nothing changes when it is not finite.
        """
        for i, micro in enumerate(batch.micro_batches):
            micro = micro.to(self.device)
            values = self.model(micro.sequences, micro.attention_mask)
            loss = self.loss(values, micro, batch, metrics, clip)
            self.model.backward(loss * self.comm.world_size, last=i == len(batch.micro_batches) - 1)
        return self.step(metrics)

    def loss(self, values: Tensor, micro: Experience, batch: MiniBatch, metrics: Metrics, clip: bool) -> Tensor:
        """This micro-batch's part of the mean over the step, a scalar; ``values`` (B, L) are those of now."""
        assert micro.values is not None
        assert micro.returns is not None
        value_loss = self.clipped_loss if clip else self.plain_loss
        loss = value_loss(values, micro.values, micro.returns, micro.action_mask)  # (B, L)
        metrics.add_tensor("value_loss", loss.detach(), micro.action_mask)
        counts = batch.n_tokens, batch.n_sequences, self.max_len
        weights = token_weights(micro.action_mask, self.loss_agg, *counts, micro.weight)
        return (loss * weights).sum()

    def step(self, metrics: Metrics) -> float:
        """Take the optimizer step; the norm of the gradient before clipping."""
        metrics.add("critic_learning_rate", self.model.learning_rate, reduce="max")
        norm = self.model.step()
        metrics.add("critic_grad_norm", norm)
        return norm


class OnePassCritic(ExperienceMaker):
    """A maker that trains the critic while it makes experience, where the whole rollout fits in one optimizer step.

    That step's forward runs with the weights that experience is made with: its outputs are the values, which a forward
    of its own would give again. ``train`` then stands for the step that is taken already. Longer rollouts are made and
    trained on as usual. ``build_ppo_trainer`` chooses it; nothing else depends on it.
    """

    def __init__(self, critic_step: CriticStep, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.critic_step = critic_step
        self.taken: tuple[float, Metrics] | None = None
        """Norm and metrics of the rollout's first optimizer step, until ``train`` reports them."""

    @staticmethod
    def is_exact(config: TrainPPOConfig) -> bool:
        """Whether both ways give the same: no sample is dropped after values, and adapters have no dropout."""
        dropped = config.shaping.overlong_filter or config.ppo.buffer_limit > 0
        return not dropped and config.lora.lora_dropout == 0

    def make(
        self, trajectories: Sequence[Trajectory], metrics: Metrics, n_done: int = 0, version: int = 0
    ) -> list[Experience]:
        """As of ``ExperienceMaker``; signals are looked at before the critic is trained, not after."""
        if not 0 < self.count(trajectories) <= self.config.batch.train_batch_size:
            return super().make(trajectories, metrics, n_done, version)
        batch = self._rewarded(trajectories, metrics, n_done, version, values=False)
        measure_staleness(trajectories, version, metrics)
        with self.hooks.timer.phase("training"):
            rows = self._with_values([] if batch is None else list(split_rows(batch)), n_done)
        return self._completed(join_rows(rows).to(self.device) if rows else None, metrics, n_done)

    def train(self, batch: MiniBatch, metrics: Metrics, clip: bool = True) -> float:
        """One optimizer step of the critic, as of ``CriticStep``: the one that is taken already, if it is."""
        if self.taken is None:
            return self.critic_step.train(batch, metrics, clip)
        (norm, measured), self.taken = self.taken, None
        metrics.merge(measured)
        return norm

    def _with_values(self, rows: list[Experience], n_done: int) -> list[Experience]:
        """This rank's samples with values, by an optimizer step on all ranks' samples."""
        buffer, measured = ReplayBuffer(self.comm, zero_stage=self.config.deepspeed.zero_stage), Metrics()
        buffer.extend(rows)
        model, clip = self.critic_step.model, n_done >= self.config.ppo.value_pretrain_steps
        model.train()
        if self.config.ppo.offload_idle:
            model.load_adam_moments()
        batch = next(mini_batches(buffer, self.config, n_done))
        values: dict[int, Tensor] = {}
        for i, micro in enumerate(progress_bar(batch.micro_batches, "critic", enabled=self.comm.rank == 0)):
            micro = micro.to(self.device)
            predicted = model(micro.sequences, micro.attention_mask)
            known = torch.where(micro.action_mask, predicted.detach(), 0.0)
            micro = self._add_returns(micro.with_fields(values=known), n_done)
            loss = self.critic_step.loss(predicted, micro, batch, measured, clip)
            model.backward(loss * self.comm.world_size, last=i == len(batch.micro_batches) - 1)
            values.update(zip(batch.places[i], known.cpu(), strict=False))  # none for a micro-batch that fills up
        self.taken = self.critic_step.step(measured), measured
        return self._back(buffer.items, values)

    def _back(self, items: list[Experience], values: dict[int, Tensor]) -> list[Experience]:
        """``items``, which are this rank's, with the values (L,) that some rank has by place among all samples."""
        flat = torch.cat([torch.zeros(0), *values.values()])
        of_ranks = self.comm.all_gather_object((len(items), list(values), [len(v) for v in values.values()], flat))
        everyones: dict[int, Tensor] = {}
        for _, places, lengths, joined in of_ranks:
            everyones.update(zip(places, joined.split(lengths), strict=True))
        first = sum(n for n, *_ in of_ranks[: self.comm.rank])
        return [
            item.with_fields(values=everyones[place][: item.sequences.shape[1]][None])
            for place, item in enumerate(items, start=first)
        ]
