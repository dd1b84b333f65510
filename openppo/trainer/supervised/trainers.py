"""The three supervised trainers: fine-tuning, reward models, process reward models."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openppo import logger
from openppo.config import TrainPRMConfig, TrainRMConfig
from openppo.datasets import PreferenceExample, ProcessExample, TokenExample, single_token_id
from openppo.models.padding import on_device, pad_right
from openppo.models.pretrained import pad_token_id
from openppo.models.supervised_loss import IGNORE_INDEX, LogExpLoss, PairWiseLoss, PRMLoss
from openppo.tracking import Metrics
from openppo.trainer.supervised.batches import StepBatch, TokenMicroBatch, token_batch
from openppo.trainer.supervised.loop import SupervisedComponents, SupervisedTrainer
from openppo.types import StopCheck

_IDLE_PAIR = PreferenceExample(chosen_ids=[0, 0], rejected_ids=[0, 0], margin=0.0)
_IDLE_STEPS = ProcessExample(token_ids=[0, 0], labels=[IGNORE_INDEX, IGNORE_INDEX])


class SFTTrainer(SupervisedTrainer[TokenExample]):
    """Trains an ``Actor`` on token examples; the loss is the mean over the target tokens of each optimizer step."""

    kind = "sft"
    headline = ("loss", "eval_loss", "grad_norm", "learning_rate", "time/step_s")

    def make_batch(self, examples: Sequence[TokenExample]) -> StepBatch:
        pad = pad_token_id(self.components.tokenizer)
        return token_batch(examples, self.config.batch.micro_rows, pad, self.comm)

    def loss(self, micro: TokenMicroBatch, n_targets: int, metrics: Metrics) -> Tensor:
        """Summed negative log-likelihood of this micro-batch's targets over the targets of the step."""
        log_probs = self.model(micro.sequences, micro.attention_mask, micro.loss_mask)
        metrics.add_tensor("loss", -log_probs, on_device(micro.loss_mask, self.device))
        return -log_probs.sum() / max(n_targets, 1)


class RewardModelTrainer(SupervisedTrainer[PreferenceExample]):
    """Trains a ``ScalarHeadModel`` of role reward; the loss is the mean over the pairs of each optimizer step."""

    kind = "rm"
    headline = ("loss", "accuracy", "eval_loss", "eval_accuracy", "grad_norm", "learning_rate", "time/step_s")

    def __init__(self, config: TrainRMConfig, components: SupervisedComponents[PreferenceExample]) -> None:
        super().__init__(config, components)
        self.uses_margin = config.data.margin_key is not None
        self.pair_loss = PairWiseLoss() if config.data.loss == "sigmoid" else LogExpLoss()

    @staticmethod
    def rows_of(example: PreferenceExample) -> list[list[int]]:
        return [example.chosen_ids, example.rejected_ids]

    @staticmethod
    def n_scored(example: PreferenceExample) -> int:
        return 1  # a pair

    def loss(self, micro: list[PreferenceExample], n_targets: int, metrics: Metrics) -> Tensor:
        """Summed loss of this micro-batch's pairs over the pairs of the step; both sides in one forward."""
        pairs = micro or [_IDLE_PAIR]
        rows = [pair.chosen_ids for pair in pairs] + [pair.rejected_ids for pair in pairs]
        sequences, attention_mask = pad_right(rows, pad_token_id(self.components.tokenizer))
        scores = self.model(sequences, attention_mask)
        chosen, rejected = scores.chunk(2)  # (B,) each
        margin = torch.tensor([pair.margin for pair in pairs], device=self.device)
        loss = self.pair_loss(chosen, rejected, margin) if self.uses_margin else self.pair_loss(chosen, rejected)
        n = len(micro)  # 0 where other ranks have more pairs
        metrics.add("loss", loss, weight=n)
        metrics.add_tensor("accuracy", (chosen > rejected)[:n])
        metrics.add_tensor("chosen_reward", chosen[:n])
        metrics.add_tensor("rejected_reward", rejected[:n])
        metrics.add_tensor("reward_mean", scores[: 2 * n])
        metrics.add_tensor("reward_std", scores[: 2 * n], reduce="std")
        return loss * n / n_targets

    def write_model(self, folder: Path) -> None:
        """Write the model; its config gets ``mean`` and ``std`` of its scores, which ``--normalize_reward`` reads.

        They are measured on both sides of the held-out pairs, or else of up to 1024 training pairs; ``std`` is
        unbiased, as in OpenRLHF.
        """
        train = self.components.train_examples
        pairs = self.components.eval_examples or train[:: -(-len(train) // 1024)]  # neighbours may be of one source
        metrics = self.evaluate(pairs, StopCheck())  # a checkpoint upon a signal is written whole
        n = 2 * len(pairs)
        model: Any = self.model.module.model
        config = model.config
        config.mean = metrics["eval_reward_mean"]
        config.std = max(metrics["eval_reward_std"] * math.sqrt(n / (n - 1)), 1e-8)
        logger.info("scores of %d texts: mean %.4g, std %.4g; stored in the model's config", n, config.mean, config.std)
        super().write_model(folder)


class ProcessRewardTrainer(SupervisedTrainer[ProcessExample]):
    """Trains a ``ProcessRewardModel`` by the mean over judged steps; a step is judged at the placeholder after it."""

    kind = "prm"
    headline = RewardModelTrainer.headline

    def __init__(self, config: TrainPRMConfig, components: SupervisedComponents[ProcessExample]) -> None:
        super().__init__(config, components)
        data, tokenizer = config.data, components.tokenizer
        placeholder_id = single_token_id(tokenizer, data.placeholder_token, "--placeholder_token")
        reward_ids = [single_token_id(tokenizer, token, "--reward_tokens") for token in data.reward_tokens]
        self.step_loss = PRMLoss(placeholder_id, reward_ids)

    @staticmethod
    def n_scored(example: ProcessExample) -> int:
        return sum(label != IGNORE_INDEX for label in example.labels)

    def loss(self, micro: list[ProcessExample], n_targets: int, metrics: Metrics) -> Tensor:
        """Summed cross entropy of this micro-batch's steps over the steps of the batch."""
        examples = micro or [_IDLE_STEPS]
        rows, _ = pad_right([example.token_ids for example in examples], pad_token_id(self.components.tokenizer))
        width = rows.shape[1]
        padded = [[*example.labels, *[IGNORE_INDEX] * (width - len(example.labels))] for example in examples]
        sequences, labels = rows.to(self.device), torch.tensor(padded, device=self.device)  # hard labels or soft
        judged = labels != IGNORE_INDEX
        logits = self.model(sequences, judged)  # (N, V)
        loss, accuracy = self.step_loss(sequences[judged][None], logits[None], labels[judged][None], return_acc=True)
        metrics.add("loss", loss, weight=len(logits))
        metrics.add("accuracy", accuracy, weight=len(logits))
        return loss * len(logits) / max(n_targets, 1)
