"""One optimizer step of the critic: clipped value loss."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.experience.replay_buffer import MiniBatch
from openppo.models.loss import ValueLoss, token_weights
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics
from openppo.trainer.actor_step import loss_aggregation
from openppo.types import Comm, Experience


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
