"""Reward models store what their scores look like."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from openppo.config import BatchConfig, SupervisedConfig, TrainRMConfig
from openppo.datasets import PreferenceExample
from openppo.models.scalar_head import ScalarHeadModel
from openppo.trainer.supervised.trainers import RewardModelTrainer, spread
from openppo.types import Interrupted, SingleProcess

PAIRS = [PreferenceExample([3 + i] * (2 + i), [9 - i, 4]) for i in range(5)]


def already_asked_to_stop() -> None:
    raise Interrupted("SIGTERM")


@pytest.mark.parametrize("n_held_out", [0, 2])
def test_mean_and_std_are_those_of_both_sides_of_held_out_or_else_training_pairs(
    scalar: LlamaForSequenceClassification, n_held_out: int
) -> None:
    model, saved = ScalarHeadModel(scalar, "reward"), []

    class Engine:
        module = model
        train = model.train
        __call__ = model.__call__

    strategy = SimpleNamespace(
        comm=SingleProcess(), device=torch.device("cpu"), is_main=True, save_pretrained=lambda *args: saved.append(args)
    )
    parts: Any = SimpleNamespace(
        strategy=strategy,
        model=Engine(),
        tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=None),
        train_examples=PAIRS,
        eval_examples=PAIRS[:n_held_out],
        stop=already_asked_to_stop,  # a checkpoint upon a signal has the model whole
        checkpointer=None,
    )
    config = TrainRMConfig(SupervisedConfig("model", "data"), batch=BatchConfig(4, micro_train_batch_size=3))
    RewardModelTrainer(config, parts).save()

    rows = [ids for pair in PAIRS[: n_held_out or 5] for ids in (pair.chosen_ids, pair.rejected_ids)]
    scores = torch.stack([model(torch.tensor([ids]), torch.ones(1, len(ids)))[0] for ids in rows])
    assert scalar.config.mean == pytest.approx(scores.mean().item(), rel=1e-5)
    assert scalar.config.std == pytest.approx(scores.std().item(), rel=1e-5)
    assert saved[0][0] is scalar


@pytest.mark.parametrize(("n", "kept"), [(5, 5), (1024, 1024), (1025, 513), (4096, 1024)])
def test_pairs_for_statistics_are_spread_over_all(n: int, kept: int) -> None:
    chosen = spread([PreferenceExample([i], [i]) for i in range(n)], most=1024)
    places = [pair.chosen_ids[0] for pair in chosen]
    assert len(places) == kept
    assert places[0] == 0
    assert places[-1] >= n - (n // kept + 1)
