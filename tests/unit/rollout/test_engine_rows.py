"""How many responses the engine decodes together: as many as are asked for, or as fit when it wakes."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from openppo.models.size import cache_elements
from openppo.rollout import hf_engine
from openppo.rollout.hf_engine import HFEngine, rows_that_fit
from openppo.rollout.row_cache import SLACK_COLUMNS
from openppo.types import SamplingParams

PROMPT, NEW = [3, 4, 5], 7


class Weights:
    """Those of the module, which are whole."""

    def gathered(self, in_lockstep):
        return nullcontext()


def decoded_together(model, monkeypatch, free, given):
    """Most rows of one forward for 300 prompts, where ``free`` bytes are free on waking."""
    monkeypatch.setattr(hf_engine, "free_memory", lambda device: free)
    engine = HFEngine(model, [], 0, given)
    rows = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    with engine.with_weights(Weights()):  # type: ignore[arg-type]
        engine.generate([[*PROMPT, i % 20] for i in range(300)], SamplingParams(NEW), list(range(300)))
    hook.remove()
    return max(rows)


@pytest.mark.parametrize("given", [3, 70])
def test_max_num_seqs_wins_over_free_memory(given, models, monkeypatch):
    assert decoded_together(models["llama"], monkeypatch, free=1, given=given) == given


def test_a_cpu_decodes_64_rows(models, monkeypatch):
    assert hf_engine.free_memory(torch.device("cpu")) is None
    assert decoded_together(models["llama"], monkeypatch, free=None, given=None) == 64


@pytest.mark.parametrize(("room", "rows"), [(0.3, 1), (5.5, 5), (17.2, 16), (1000, 64)])
def test_the_cache_takes_half_of_what_is_free(room, rows, models, monkeypatch):
    """``room`` rows fit in half of it."""
    row = 4 * cache_elements(models["llama"].config) * (len(PROMPT) + 1 + NEW + SLACK_COLUMNS)
    assert decoded_together(models["llama"], monkeypatch, free=int(2 * room * row), given=None) == rows


def test_rows_are_counted_in_eights_up_to_the_most():
    assert [rows_that_fit(2 * 10 * n, 10, 250) for n in (0, 1, 7, 8, 15, 16, 249, 250, 900)] == [
        *(1, 1, 7, 8, 8, 16, 248, 250, 250)
    ]


def test_a_gpu_is_sized_by_its_free_memory(models, monkeypatch):
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    assert hf_engine.free_memory(torch.device("cuda", 0)) == 30
    assert freed, "blocks that torch keeps are free too"
    monkeypatch.setattr(HFEngine, "_device", SimpleNamespace(type="cuda"))
    assert HFEngine(models["llama"], [], 0).max_batch_size == 256
