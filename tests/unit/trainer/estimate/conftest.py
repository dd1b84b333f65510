"""A model small enough to count by hand, and options for it."""

from typing import Any

import pytest

from openppo.config import DeepSpeedConfig, TrainPPOConfig, from_options
from openppo.trainer.estimate.shapes import ModelShape
from openppo.trainer.estimate.states import Setting


@pytest.fixture
def shape() -> ModelShape:
    """A million parameters in round numbers: not a real architecture."""
    return ModelShape(
        n_parameters=1_000_000,
        n_quantized=800_000,
        n_small=1_000,
        largest=200_000,
        layers=4,
        hidden=100,
        queries=100,
        heads=5,
        keys=50,
        intermediate=300,
        gated=True,
        composed_gelu=False,
        normed_queries=False,
        vocabulary=1_000,
        linears=((100, 100), (100, 300)) * 4,
    )


@pytest.fixture
def setting() -> Any:
    """``setting(n_ranks, on_cpu=False, **options of DeepSpeedConfig)``."""

    def make(n_ranks: int, on_cpu: bool = False, **options: Any) -> Setting:
        return Setting(DeepSpeedConfig(**options), n_ranks, on_cpu)

    return make


@pytest.fixture
def ppo_config() -> Any:
    """``ppo_config(**options)`` of train_ppo."""

    def make(**options: Any) -> TrainPPOConfig:
        sizes = {"rollout_batch_size": 64, "train_batch_size": 16, "micro_train_batch_size": 4, "generate_max_len": 100}
        given = {"pretrain": "p", "prompt_data": "d", "reward_pretrain": "r"}
        return from_options(TrainPPOConfig, **given, **{**sizes, **options})

    return make
