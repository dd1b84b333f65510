"""Engines in lockstep make equally many forward passes, as partitioned weights demand, with the same responses."""

import copy

import pytest
import torch

from openppo.rollout.hf_engine import HFEngine
from openppo.types import SamplingParams
from tests.unit.rollout.conftest import assert_same

PARAMS = SamplingParams(max_new_tokens=15, temperature=1.3)
EOS_IDS = [0, 12, 17, 19]


def forwards_and_completions(model, prompts, first_seed, batch, any_rank_busy=None):
    """Generate on a copy of ``model``, counting its forward passes."""
    model, count = copy.deepcopy(model), 0

    def add_one(*_):
        nonlocal count
        count += 1

    model.register_forward_hook(add_one)
    engine = HFEngine(model, EOS_IDS, 0, batch, any_rank_busy)
    completions = engine.generate(prompts, PARAMS, range(first_seed, first_seed + len(prompts)))
    return count, completions


@pytest.mark.parametrize(
    "shares",
    [[[[3, 4, 5], [7]], [[9, 2, 2, 6], [5]]], [[[3, 4, 5], [7], [1], [2]], [[9]]], [[[3, 4, 5], [7]], []]],
    ids=["equal shares", "one rank has more batches", "one rank has nothing"],
)
def test_ranks_make_equally_many_forward_passes_and_get_the_responses_they_get_alone(shares, models, on_ranks):
    model = models["llama"]
    alone = [forwards_and_completions(model, share, 50 * rank, batch=2) for rank, share in enumerate(shares)]
    assert alone[0][0] != alone[1][0], "without lockstep these ranks would wait for each other forever"

    def on_rank(comm):
        def any_rank_busy(busy):
            return bool(comm.all_reduce(torch.tensor(int(busy)), "max"))

        return forwards_and_completions(model, shares[comm.rank], 50 * comm.rank, 2, any_rank_busy)

    together = on_ranks(len(shares), on_rank)
    assert {count for count, _ in together} == {max(count for count, _ in alone)}
    for (_, expected), (_, got) in zip(alone, together, strict=True):
        assert_same(got, expected)
