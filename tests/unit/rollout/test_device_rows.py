"""Decode steps whose tokens stay on the device, and are read there or a step late."""

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openppo.media import TokenIds
from openppo.rollout.device_rows import Sampled
from openppo.rollout.hf_engine import HFEngine
from openppo.types import SamplingParams
from tests.unit.rollout.conftest import assert_same
from tests.unit.rollout.test_decode_graphs import RunsAgain
from tests.unit.rollout.test_hf_engine import shapes_of_forwards

LONG = SamplingParams(24, 1.3)
KINDS = {
    "alike": [LONG],
    "early": [dataclasses.replace(LONG, min_new_tokens=20, stop_token_ids=(5,))],
    "unlike": [LONG, SamplingParams(24, 0.0), SamplingParams(24, top_k=5, top_p=0.9)],
}


class Crossings(TorchDispatchMode):
    """Counts what makes a GPU wait, or copies from the host: numbers read, tensors made of lists, device copies.

    Those of ``model``'s forwards are counted apart: a recorded forward has none.
    """

    def __init__(self, model):
        super().__init__()
        self.found, self.of_forwards, self.n_inside = Counter(), Counter(), 0
        model.register_forward_pre_hook(lambda *_: self.enter(1))
        model.register_forward_hook(lambda *_: self.enter(-1))

    def enter(self, change):
        self.n_inside += change

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, found = (
            function.overloadpacket.__name__,
            self.of_forwards if self.n_inside else self.found,
        )
        if name in (
            "_local_scalar_dense",
            "lift_fresh",
            "nonzero",
            "masked_select",
            "is_nonzero",
            "equal",
        ):
            found[name] += 1
        if name == "_to_copy" and (kwargs or {}).get("device") is not None:
            found[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def read(monkeypatch):
    """What the host has read: of each step the number of values."""
    sizes: list[int] = []
    original = Sampled.record
    monkeypatch.setattr(
        Sampled,
        "record",
        lambda self, *to: sizes.append(self.packed.numel()) or original(self, *to),
    )
    return sizes


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("recorder", [None, RunsAgain], ids=["launched", "recorded"])
def test_a_decode_step_copies_one_packed_tensor(models, kinds, recorder, read):
    model = copy.deepcopy(models["llama"])
    engine = HFEngine(model, [], 0, 8, new_recorder=recorder)
    for seed in range(6):
        engine.submit(TokenIds([3, 4 + seed]), KINDS[kinds][seed % len(KINDS[kinds])], seed)
    for _ in range(3):
        engine.step()
    read.clear()
    with Crossings(model) as crossings:
        for _ in range(10):
            engine.step()
    assert crossings.found == {}
    assert crossings.of_forwards == {"_local_scalar_dense": 10}, (
        "transformers looks whether anything is padded"
    )
    assert read == [3 * 6] * 10, "id, log-prob and end of each row"


def test_crossings_counts_what_it_names():
    with Crossings(torch.nn.Identity()) as crossings:
        torch.tensor([1.0, 2.0])[0].item()
        torch.ones(3).nonzero()
    assert crossings.found == {"lift_fresh": 1, "_local_scalar_dense": 1, "nonzero": 1}


def test_the_next_forward_is_launched_before_the_last_is_read(models, late, monkeypatch):
    events: list[str] = []
    original = Sampled.record
    monkeypatch.setattr(
        Sampled, "record", lambda self, *to: events.append("read") or original(self, *to)
    )
    hook = models["llama"].register_forward_pre_hook(lambda *_: events.append("forward"))
    HFEngine(models["llama"], [], 0, 8).generate([TokenIds([3, 4])], SamplingParams(4), [0])
    hook.remove()
    at_once = ["forward", "read"] * 4
    assert events == (["forward", *["forward", "read"] * 4] if late else at_once)


@pytest.mark.usefixtures("late")
def test_a_row_that_has_ended_is_free_within_two_steps(models, prompts):
    """Its surplus token goes nowhere."""
    model = models["llama"]
    params = [SamplingParams(3 + i, 1.3) for i in range(len(prompts))]
    engine = HFEngine(model, [], 0, 8)
    numbers = [
        engine.submit(TokenIds(prompt), its, i)
        for i, (prompt, its) in enumerate(zip(prompts, params, strict=True))
    ]
    done = {}
    with shapes_of_forwards(model) as shapes:
        while engine.busy:
            engine.step()
            done |= engine.collect()
    rows = [n for n, width in shapes if width == 1]
    for step, n_rows in enumerate(rows, 2):  # the first token is sampled by the prefill
        assert sum(its.max_new_tokens >= step for its in params) <= n_rows
        assert n_rows <= sum(its.max_new_tokens + 1 >= step for its in params)
    alone = [
        HFEngine(model, [], 0, 8).generate([TokenIds(p)], its, [i])[0]
        for i, (p, its) in enumerate(zip(prompts, params, strict=True))
    ]
    assert_same([done[number] for number in numbers], alone)


@pytest.mark.usefixtures("late")
def test_a_request_cancelled_under_way_is_free_at_once(models):
    """The token that was under way is dropped, and no other changes."""
    model, engine = models["llama"], HFEngine(models["llama"], [], 0, 2)
    numbers = [engine.submit(TokenIds([3, 4 + i]), LONG, i) for i in range(3)]
    for _ in range(4):
        engine.step()
    engine.cancel(numbers[0])
    with shapes_of_forwards(model) as shapes:
        engine.step()
        engine.step()
    assert shapes == [(1, 2), (2, 1)], "its row was given to the next at once"
    done = {}
    while engine.busy:
        engine.step()
        done |= engine.collect()
    assert done.keys() == {*numbers[1:]}
    alone = [
        HFEngine(model, [], 0, 2).generate([TokenIds([3, 4 + i])], LONG, [i])[0] for i in (1, 2)
    ]
    assert_same([done[number] for number in numbers[1:]], alone)
