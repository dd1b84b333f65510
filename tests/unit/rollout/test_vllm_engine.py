"""What is said where vLLM is missing or cannot be used; what it samples is tested with the real one in tests/vllm."""

import importlib.util

import pytest

from openppo.config import TrainPPOConfig, from_options
from openppo.experience.maker import old_log_probs_from
from openppo.rollout.vllm_engine import VLLMEngine, VLLMOptions

BASE = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py"}


def test_without_vllm_the_engine_names_the_flag_and_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--rollout_engine vllm .*pip install openppo\[vllm\]"):
        VLLMEngine("no such model", VLLMOptions(bf16=False, max_tokens=8, memory_share=0.1), [1])


def test_log_probs_of_another_implementation_are_recomputed_unless_asked_for():
    found = [
        old_log_probs_from(from_options(TrainPPOConfig, **BASE, rollout_engine=engine, old_log_probs=old), True)
        for engine, old in (("hf", "auto"), ("vllm", "auto"), ("vllm", "rollout"))
    ]
    assert found == ["rollout", "recompute", "rollout"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_engine": "vllm", "load_in_4bit": True, "lora_rank": 4}, "--rollout_engine vllm .*--load_in_4bit"),
        *(({"vllm_gpu_memory_utilization": share}, "--vllm_gpu_.* must lie in") for share in (0.0, 1.0, -0.1)),
    ],
)
def test_weights_in_4_bits_and_shares_that_are_none_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        from_options(TrainPPOConfig, **BASE, **options).validate(1)
