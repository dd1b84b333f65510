"""Reward models store what their scores look like."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForSequenceClassification

from openppo.config import BatchConfig, SupervisedConfig, TrainRMConfig
from openppo.datasets import PreferenceExample
from openppo.models.scalar_head import ScalarHeadModel
from openppo.trainer.supervised.trainers import RewardModelTrainer
from openppo.types import Interrupted, SingleProcess

PAIRS = [PreferenceExample([3 + i % 9] * (2 + i % 5), [9 - i % 7, 4]) for i in range(1025)]


@pytest.mark.parametrize(("n_train", "n_held_out", "used"), [(5, 0, 5), (5, 2, 2), (1025, 0, 513)])
def test_mean_and_std_are_of_held_out_or_spread_training_pairs(
    scalar: LlamaForSequenceClassification, n_train: int, n_held_out: int, used: int
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
        train_examples=PAIRS[:n_train],
        eval_examples=PAIRS[:n_held_out],
        stop=Mock(side_effect=Interrupted("SIGTERM")),  # a checkpoint upon a signal has the model whole
        checkpointer=None,
    )
    config = TrainRMConfig(SupervisedConfig("model", "data"), batch=BatchConfig(4, micro_train_batch_size=3))
    RewardModelTrainer(config, parts).save()

    pairs = PAIRS[:n_held_out] or PAIRS[: n_train : 2 if n_train > 1024 else 1]
    assert len(pairs) == used
    rows = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    scores = torch.stack([model(torch.tensor([ids]), torch.ones(1, len(ids)))[0] for ids in rows])
    assert scalar.config.mean == pytest.approx(scores.mean().item(), rel=1e-5)
    assert scalar.config.std == pytest.approx(scores.std().item(), rel=1e-5)
    assert saved[0][0] is scalar
