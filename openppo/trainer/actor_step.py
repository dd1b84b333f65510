"""One optimizer step of the actor: policy loss, KL loss, entropy bonus and PTX loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from openppo.config import LossConfig, TrainPPOConfig
from openppo.experience.measure import measure_masked, measure_mismatch
from openppo.experience.own_estimator import loss_aggregation
from openppo.experience.replay_buffer import MiniBatch
from openppo.models.correction import correction_range, rollout_correction
from openppo.models.log_probs import compute_approx_kl, log_ratio
from openppo.models.loss import MaskingLoss, token_weights
from openppo.models.own_loss import FunctionLoss, policy_loss_of
from openppo.models.padding import on_device
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics
from openppo.trainer.supervised.batches import StepBatch
from openppo.types import Comm, Experience


class RolloutCorrection:
    """Weights of token losses for the difference between the sampling and the training policy."""

    def __init__(self, options: LossConfig) -> None:
        self.options = options.correction

    def __call__(self, micro: Experience, metrics: Metrics) -> Tensor | float:
        """Return and measure the weights (B, L); 1 without ``--rollout_correction``."""
        if self.options.method == "none":
            return 1.0

        mask = micro.action_mask
        assert micro.log_probs is not None
        weights = rollout_correction(
            micro.log_probs,
            micro.rollout_log_probs,
            mask,
            method=self.options.method,
            low=self.options.low,
            high=self.options.high,
            level=self.options.level,
            veto=self.options.veto,
        )
        metrics.add_tensor("rollout_weight", weights, mask)
        metrics.add_tensor("rollout_masked_fraction", (weights == 0).float(), mask)
        if self.options.method == "tis":
            return weights

        ratio_range = correction_range(
            micro.log_probs,
            micro.rollout_log_probs,
            mask,
            method=self.options.method,
            low=self.options.low,
            high=self.options.high,
            level=self.options.level,
        )
        measure_masked(ratio_range, mask, metrics)
        return weights


Observe = Callable[[Experience, Tensor, Tensor | None], None]
"""Receives each micro-batch with the log-probs and entropy (B, L) of its forward."""


class ActorStep:
    """Adds up the gradients of all micro-batches and steps once.

    Losses are means over the whole optimizer step: each micro-batch contributes its sum divided by the number of
    tokens (or sequences) of all micro-batches and ranks, times the ranks, since DeepSpeed averages over them.
    """

    def __init__(
        self,
        model: TrainableModel,
        config: TrainPPOConfig,
        comm: Comm,
        device: torch.device,
        observe: Observe | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.comm = comm
        self.device = device
        self.observe = observe
        self.loss_agg = loss_aggregation(config)
        self.policy_loss = policy_loss_of(config.loss)
        self.correction = RolloutCorrection(config.loss)

    def train(
        self,
        batch: MiniBatch,
        ptx_batch: StepBatch | None,
        metrics: Metrics,
        kl_coef: float = 0.0,
        on_policy: bool = False,
    ) -> float:
        """Update the actor on one mini-batch, and return the gradient's norm.

        ``ptx_batch`` adds the loss of documents. ``kl_coef`` is the coefficient of the KL loss, if there is one.
        ``on_policy``: no update has happened since sampling. If old log-probs are missing, this forward's are used, in
        later updates the engine's; those that were not recomputed are compared with the engine's. Nothing changes when
        the norm is not finite.
        """
        metrics.add("actor_learning_rate", self.model.learning_rate, reduce="max")
        last = len(batch.micro_batches) - 1
        for i, micro in enumerate(batch.micro_batches):
            loss = self._loss(micro, batch, metrics, kl_coef=kl_coef, on_policy=on_policy)
            self.model.backward(loss * self.comm.world_size, last=ptx_batch is None and i == last)
        if ptx_batch is not None:
            self._accumulate_ptx(ptx_batch, metrics)

        norm = self.model.step()
        metrics.add("actor_grad_norm", norm)
        return norm

    def _loss(
        self, micro: Experience, batch: MiniBatch, metrics: Metrics, kl_coef: float, on_policy: bool
    ) -> Tensor:
        """This micro-batch's part of the mean over the step, a scalar."""
        entropy_coef = self.config.loss.entropy_coef
        outputs = self.model(micro.inputs, micro.action_mask, return_entropy=entropy_coef > 0)
        log_probs, entropy = outputs if entropy_coef > 0 else (outputs, None)
        micro = micro.to(self.device, on_device)
        mask = micro.action_mask
        if self.observe is not None:
            self.observe(micro, log_probs, entropy)

        if micro.log_probs is None:
            old_log_probs = log_probs.detach() if on_policy else micro.rollout_log_probs
            micro = micro.with_fields(log_probs=old_log_probs)
        assert micro.log_probs is not None and micro.advantages is not None
        loss = self._policy_loss(log_probs, micro, metrics)  # (B, L)
        self._measure(log_probs, micro, metrics)
        if on_policy and micro.entropy is None:
            measure_mismatch(
                log_probs, micro.rollout_log_probs, mask, metrics=metrics, behind=micro.staleness
            )

        loss = loss * self.correction(micro, metrics)
        if self.config.kl.use_kl_loss:
            assert micro.ref_log_probs is not None
            kl = compute_approx_kl(
                log_probs, micro.ref_log_probs, mask, kl_estimator=self.config.kl.kl_estimator
            )
            metrics.add_tensor("kl_loss", kl.detach(), mask)
            loss = loss + kl_coef * kl
        if entropy is not None:
            loss = loss - entropy_coef * entropy

        weights = token_weights(
            mask,
            self.loss_agg,
            batch.n_tokens,
            n_sequences=batch.n_sequences,
            max_len=self.config.generation.generate_max_len,
            weight=micro.weight,
            fraction=micro.fraction,
        )
        return (loss * weights).sum()

    def _policy_loss(self, log_probs: Tensor, micro: Experience, metrics: Metrics) -> Tensor:
        """Return and measure the policy loss (B, L), with its clipping, or what a user's function logs."""
        mask = micro.action_mask
        result = self.policy_loss(
            log_probs, micro.log_probs, micro.advantages, mask, micro.rollout_log_probs
        )
        if isinstance(self.policy_loss, FunctionLoss):
            loss, logged = result
        else:
            loss = result
            clipped = self.policy_loss.clipped(log_probs.detach(), micro.log_probs, mask)
            logged = {"clip_fraction": clipped}  # bool (B, L)

        metrics.add_tensor("policy_loss", loss.detach(), mask)
        for name, values in logged.items():
            metrics.add_tensor(name, values.float(), mask)
        return loss

    def _measure(self, log_probs: Tensor, micro: Experience, metrics: Metrics) -> None:
        """Measure the masking of the policy loss, and how far the policy has moved."""
        assert micro.log_probs is not None
        mask = micro.action_mask
        log_probs = log_probs.detach()
        if isinstance(self.policy_loss, MaskingLoss):
            ratio_range = self.policy_loss.masking(
                log_probs, micro.log_probs, micro.rollout_log_probs, action_mask=mask
            )
            measure_masked(ratio_range, mask, metrics)

        # near 0, where float32 would be all rounding
        change = log_ratio(log_probs, micro.log_probs, mask).double()
        metrics.add_tensor("ratio_max", change.exp(), mask, reduce="max")
        metrics.add_tensor("approx_kl", change.expm1() - change, mask)  # k3

    def _accumulate_ptx(self, batch: StepBatch, metrics: Metrics) -> None:
        """Add the gradients of the language-model loss on documents."""
        last = len(batch.micro_batches) - 1
        for i, micro in enumerate(batch.micro_batches):
            # a language-model loss has no sampling temperature, and is over ids that are never sampled too
            log_probs = self.model(
                micro.inputs, micro.loss_mask, temperature=1.0, whole_vocabulary=True
            )
            metrics.add_tensor("ptx_loss", -log_probs, on_device(micro.loss_mask, self.device))
            loss = -log_probs.sum() / max(batch.n_targets, 1)
            weighted = self.config.ppo.ptx_coef * loss * self.comm.world_size
            self.model.backward(weighted, last=i == last)
