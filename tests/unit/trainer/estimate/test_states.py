"""Model states on one rank, against numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from openppo.trainer.estimate.shapes import ModelShape
from openppo.trainer.estimate.states import frozen_states, n_trained, trained_states

M = 1_000_000


@pytest.mark.parametrize(
    ("stage", "per_parameter"),
    [
        (1, 2 + 4 + (4 + 8) / 4 + 2),  # bf16 weights, float32 gradients, a quarter of the optimizer, bf16 gradients
        (2, 2 + (4 + 8) / 4),
        (3, (2 + 4 + 8 + 4) / 4 + 4 + 0.002),  # everything in quarters, a bucket, and small parameters once more
    ],
)
def test_bf16_states_of_four_ranks(shape: ModelShape, setting: Any, stage: int, per_parameter: float) -> None:
    assert trained_states(shape, setting(4, zero_stage=stage, bf16=True)).total == per_parameter * M


@pytest.mark.parametrize(
    ("stage", "per_parameter"),
    [(0, 4 + 8), (1, 4 + (4 + 8) / 4), (2, 4 + (4 + 8) / 4), (3, (4 + 4 + 8 + 4) / 4 + 4 + 0.004)],
)
def test_float32_states_of_four_ranks(shape: ModelShape, setting: Any, stage: int, per_parameter: float) -> None:
    assert trained_states(shape, setting(4, zero_stage=stage)).total == per_parameter * M


def test_bf16_without_zero_is_stage_1(shape: ModelShape, setting: Any) -> None:
    assert trained_states(shape, setting(4, zero_stage=0, bf16=True)) == trained_states(
        shape, setting(4, zero_stage=1, bf16=True)
    )


def test_a_large_model_is_reduced_in_buckets_of_500_million(shape: ModelShape, setting: Any) -> None:
    large = replace(shape, n_parameters=8_000_000_000)
    states = trained_states(large, setting(8, zero_stage=2, bf16=True))
    assert states.buffers == 2 * 500_000_000
    assert states.reduced == (2 + 4) * 500_000_000 + 4 * 1_000_000_000  # bucket, its copy, the partition


def test_overlapping_communication_takes_a_second_bucket(shape: ModelShape, setting: Any) -> None:
    one, two = (trained_states(shape, setting(2, zero_stage=2, overlap_comm=overlap)) for overlap in (False, True))
    assert (one.buffers, two.buffers) == (4 * M, 8 * M)
    assert two.reduced - one.reduced == 4 * M


def test_a_rank_keeps_gradients_of_whole_parameters(shape: ModelShape, setting: Any) -> None:
    states = trained_states(shape, setting(100, zero_stage=2))
    assert states.accumulated == 4 * shape.largest  # although its partition has 10,000


def test_one_micro_batch_accumulates_nothing(shape: ModelShape, setting: Any) -> None:
    for stage in (0, 1, 2):
        assert trained_states(shape, setting(1, zero_stage=stage), accumulates=False).accumulated == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_moves_the_optimizer_to_the_host(shape: ModelShape, setting: Any, stage: int) -> None:
    here = trained_states(shape, setting(4, zero_stage=stage, bf16=True, adam_offload=True))
    assert set(here.device) <= {"weights", "bucket"}
    assert here.host["master weights"] + here.host["Adam moments"] == 12 * M // 4


def test_adapters_are_trained_and_the_rest_is_frozen(shape: ModelShape, setting: Any) -> None:
    adapters = 4 * (8 * (100 + 100) + 8 * (100 + 300))  # four layers of two, rank 8
    assert n_trained(shape, 8) == adapters
    states = trained_states(shape, setting(1, zero_stage=2, bf16=True), lora_rank=8)
    assert states.total == 2 * M + (2 + 4 + 8) * adapters


def test_the_head_of_a_critic_is_trained_beside_adapters(shape: ModelShape) -> None:
    scalar = replace(shape, vocabulary=0)
    assert n_trained(scalar, 8) - n_trained(shape, 8) == shape.hidden


def test_four_bits_are_half_a_byte_and_scales(shape: ModelShape, setting: Any) -> None:
    states = trained_states(shape, setting(1, zero_stage=2, bf16=True), lora_rank=8, in_4bit=True)
    scales = 800_000 // 64 + 4 * 800_000 / (64 * 256)  # one byte for 64 weights, a float32 for 256 of those
    assert states.device["weights"] == round(400_000 + scales) + 2 * 200_000 + 2 * n_trained(shape, 8)


def test_frozen_models_are_partitioned_under_zero_3_alone(shape: ModelShape, setting: Any) -> None:
    assert frozen_states(shape, setting(4, zero_stage=2, bf16=True)).total == 2 * M
    assert frozen_states(shape, setting(4, zero_stage=3, bf16=True)).total == 2 * (M // 4 + shape.n_small)


def test_zero_3_gathers_nothing_on_one_rank(shape: ModelShape, setting: Any) -> None:
    alone, two = (trained_states(shape, setting(n, zero_stage=3)) for n in (1, 2))
    assert (alone.gathered, alone.gathered_to_generate, alone.gathered_to_infer) == (0, 0, 0)
    assert two.gathered_to_generate == 4 * M
