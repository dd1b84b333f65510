"""Decode steps whose attention goes by lengths, as on GPUs, against those with a mask."""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from openppo.media import TokenIds
from openppo.models import attention
from openppo.models.attention import BY_LENGTHS
from openppo.rollout import row_cache
from openppo.rollout.hf_engine import HFEngine
from openppo.types import SamplingParams
from tests.architectures import tiny_config
from tests.unit.rollout.conftest import assert_same
from tests.unit.rollout.test_decode_graphs import RunsAgain
from tests.varlen import VarlenLoop

PARAMS = SamplingParams(max_new_tokens=12, temperature=1.3)
EOS_IDS = [0, 2, 12, 17, 19, 30, 41, 55]


@pytest.fixture
def calls(monkeypatch):
    """Those of torch's operator."""
    loop = VarlenLoop()
    monkeypatch.setattr(attention, "varlen_attn", loop)
    return loop.calls


@pytest.fixture
def said(caplog, monkeypatch):
    """Warnings of the library."""
    monkeypatch.setattr(logging.getLogger("openppo"), "propagate", True)
    return lambda: [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]


def pair(name, **changed):
    """A model with masks, and the same by lengths."""
    torch.manual_seed(1)
    masked = AutoModelForCausalLM.from_config(
        tiny_config(name, **changed), attn_implementation="sdpa"
    ).eval()
    by_lengths = copy.deepcopy(masked)
    by_lengths.set_attn_implementation(BY_LENGTHS)
    return masked, by_lengths


def generate(model, prompts, rows=8, recorder=None):
    engine = HFEngine(
        model, EOS_IDS, 0, rows, new_recorder=None if recorder is None else lambda: recorder
    )
    return engine.generate([TokenIds(ids) for ids in prompts], PARAMS, range(len(prompts)))


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "records"),
    [("llama", False), ("llama", True), ("gpt2", True), ("qwen2", False), ("mistral", False)],
)
def test_decode_steps_by_lengths_give_the_same_responses(
    name, records, rows, prompts, calls, said, monkeypatch
):
    """With rows that enter and leave, rows moved back to the first column, shared keys, and a window."""
    monkeypatch.setattr(row_cache, "SLACK_COLUMNS", 2)
    masked, by_lengths = pair(name)
    expected = generate(masked, prompts * 3, rows)
    assert calls == [] and len({len(completion.token_ids) for completion in expected}) > 3
    assert_same(generate(by_lengths, prompts * 3, rows, RunsAgain() if records else None), expected)
    assert len(calls) > 20 and said() == []
    for call in calls:
        assert call.starts.tolist() == [*range(len(call.starts))], "one query of each row"
        assert call.key.is_contiguous(), "keys are read where they lie"


def test_turns_resume_what_was_kept_by_lengths(calls):
    engines, found = [HFEngine(model, [], 0) for model in pair("llama")], []
    for engine in engines:
        ids, handle, turns = [3, 4, 5], None, []
        for turn in range(3):
            number, done = engine.submit(TokenIds(ids), PARAMS, turn, True, handle), {}
            while engine.busy:
                engine.step()
                done |= engine.collect()
            turns.append(done[number])
            ids, handle = [*ids, *done[number].token_ids, 7], done[number].parked
        found.append(turns)
    assert_same(*found)
    assert len(calls) > 20 and engines[1].reused_tokens == engines[0].reused_tokens > 0


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("why", ["heads of 4", "no lengths"])
def test_models_that_cannot_go_by_lengths_get_a_mask(why, records, prompts, calls, said):
    masked, by_lengths = pair("llama", **({"head_dim": 4} if why == "heads of 4" else {}))

    def drop(module, args, kwargs):
        return args, {
            name: value
            for name, value in kwargs.items()
            if name not in ("cu_seq_lens_q", "seqused_k")
        }

    if why == "no lengths":
        for layer in by_lengths.model.layers:
            layer.self_attn.register_forward_pre_hook(drop, with_kwargs=True)
    found = generate(by_lengths, prompts, recorder=RunsAgain() if records else None)
    assert_same(found, generate(masked, prompts))
    [warning] = said()
    assert "decode steps take a mask" in warning and why in warning and calls == []
