"""The three supervised trainers: fine-tuning, reward models, process reward models."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openppo import logger
from openppo.config import TrainPRMConfig, TrainRMConfig, TrainSFTConfig
from openppo.datasets import (
    PreferenceExample,
    ProcessExample,
    RankingExample,
    TokenExample,
    single_token_id,
)
from openppo.model_inputs import ModelInputs
from openppo.models.padding import on_device, packing_is_exact
from openppo.models.pretrained import pad_token_id
from openppo.models.supervised_loss import IGNORE_INDEX, LogExpLoss, PairWiseLoss, PRMLoss
from openppo.tracking import Metrics
from openppo.trainer.supervised.batches import StepBatch, TokenMicroBatch, token_batch
from openppo.trainer.supervised.loop import SupervisedComponents, SupervisedTrainer
from openppo.types import StopCheck

Ranked = PreferenceExample | RankingExample

_IDLE_PAIR: Ranked = PreferenceExample([0, 0], [0, 0], margin=0.0)
_IDLE_STEPS = ProcessExample(token_ids=[0, 0], labels=[IGNORE_INDEX, IGNORE_INDEX])
"""Examples of a rank that has none while others have one."""


class SFTTrainer(SupervisedTrainer[TokenExample]):
    """Trainer of an ``Actor``; the loss is the mean over the target tokens of an optimizer step."""

    kind = "sft"
    headline = ("loss", "eval_loss", "grad_norm", "learning_rate", "time/step_s")

    def __init__(
        self, config: TrainSFTConfig, components: SupervisedComponents[TokenExample]
    ) -> None:
        super().__init__(config, components)
        self.pack_to = config.pack_to
        with components.strategy.uncompiled():
            if self.pack_to is not None and not packing_is_exact(self.model, self.device):
                raise ValueError(
                    "--packing: --pretrain would mix the samples of a row. Leave the flag out."
                )

    def make_batch(self, examples: Sequence[TokenExample]) -> StepBatch:
        """Make this rank's share of the step; rows are packed with ``--packing``."""
        return token_batch(
            examples,
            self.config.batch.micro_rows,
            pad_token_id(self.components.tokenizer),
            comm=self.comm,
            pack_to=self.pack_to,
        )

    def loss(self, micro: TokenMicroBatch, n_targets: int, metrics: Metrics) -> Tensor:
        """Summed negative log-likelihood of this micro-batch over the targets of the step."""
        log_probs = self.model(micro.inputs, micro.loss_mask)
        metrics.add_tensor("loss", -log_probs, on_device(micro.loss_mask, self.device))
        return -log_probs.sum() / max(n_targets, 1)


class RewardModelTrainer(SupervisedTrainer[Ranked]):
    """Trainer of a ``ScalarHeadModel`` of role reward.

    The loss is the mean over the examples of an optimizer step; that of a ranking is the mean over its pairs
    (InstructGPT).
    """

    kind = "rm"
    headline = (
        "loss",
        "accuracy",
        "eval_loss",
        "eval_accuracy",
        "grad_norm",
        "learning_rate",
        "time/step_s",
    )

    def __init__(self, config: TrainRMConfig, components: SupervisedComponents[Ranked]) -> None:
        super().__init__(config, components)
        self.uses_margin = config.data.margin_key is not None
        self.pair_loss = PairWiseLoss() if config.data.loss == "sigmoid" else LogExpLoss()

    @staticmethod
    def rows_of(example: Ranked) -> list[list[int]]:
        """Token ids of the texts of a pair or ranking."""
        return example.texts

    @staticmethod
    def n_scored(example: Ranked) -> int:
        """One: a pair or ranking counts as a single target."""
        return 1

    def loss(self, micro: list[Ranked], n_targets: int, metrics: Metrics) -> Tensor:
        """Summed loss of this micro-batch's examples over those of the step, by one forward."""
        examples = micro or [_IDLE_PAIR]
        n = len(micro)  # 0 if only other ranks have more examples
        scores, row_of = self._scores(examples)
        pairs = [example.pairs for example in examples]

        loss = scores.new_zeros(())
        for n_pairs in dict.fromkeys(map(len, pairs)):
            alike = [e for e in range(len(examples)) if len(pairs[e]) == n_pairs]
            better = [row_of[i, e] for e in alike for i, _ in pairs[e]]
            worse = [row_of[j, e] for e in alike for _, j in pairs[e]]
            chosen = scores[better]  # (examples x pairs,)
            rejected = scores[worse]

            margins = torch.tensor([examples[e].margin for e in alike], device=self.device)
            pair_loss = self.pair_loss(chosen, rejected, margins if self.uses_margin else None)
            loss = loss + pair_loss * (len(alike) / len(examples))
            is_right = (chosen > rejected)[: n * n_pairs]
            metrics.add_tensor("accuracy", is_right)
            if not torch.is_grad_enabled():
                # Pairs of one ranking are alike, so rankings are the independent values.
                by_example = is_right.float().reshape(len(is_right) // n_pairs, n_pairs)
                metrics.add_tensor("accuracy_ci95", by_example.mean(1), reduce="ci95")
            metrics.add_tensor("chosen_reward", chosen[: n * n_pairs])
            metrics.add_tensor("rejected_reward", rejected[: n * n_pairs])

        metrics.add("loss", loss, weight=n)
        counted = scores if micro else scores[:0]
        metrics.add_tensor("reward_mean", counted)
        metrics.add_tensor("reward_std", counted, reduce="std")
        return loss * n / n_targets

    def _scores(self, examples: Sequence[Ranked]) -> tuple[Tensor, dict[tuple[int, int], int]]:
        """Scores (N,) of all texts, and the place among them of each ``(text, example)``.

        The first texts of all examples come first: the chosen ones of pairs lie beside each other.
        """
        order = []
        for e, example in enumerate(examples):
            order += [(k, e) for k in range(len(example.texts))]
        order.sort()
        rows = [examples[e].texts[k] for k, e in order]
        inputs = ModelInputs.of_ids(rows, pad_token_id(self.components.tokenizer))
        inputs = inputs.with_media([examples[e].media for _, e in order])
        scores = self.model(inputs)
        return scores, {text: place for place, text in enumerate(order)}

    def write_model(self, folder: Path) -> None:
        """Write the model; its config gets ``mean`` and ``std`` of its scores, which ``--normalize_reward`` reads.

        They are measured on all texts of the held-out pairs, or else of up to 1024 training pairs; ``std`` is
        unbiased, as in OpenRLHF.
        """
        pairs = self.components.eval_examples
        if not pairs:
            train = self.components.train_examples
            stride = -(-len(train) // 1024)  # neighbours may come from one source
            pairs = train[::stride]
        metrics = self.evaluate(pairs, StopCheck())  # a checkpoint upon a signal is written whole

        n = sum(len(pair.texts) for pair in pairs)
        unbiased_std = metrics["eval_reward_std"] * math.sqrt(n / (n - 1))
        model: Any = self.model.module.model
        config = model.config
        config.mean = metrics["eval_reward_mean"]
        config.std = max(unbiased_std, 1e-8)
        logger.info(
            "scores of %d texts: mean %.4g, std %.4g; stored in the model's config",
            n,
            config.mean,
            config.std,
        )
        super().write_model(folder)


class ProcessRewardTrainer(SupervisedTrainer[ProcessExample]):
    """Trainer of a ``ProcessRewardModel``; the loss is the mean over judged steps.

    A step is judged at the placeholder after it.
    """

    kind = "prm"
    headline = RewardModelTrainer.headline

    def __init__(
        self, config: TrainPRMConfig, components: SupervisedComponents[ProcessExample]
    ) -> None:
        super().__init__(config, components)
        data = config.data
        tokenizer = components.tokenizer
        placeholder_id = single_token_id(tokenizer, data.placeholder_token, "--placeholder_token")
        reward_ids = [
            single_token_id(tokenizer, token, "--reward_tokens") for token in data.reward_tokens
        ]
        self.step_loss = PRMLoss(placeholder_id, reward_ids)

    @staticmethod
    def n_scored(example: ProcessExample) -> int:
        """Number of judged steps of an example."""
        return sum(label != IGNORE_INDEX for label in example.labels)

    def loss(self, micro: list[ProcessExample], n_targets: int, metrics: Metrics) -> Tensor:
        """Summed cross entropy of this micro-batch's steps over the steps of the batch."""
        examples = micro or [_IDLE_STEPS]
        rows = [example.token_ids for example in examples]
        inputs = ModelInputs.of_ids(rows, pad_token_id(self.components.tokenizer))
        inputs = inputs.to(self.device)
        width = inputs.sequences.shape[1]

        padded_labels = []
        for example in examples:
            padding = [IGNORE_INDEX] * (width - len(example.labels))
            padded_labels.append([*example.labels, *padding])
        labels = torch.tensor(padded_labels, device=self.device)  # (B, L), hard labels or soft

        judged = labels != IGNORE_INDEX
        logits = self.model(inputs, judged)  # (N, V)
        step_ids = inputs.sequences[judged]
        step_labels = labels[judged]
        loss, accuracy = self.step_loss(
            step_ids[None], logits[None], step_labels[None], return_acc=True
        )
        metrics.add("loss", loss, weight=len(logits))
        metrics.add("accuracy", accuracy, weight=len(logits))
        return loss * len(logits) / max(n_targets, 1)
