"""Reward models learn from margins and rankings as from their pairs; samples that share a row as if they were alone."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from openppo.config import TrainRMConfig, TrainSFTConfig, from_options
from openppo.datasets import PreferenceExample, RankingExample, TokenExample
from openppo.models import Actor
from openppo.models.scalar_head import ScalarHeadModel
from openppo.tracking import Metrics
from openppo.trainer.supervised.trainers import RewardModelTrainer, SFTTrainer
from openppo.types import ModelInputs
from tests.unit.trainer.conftest import OneOf, PlainModel
from tests.unit.trainer.test_supervised import MODEL, parts_of

MIXED = [
    RankingExample([[5, 6, 1], [7, 1], [8, 9, 10, 1]], [2.0, 0.5, 1.0]),
    PreferenceExample([4, 1], [3, 3, 1]),
    RankingExample(
        [[11, 1], [12, 1], [13, 14, 1], [3, 1]], [1.0, 1.0, 0.0, 3.0]
    ),  # a tie gives no pair
    PreferenceExample([6, 6, 1], [4, 4, 1]),
    RankingExample([[5, 1], [15, 1]], [0.0, 1.0]),
]
WITH_MARGINS = [PreferenceExample([3 + i, 1], [9 - i, 4, 1], 0.3 * i) for i in range(5)]


def naive(model, examples):
    """Loss of -log sigmoid over all pairs of each example, one text at a time; and the outcome of every pair."""
    losses, won = [], []
    for example in examples:
        if isinstance(example, PreferenceExample):
            texts, ranks, margin = (
                [example.chosen_ids, example.rejected_ids],
                [1, 0],
                example.margin,
            )
        else:
            texts, ranks, margin = example.texts, example.scores, 0.0
        scores = [model(ModelInputs.of_ids([ids], pad_token_id=0))[0] for ids in texts]
        of_pairs = []
        for a, b in itertools.combinations(range(len(texts)), 2):
            if ranks[a] != ranks[b]:
                better, worse = (
                    (scores[a], scores[b]) if ranks[a] > ranks[b] else (scores[b], scores[a])
                )
                of_pairs.append(torch.log(1 + torch.exp(-(better - worse - margin))))
                won.append((better > worse).item())
        losses.append(sum(of_pairs) / len(of_pairs))
    return sum(losses) / len(losses), won


@pytest.mark.parametrize("loss", ["sigmoid", "logexp"])
@pytest.mark.parametrize("examples", [MIXED, WITH_MARGINS], ids=["rankings", "margins"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 2), (1, 9), (2, 2), (3, 1), (7, 4)])
def test_the_gradient_is_that_of_all_pairs_for_any_split(
    scalar, make_tokenizer, loss, examples, ranks, micro
):
    model = ScalarHeadModel(scalar, "reward")
    expected, won = naive(model, examples)
    gradient = torch.autograd.grad(expected, list(scalar.parameters()))
    options = {"micro_train_batch_size": micro, "train_batch_size": 5, "loss": loss}
    options |= {"margin_key": "m"} if examples is WITH_MARGINS else {}
    total, forwards = 0.0, []
    for rank in range(ranks):
        plain = PlainModel(model)
        parts = parts_of(plain, examples, examples, make_tokenizer(), comm=OneOf(rank, ranks))
        trainer = RewardModelTrainer(from_options(TrainRMConfig, **MODEL, **options), parts)
        batch = trainer.make_batch(examples)
        total += sum(trainer.loss(part, batch.n_targets, Metrics()) for part in batch.micro_batches)
        forwards.append(plain.n_forwards)
    assert total.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(total, list(scalar.parameters())), gradient, rtol=0, atol=1e-6
    )
    assert forwards == [math.ceil(math.ceil(5 / ranks) / micro)] * ranks, (
        "one forward of all texts of a micro-batch"
    )
    if ranks == 1:
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == pytest.approx(expected.item(), abs=1e-6)
        assert 0 < sum(won) < len(won)
        assert metrics["eval_accuracy"] == pytest.approx(sum(won) / len(won), abs=1e-6)


SAMPLES = [
    TokenExample([(7 * i + t) % 12 + 3 for t in range(n)], [t % 3 != 1 for t in range(n)])
    for i, n in enumerate([9, 3, 12, 5, 2, 7, 4])
]


def sft(causal, tokenizer, rank=0, ranks=1, **options):
    given = {"train_batch_size": 7, "micro_train_batch_size": 2, "max_len": 16, **options}
    parts = parts_of(
        PlainModel(Actor(causal)), SAMPLES, SAMPLES, tokenizer, comm=OneOf(rank, ranks)
    )
    return SFTTrainer(from_options(TrainSFTConfig, **MODEL, **given), parts)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_packed_samples_have_the_loss_and_gradient_of_separate_rows(causal, make_tokenizer, ranks):
    logits = [
        causal(input_ids=torch.tensor([s.token_ids])).logits[0, :-1].log_softmax(-1)
        for s in SAMPLES
    ]
    wanted = [
        (row, t)
        for row, s in enumerate(SAMPLES)
        for t in range(1, len(s.token_ids))
        if s.loss_mask[t]
    ]
    expected = -sum(logits[row][t - 1, SAMPLES[row].token_ids[t]] for row, t in wanted) / len(
        wanted
    )
    gradient = torch.autograd.grad(expected, list(causal.parameters()))
    total, rows = 0.0, 0
    for rank in range(ranks):
        trainer = sft(causal, make_tokenizer(), rank, ranks, packing=True)
        batch = trainer.make_batch(SAMPLES)
        rows += sum(len(micro.inputs) for micro in batch.micro_batches)
        assert batch.n_targets == len(wanted)
        total += sum(
            trainer.loss(micro, batch.n_targets, Metrics()) for micro in batch.micro_batches
        )
    assert rows == 3, "42 tokens in rows of 16"
    assert total.item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(total, list(causal.parameters())), gradient, rtol=0, atol=1e-6
    )
    if ranks == 1:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), abs=1e-6)


def test_a_model_that_mixes_samples_is_refused(causal, make_tokenizer, monkeypatch):
    forward = Actor.forward

    def without_positions(self: Actor, inputs: ModelInputs, *args: Any, **options: Any) -> Any:
        return forward(self, replace(inputs, position_ids=None), *args, **options)

    monkeypatch.setattr(Actor, "forward", without_positions)
    sft(causal, make_tokenizer())
    with pytest.raises(
        ValueError,
        match=r"^--packing: --pretrain would mix the samples of a row. Leave the flag out",
    ):
        sft(causal, make_tokenizer(), packing=True)
