"""One optimizer step of the critic: clipped value loss."""

from __future__ import annotations

import torch

from openppo.config import PPOConfig
from openppo.experience.replay_buffer import MiniBatch
from openppo.models.loss import ValueLoss
from openppo.strategy.engine import TrainingEngine
from openppo.tracking import Metrics
from openppo.types import Comm


class CriticStep:
    """Adds up the gradients of all micro-batches and steps once; normalized like the actor's loss."""

    def __init__(self, engine: TrainingEngine, config: PPOConfig, comm: Comm, device: torch.device) -> None:
        self.engine = engine
        self.comm = comm
        self.device = device
        self.value_loss = ValueLoss(clip_eps=config.value_clip, reduction="none")

    def train(self, batch: MiniBatch, metrics: Metrics) -> None:
        """Update the critic on one mini-batch."""
        metrics.add("critic_learning_rate", self.engine.learning_rate, reduce="max")
        for i, micro in enumerate(batch.micro_batches):
            micro = micro.to(self.device)
            assert micro.values is not None
            assert micro.returns is not None
            values = self.engine(micro.sequences, micro.attention_mask)
            loss = self.value_loss(values, micro.values, micro.returns, micro.action_mask)  # (B, L)
            metrics.add_tensor("value_loss", loss.detach(), micro.action_mask)
            scaled = loss.sum() / max(batch.n_tokens, 1) * self.comm.world_size
            self.engine.backward(scaled, last=i == len(batch.micro_batches) - 1)
        metrics.add("critic_grad_norm", self.engine.step())
