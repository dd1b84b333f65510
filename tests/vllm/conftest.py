"""Models that vLLM's CPU build can run, and processes of their own: vLLM changes the one that it is loaded into."""

import importlib.util
import json
import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.conftest import save_tokenizer

LETTERS = "abcdefgh"
MODELS = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "head_dim": 32}),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of 32 dimensions, the fewest for vLLM on CPUs
IDS = {"vocab_size": 3 + len(LETTERS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def pytest_collection_modifyitems(items):
    """Everything in this folder is marked, and skipped where vLLM is not installed."""
    absent = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.skipif(absent, reason="vllm is not installed; docs/vllm.md says how"))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """A folder with models of several families, ``prompts.jsonl`` (input), and ``reward.py``: the share of a."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, (family, more) in MODELS.items():
        save_tokenizer(folder / name, LETTERS)
        torch.manual_seed(7)
        config = family(**IDS, **SIZES, **HEADS, initializer_range=0.2, **more)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    rng = random.Random(7)
    rows = [{"input": "".join(rng.choices(LETTERS, k=rng.randint(1, 9)))} for _ in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def reward_fn(queries, responses, labels):\n    return [r.count('a') / (len(r) + 1) for r in responses]\n"
    )
    return folder


@pytest.fixture(scope="session")
def launch(launch):
    """``launch`` of all tests, in new processes."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    return partial(launch, real=True)
