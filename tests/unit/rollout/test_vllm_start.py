"""What vLLM's start meets and leaves in the process, with a stand-in for the package."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.media import TokenIds
from openppo.rollout import vllm_engine
from openppo.types import SamplingParams

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
    before, n_threads = (
        {name: os.environ.get(name) for name in ("RANK", STORE)},
        torch.get_num_threads(),
    )
    config = from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="f.py")
    vllm_engine._start("m", config, 16, sleeps=False, reads_images=False)
    assert met == {"RANK": "1", STORE: None}
    assert before == {name: os.environ.get(name) for name in ("RANK", STORE)}
    assert torch.get_num_threads() == n_threads


class Model(torch.nn.Module):
    """Its next token depends on a weight, a buffer and a tensor that no list of the module has."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(7.0), requires_grad=False)
        self.register_buffer("buffer", torch.tensor(3.0))
        self.scale, self.hidden = torch.tensor(2.0), [torch.tensor(1.0)]

    def next_token(self, last):
        return int(self.weight * last * self.scale + self.buffer + 5 * self.hidden[0]) % 97


class SleepingLLM:
    """Stand-in for vLLM on a GPU: sleep level 2 drops the weight, and what ``loses`` names."""

    loses = ()

    def __init__(self, **arguments):
        assert arguments["enable_sleep_mode"]
        self.llm_engine = self.renderer = self
        self.engine_core, self.calls, self.requests, self.cache = SimpleNamespace(), [], {}, {}
        self.model, self.sleeps = Model(), set()

    def get_model(self):
        return self.model

    def collective_rpc(self, function, args=()):
        assert "weights" not in self.sleeps
        self.calls.append(function.__name__)
        return [function(self, *args)]

    def sleep(self, level):
        self.calls.append(level)
        self.sleeps = {"weights", "kv_cache"}
        for tensor in [self.model.weight, *map(self.tensor, self.loses)] if level == 2 else ():
            tensor.zero_()

    def tensor(self, name):
        return self.model.hidden[0] if name == "hidden" else getattr(self.model, name)

    def wake_up(self, tags):
        assert set(tags) <= self.sleeps
        self.sleeps -= set(tags)

    def reset_encoder_cache(self):
        self.calls.append("features")  # of images, with the old weights

    def reset_prefix_cache(self):
        self.cache.clear()

    def render_cmpl(self, prompts):
        return prompts

    def add_request(self, number, prompt, params):
        self.requests[number] = prompt["prompt_token_ids"], params["max_tokens"]

    def abort_request(self, numbers):
        for number in numbers:
            self.requests.pop(number, None)

    def step(self):
        assert not self.sleeps
        [(number, (prompt, n_new))], self.requests = self.requests.items(), {}
        ids = self.cache.setdefault(tuple(prompt), [*prompt])  # of whatever weights there were
        while len(ids) < len(prompt) + n_new:
            ids.append(self.model.next_token(ids[-1]))
        new = ids[len(prompt) :]
        answer = SimpleNamespace(
            token_ids=new, finish_reason="length", logprobs=[{token: None} for token in new]
        )
        given = {"request_id": number, "prompt_token_ids": prompt, "num_cached_tokens": 0}
        return [SimpleNamespace(outputs=[answer], finished=True, **given)]


@pytest.fixture
def sleeping(monkeypatch):
    """``sleeping(loses)`` makes an engine over the stand-in, and a function that samples inside ``with_weights``."""
    packages = {name: ModuleType(name) for name in ("vllm", "vllm.sampling_params")}
    packages["vllm"].LLM, packages["vllm"].SamplingParams = SleepingLLM, dict
    packages["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(FINAL_ONLY=0)
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(vllm_engine, "check_vllm", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)

    def take_in(llm, weights):
        for name, weight in weights:
            getattr(llm.model, name).copy_(weight)

    monkeypatch.setattr(vllm_engine, "_take_in", take_in)
    weights = SimpleNamespace(merged=lambda: iter([("weight", torch.tensor(5.0))]))

    def make(*loses):
        monkeypatch.setattr(SleepingLLM, "loses", loses)
        config = from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="f.py")
        engine = vllm_engine.VLLMEngine("m", config, 16, [1])

        def sample():
            with engine.with_weights(weights):
                return engine.generate([TokenIds([4])], SamplingParams(8, temperature=0.0), [0])[
                    0
                ].token_ids

        return engine, sample

    return make


EXPECTED = [(5 * 2 * 4 + 3 + 5) % 97]
for _ in range(7):
    EXPECTED.append((5 * 2 * EXPECTED[-1] + 3 + 5) % 97)


@pytest.mark.parametrize(
    ("loses", "level"), [((), 2), (("buffer",), 1), (("scale",), 1), (("buffer", "scale"), 1)]
)
def test_a_sleep_that_loses_tensors_is_replaced_by_level_1(loses, level, sleeping, caplog):
    engine, sample = sleeping(*loses)
    assert [sample() for _ in range(3)] == [EXPECTED] * 3
    levels = [call for call in engine._llm.calls if isinstance(call, int)]
    assert levels == [2, level, level, level], "the trial, and one after each rollout"
    counts = [engine._llm.calls.count(call) for call in ("take_in", "features")]
    assert counts == [2 + 1 + 1] * 2, "all ranks hand over equally often"
    assert ("level 1 is used" in caplog.text) == (level == 1)


def test_what_a_sleep_loses_for_good_ends_the_run(sleeping):
    with pytest.raises(ValueError, match="sleep level 2.*Use --rollout_engine hf"):
        sleeping("hidden")[1]()
