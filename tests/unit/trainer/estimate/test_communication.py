"""Bytes sent and stored, against hand-computed numbers."""

from typing import Any

import pytest

from openppo.trainer.estimate import checkpoint_bytes
from openppo.trainer.estimate.communication import (
    all_gather_bytes,
    all_reduce_bytes,
    forward_bytes,
    optimizer_step_bytes,
)
from openppo.trainer.estimate.shapes import ModelShape

M = 1_000_000


def test_rings_send_all_but_ones_own_part() -> None:
    assert [all_gather_bytes(800, n) for n in (1, 2, 4, 8)] == [0, 400, 600, 700]
    assert all_reduce_bytes(800, 8) == 1400


@pytest.mark.parametrize(
    ("stage", "sent"),
    [
        (0, 2 * 4 * M * 3 // 4),  # one all-reduce of float32 gradients
        (1, 2 * 4 * M * 3 // 4 + 4 * M * 3 // 4),  # and the new weights
        (2, 5 * 2 * 4 * M * 3 // 4 + 4 * M * 3 // 4),  # one all-reduce for each of five micro-batches
        (
            3,
            5 * (2 * 4 * (M - 1000) + 4 * M) * 3 // 4,
        ),  # weights but for small ones gathered twice and gradients scattered for each
    ],
)
def test_an_optimizer_step_of_five_micro_batches_on_four_ranks(
    shape: ModelShape, setting: Any, stage: int, sent: int
) -> None:
    assert optimizer_step_bytes(shape, setting(4, zero_stage=stage), micro_batches=5) == sent


def test_only_adapters_are_reduced(shape: ModelShape, setting: Any) -> None:
    adapters = sum(shape.adapter_sizes(8))
    assert optimizer_step_bytes(shape, setting(2, zero_stage=0), 3, lora_rank=8) == 2 * 4 * adapters // 2


def test_frozen_weights_travel_under_zero_3_alone(shape: ModelShape, setting: Any) -> None:
    assert forward_bytes(shape, setting(4, zero_stage=2)) == 0
    assert forward_bytes(shape, setting(4, zero_stage=3, bf16=True)) == 2 * (M - 1000) * 3 // 4


def test_one_rank_sends_nothing(shape: ModelShape, setting: Any) -> None:
    assert [optimizer_step_bytes(shape, setting(1, zero_stage=stage), 5) for stage in (0, 1, 2, 3)] == [0, 0, 0, 0]


def test_a_checkpoint_holds_master_weights_moments_and_the_average() -> None:
    assert checkpoint_bytes(1000) == 12_000
    assert checkpoint_bytes(1000, 500) == 18_000
    assert checkpoint_bytes(1000, 500, ema=True) == 22_000
