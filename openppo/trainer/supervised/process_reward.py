"""Process-reward-model training: the judgement of each step of a solution, at the placeholder after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.config import TrainPRMConfig
from openppo.datasets import ProcessExample, single_token_id
from openppo.models.loss import IGNORE_INDEX, PRMLoss
from openppo.models.padding import pad_right
from openppo.models.pretrained import pad_token_id
from openppo.tracking import Metrics
from openppo.trainer.batches import equal_micro_batches
from openppo.trainer.supervised.loop import ModelCall, SupervisedComponents, SupervisedTrainer

PRM_HEADLINE = ("loss", "accuracy", "eval_loss", "eval_accuracy", "grad_norm", "learning_rate", "time/step_s")
_IDLE = ProcessExample(token_ids=[0, 0], labels=[IGNORE_INDEX, IGNORE_INDEX])


@dataclass(frozen=True)
class ProcessBatch:
    """Micro-batches of solutions, equally many on all ranks; ``n_steps`` counts the judged steps of the whole batch."""

    micro_batches: list[list[ProcessExample]]
    n_steps: int

    @property
    def n_input_tokens(self) -> int:
        """Real tokens that this rank feeds to the model."""
        return sum(len(example.token_ids) for micro in self.micro_batches for example in micro)


class ProcessRewardTrainer(SupervisedTrainer[ProcessExample]):
    """Trains a ``ProcessRewardModel``; the loss is the mean over the judged steps of each optimizer step."""

    def __init__(self, config: TrainPRMConfig, parts: SupervisedComponents[ProcessExample]) -> None:
        super().__init__(config, parts)
        data, tokenizer = config.data, parts.tokenizer
        self.placeholder_id = single_token_id(tokenizer, data.placeholder_token, "--placeholder_token")
        reward_ids = [single_token_id(tokenizer, token, "--reward_tokens") for token in data.reward_tokens]
        self.step_loss = PRMLoss(self.placeholder_id, reward_ids)

    def make_batch(self, examples: Sequence[ProcessExample]) -> ProcessBatch:
        """This rank's micro-batches."""
        micro_batches = equal_micro_batches(examples, self.config.batch.micro_train_batch_size, self.comm)
        labels = [label for example in examples for label in example.labels]
        return ProcessBatch(micro_batches, n_steps=sum(label != IGNORE_INDEX for label in labels))

    def loss(
        self, model: ModelCall, batch: ProcessBatch, micro: list[ProcessExample], metrics: Metrics, prefix: str
    ) -> Tensor:
        """Summed cross entropy of this micro-batch's steps over the steps of the batch."""
        sequences, labels = (tensor.to(self.device) for tensor in self._tensors(micro or [_IDLE]))
        judged = labels != IGNORE_INDEX
        logits = model(sequences, judged)  # (N, V)
        loss, accuracy = self.step_loss(sequences[judged][None], logits[None], labels[judged][None], return_acc=True)
        metrics.add(f"{prefix}loss", loss.detach(), weight=len(logits))
        metrics.add(f"{prefix}accuracy", accuracy, weight=len(logits))
        return loss * len(logits) / max(batch.n_steps, 1)

    def _tensors(self, examples: Sequence[ProcessExample]) -> tuple[Tensor, Tensor]:
        """Sequences int64 and labels int64 (hard) or float32 (soft), both (B, L)."""
        sequences, _ = pad_right([example.token_ids for example in examples], pad_token_id(self.components.tokenizer))
        width = sequences.shape[1]
        padded = [[*example.labels, *[IGNORE_INDEX] * (width - len(example.labels))] for example in examples]
        return sequences, torch.tensor(padded)
