"""One optimizer step of the critic: clipped value loss."""

from __future__ import annotations

from collections.abc import Callable

import torch

from openppo.config import TrainPPOConfig
from openppo.experience.replay_buffer import MiniBatch
from openppo.models.loss import ValueLoss, token_weights
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics
from openppo.trainer.steps.actor_step import loss_aggregation
from openppo.types import Comm, Experience, NeverStops, StopCheck

Complete = Callable[[Experience], Experience]
"""Adds advantages and returns to a batch with values."""


class CriticStep:
    """Adds up the gradients of all micro-batches and steps once; normalized like the actor's loss."""

    def __init__(
        self,
        engine: TrainableModel,
        config: TrainPPOConfig,
        comm: Comm,
        device: torch.device,
        stop: StopCheck | None = None,
    ) -> None:
        self.engine = engine
        self.comm = comm
        self.device = device
        self.stop = stop or NeverStops()
        self.loss_agg = loss_aggregation(config)
        self.max_len = config.generation.generate_max_len
        self.clipped_loss = ValueLoss(clip_eps=config.loss.value_clip, reduction="none")
        self.plain_loss = ValueLoss(clip_eps=None, reduction="none")

    def train(self, batch: MiniBatch, metrics: Metrics, clip: bool = True, complete: Complete | None = None) -> float:
        """Update the critic on one mini-batch; without ``clip`` values may move as far as they like.

        Samples without values get those of this forward, and their returns from ``complete``; ``batch`` then holds
        both. Returns the gradient's norm. Errors as in ``ActorStep.train``.
        """
        metrics.add("critic_learning_rate", self.engine.learning_rate, reduce="max")
        value_loss = self.clipped_loss if clip else self.plain_loss
        for i, micro in enumerate(batch.micro_batches):
            self.stop()
            micro = micro.to(self.device)
            values = self.engine(micro.sequences, micro.attention_mask)
            if micro.values is None:
                assert complete is not None, "values are missing"
                old_values = torch.where(micro.action_mask, values.detach(), 0.0)
                batch.micro_batches[i] = micro = complete(micro.with_fields(values=old_values))
            assert micro.values is not None
            assert micro.returns is not None
            loss = value_loss(values, micro.values, micro.returns, micro.action_mask)  # (B, L)
            metrics.add_tensor("value_loss", loss.detach(), micro.action_mask)
            counts = batch.n_tokens, batch.n_sequences, self.max_len
            weights = token_weights(micro.action_mask, self.loss_agg, *counts, micro.weight)
            scaled = (loss * weights).sum() * self.comm.world_size
            self.engine.backward(scaled, last=i == len(batch.micro_batches) - 1)
        norm = self.engine.step()
        # Once over all ranks: a step that goes on with another number of ranks keeps its mean.
        metrics.add("critic_grad_norm", norm, weight=1 / self.comm.world_size)
        return norm
