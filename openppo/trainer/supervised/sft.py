"""Supervised fine-tuning: the token-mean cross entropy of responses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from openppo.datasets import TokenExample
from openppo.models.pretrained import pad_token_id
from openppo.tracking import Metrics
from openppo.trainer.batches import TokenBatch, TokenMicroBatch, token_batch
from openppo.trainer.supervised.loop import ModelCall, SupervisedTrainer

SFT_HEADLINE = ("loss", "eval_loss", "grad_norm", "learning_rate", "time/step_s")


class SFTTrainer(SupervisedTrainer[TokenExample]):
    """Trains an ``Actor`` on token examples; the loss is the mean over the target tokens of each optimizer step."""

    def make_batch(self, examples: Sequence[TokenExample]) -> TokenBatch:
        """This rank's micro-batches."""
        pad = pad_token_id(self.components.tokenizer)
        return token_batch(examples, self.config.batch.micro_train_batch_size, pad, self.comm)

    def loss(
        self, model: ModelCall, batch: TokenBatch, micro: TokenMicroBatch, metrics: Metrics, prefix: str
    ) -> Tensor:
        """Summed negative log-likelihood of this micro-batch's targets over the targets of the step."""
        micro = micro.to(self.device)
        log_probs = model(micro.sequences, micro.attention_mask, micro.loss_mask)
        metrics.add_tensor(f"{prefix}loss", -log_probs.detach(), micro.loss_mask)
        return -log_probs.sum() / max(batch.n_tokens, 1)
