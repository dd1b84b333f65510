"""Optimizer steps of the critic: clipped value loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.experience.own_estimator import loss_aggregation
from openppo.experience.replay_buffer import MiniBatch
from openppo.models.loss import ValueLoss, token_weights
from openppo.models.padding import on_device
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics
from openppo.tracking.phase import timed
from openppo.types import Comm, Experience

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

    @timed("critic_training")
    def train(
        self,
        batch: MiniBatch,
        metrics: Metrics,
        clip: bool = True,
        complete: Complete | None = None,
    ) -> float:
        """Update the critic on one mini-batch, and return the gradient's norm before clipping.

        Without ``clip`` values may move any distance. ``complete`` adds values and returns to a mini-batch without
        them. Nothing changes when the norm is not finite.
        """
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
