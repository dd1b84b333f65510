"""Reward-model training on preference pairs."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openppo.config import TrainRMConfig
from openppo.datasets import PreferenceExample
from openppo.models.loss import LogExpLoss, PairWiseLoss
from openppo.models.padding import pad_right
from openppo.models.pretrained import pad_token_id
from openppo.tracking import Metrics
from openppo.trainer.batches import equal_micro_batches
from openppo.trainer.supervised.loop import ModelCall, SupervisedComponents, SupervisedTrainer
from openppo.types import NeverStops

logger = logging.getLogger("openppo")

RM_HEADLINE = ("loss", "accuracy", "eval_loss", "eval_accuracy", "grad_norm", "learning_rate", "time/step_s")
_MOST_PAIRS_FOR_STATISTICS = 1024
_SMALLEST_STD = 1e-8
_IDLE = PreferenceExample(chosen_ids=[0, 0], rejected_ids=[0, 0], margin=0.0)


@dataclass(frozen=True)
class PairBatch:
    """Micro-batches of pairs, equally many on all ranks; empty where a rank has no pairs left."""

    micro_batches: list[list[PreferenceExample]]
    n_pairs: int

    @property
    def n_input_tokens(self) -> int:
        """Real tokens that this rank feeds to the model."""
        pairs = [pair for micro in self.micro_batches for pair in micro]
        return sum(len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs)


class RewardModelTrainer(SupervisedTrainer[PreferenceExample]):
    """Trains a ``ScalarHeadModel`` of role reward; the loss is the mean over the pairs of each optimizer step."""

    def __init__(self, config: TrainRMConfig, parts: SupervisedComponents[PreferenceExample]) -> None:
        super().__init__(config, parts)
        self.uses_margin = config.data.margin_key is not None
        self.pair_loss = PairWiseLoss() if config.data.loss == "sigmoid" else LogExpLoss()

    def make_batch(self, examples: Sequence[PreferenceExample]) -> PairBatch:
        """This rank's micro-batches."""
        size = self.config.batch.micro_train_batch_size
        return PairBatch(equal_micro_batches(examples, size, self.comm), len(examples))

    def loss(
        self, model: ModelCall, batch: PairBatch, micro: list[PreferenceExample], metrics: Metrics, prefix: str
    ) -> Tensor:
        """Summed loss of this micro-batch's pairs over the pairs of the step; both sides in one forward."""
        pairs = micro or [_IDLE]
        rows = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
        sequences, attention_mask = pad_right(rows, pad_token_id(self.components.tokenizer))
        scores = model(sequences.to(self.device), attention_mask.to(self.device))
        chosen, rejected = scores.chunk(2)  # (B,) each
        margin = torch.tensor([pair.margin for pair in pairs], device=self.device)
        loss = self.pair_loss(chosen, rejected, margin) if self.uses_margin else self.pair_loss(chosen, rejected)
        if not micro:
            return 0.0 * loss  # runs along with ranks that have more pairs
        metrics.add(f"{prefix}loss", loss.detach(), weight=len(pairs))
        metrics.add_tensor(f"{prefix}accuracy", (chosen > rejected).float().detach())
        metrics.add_tensor(f"{prefix}chosen_reward", chosen.detach())
        metrics.add_tensor(f"{prefix}rejected_reward", rejected.detach())
        metrics.add_tensor(f"{prefix}reward_mean", scores)
        metrics.add_tensor(f"{prefix}reward_std", scores, reduce="std")
        return loss * len(pairs) / batch.n_pairs

    def write_model(self, folder: Path) -> None:
        """Write the model; its config gets ``mean`` and ``std`` of its scores, which ``--normalize_reward`` reads.

        They are those of the held-out pairs, both sides, or without such of up to 1024 training pairs. ``std`` is the
        unbiased one, as in OpenRLHF.
        """
        pairs = self.components.eval_examples or spread(self.components.train_examples, _MOST_PAIRS_FOR_STATISTICS)
        metrics = self._measure(pairs, NeverStops())  # a checkpoint upon a signal is written whole
        n = 2 * len(pairs)
        model: Any = self.components.engine.module.model
        config = model.config
        config.mean = metrics["eval_reward_mean"]
        config.std = max(metrics["eval_reward_std"] * math.sqrt(n / (n - 1)), _SMALLEST_STD)
        logger.info("scores of %d texts: mean %.4g, std %.4g; stored in the model's config", n, config.mean, config.std)
        super().write_model(folder)


def spread(pairs: Sequence[PreferenceExample], most: int) -> Sequence[PreferenceExample]:
    """At most ``most`` pairs at equal distances, since neighbours may come from one source."""
    return pairs[:: -(-len(pairs) // most)]
