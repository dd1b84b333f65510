"""One optimizer step of the actor: clipped policy loss, and the PTX loss in the same gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from openppo.config import PPOConfig
from openppo.experience.replay_buffer import MiniBatch
from openppo.models.loss import PolicyLoss, policy_ratio
from openppo.strategy.engine import TrainingEngine
from openppo.tracking import Metrics
from openppo.trainer.token_batches import TokenBatch
from openppo.types import Comm, Experience


class ActorStep:
    """Adds up the gradients of all micro-batches and steps once.

    Losses are token means over the whole optimizer step: each micro-batch contributes its sum divided by the
    number of tokens of all micro-batches and ranks (times the ranks, since DeepSpeed averages over them).
    """

    def __init__(self, engine: TrainingEngine, config: PPOConfig, comm: Comm, device: torch.device) -> None:
        self.engine = engine
        self.comm = comm
        self.device = device
        self.clip_eps = config.eps_clip
        self.ptx_coef = config.ptx_coef
        self.policy_loss = PolicyLoss(clip_eps=config.eps_clip, reduction="none")

    def train(self, batch: MiniBatch, ptx_batch: TokenBatch | None, metrics: Metrics) -> None:
        """Update the actor on one mini-batch, and on a batch of documents if given."""
        metrics.add("actor_learning_rate", self.engine.learning_rate, reduce="max")
        last = len(batch.micro_batches) - 1
        for i, micro in enumerate(batch.micro_batches):
            loss = self._policy_loss(micro.to(self.device), batch.n_tokens, metrics)
            self.engine.backward(loss * self.comm.world_size, last=ptx_batch is None and i == last)
        if ptx_batch is not None:
            self._accumulate_ptx(ptx_batch, metrics)
        metrics.add("actor_grad_norm", self.engine.step())

    def _policy_loss(self, micro: Experience, n_tokens: int, metrics: Metrics) -> Tensor:
        assert micro.log_probs is not None
        assert micro.advantages is not None
        mask = micro.action_mask
        log_probs = self.engine(micro.sequences, micro.attention_mask, mask)
        loss = self.policy_loss(log_probs, micro.log_probs, micro.advantages, mask)  # (B, L)
        ratio = policy_ratio(log_probs.detach(), micro.log_probs, mask)
        metrics.add_tensor("policy_loss", loss.detach(), mask)
        metrics.add_tensor("clip_fraction", ((ratio - 1).abs() > self.clip_eps).float(), mask)
        metrics.add_tensor("ratio_max", ratio, mask, reduce="max")
        return loss.sum() / max(n_tokens, 1)

    def _accumulate_ptx(self, batch: TokenBatch, metrics: Metrics) -> None:
        last = len(batch.micro_batches) - 1
        for i, (sequences, attention_mask, loss_mask) in enumerate(batch.to(self.device)):
            # A language-model loss knows no sampling temperature.
            log_probs = self.engine(sequences, attention_mask, loss_mask, temperature=1.0)
            metrics.add_tensor("ptx_loss", -log_probs.detach(), loss_mask)
            loss = -log_probs.sum() / max(batch.n_tokens, 1)
            self.engine.backward(self.ptx_coef * loss * self.comm.world_size, last=i == last)
