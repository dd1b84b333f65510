"""A model that vLLM's CPU build can run, and a way to start processes: vLLM changes the one that it is loaded into."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

REPO = Path(__file__).resolve().parents[2]
LETTERS = "abcdefgh"
VOCABULARY = ["<pad>", "<eos>", "<unk>", *LETTERS]
SECONDS_UNTIL_A_HANG_IS_CERTAIN = 500


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is marked, and skipped where vLLM is not installed."""
    absent = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.skipif(absent, reason="vllm is not installed; docs/vllm.md says how"))


def write_model(folder: Path, family: type[PreTrainedConfig] = LlamaConfig, **more: object) -> None:
    """A model with heads of 32 dimensions, the fewest that vLLM's attention on CPUs has, and its tokenizer."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = family(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **more,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of several families, ``prompts.jsonl`` (input), and ``reward.py``: the share of a."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "llama", tie_word_embeddings=False)
    write_model(folder / "tied", tie_word_embeddings=True)
    write_model(folder / "qwen2", Qwen2Config, tie_word_embeddings=True)
    write_model(folder / "qwen3", Qwen3Config, tie_word_embeddings=False, head_dim=32)
    rng = random.Random(7)
    rows = [{"input": "".join(rng.choices(LETTERS, k=rng.randint(1, 9)))} for _ in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(
        "def reward_fn(queries, responses, labels):\n    return [r.count('a') / (len(r) + 1) for r in responses]\n"
    )
    return folder


@pytest.fixture(scope="session")
def launch() -> Callable[..., str]:
    """``launch(ranks, "script.py" or "-m", ...)`` runs Python, under torchrun unless ``ranks`` is 0, until it ends."""

    def run(ranks: int, *arguments: object) -> str:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
        command = [sys.executable, *torchrun, *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_UNTIL_A_HANG_IS_CERTAIN,
        )
        if done.returncode != 0:
            pytest.fail(f"{' '.join(command)}\nended with status {done.returncode}. Its output:\n{done.stdout}")
        return done.stdout

    return run
