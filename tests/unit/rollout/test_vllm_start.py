"""What vLLM's start meets and leaves in the process, with a stand-in for the package."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.rollout import vllm_engine

STORE = "TORCHELASTIC_USE_AGENT_STORE"


@pytest.mark.parametrize("launched", [True, False])
def test_vllm_does_not_meet_the_store_of_torchrun(launched, monkeypatch):
    met = {}

    class LLM:
        def __init__(self, **arguments):
            met.update({name: os.environ.get(name) for name in ("RANK", STORE)})
            torch.set_num_threads(2)
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace())

    package = ModuleType("vllm")
    package.LLM = LLM
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    for name, value in (("RANK", "1"), (STORE, "True")):
        monkeypatch.setenv(name, value) if launched else monkeypatch.delenv(name, raising=False)
    before, n_threads = {name: os.environ.get(name) for name in ("RANK", STORE)}, torch.get_num_threads()
    config = from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="f.py")
    vllm_engine._start("m", config, 16, sleeps=False)
    assert met == {"RANK": "1", STORE: None}
    assert before == {name: os.environ.get(name) for name in ("RANK", STORE)}
    assert torch.get_num_threads() == n_threads
