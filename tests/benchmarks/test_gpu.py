"""The benchmark for GPUs runs, here with a tiny model on the CPU, and its counts of work are those of others."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", BENCHMARKS / "peers" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


measure, gpu_models = load("measure"), load("gpu_models")
SIZE = measure.ModelSize(layers=6, hidden=64, heads_width=64, kv_width=32, intermediate=256, vocabulary=512)


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | more
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd="/", env=environment)


@pytest.mark.slow
def test_a_tiny_model_runs_on_a_cpu_and_no_response_ends_early(tmp_path: Path) -> None:
    ended = run("--shape", "tiny", "--steps", "1", "--cache", str(tmp_path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [
        [c.strip() for c in line.strip("|").split("|")] for line in re.findall(r"^\| \w+, tiny.*", ended.stdout, re.M)
    ]
    assert [row[0] for row in rows] == [
        f"{side}, tiny, {t}" for t in ("full", "lora") for side in ("OpenPPO", "transformers")
    ]
    for row in rows:
        generation, prompts, training, peak = (float(row[i]) for i in (1, 2, 5, 10))
        assert 0 <= prompts < generation and training >= 0 and peak > 0
        # 8 responses of 16 tokens: the printed seconds are rounded
        assert 128 / (generation + 0.006) <= float(row[7]) + 1 <= 128 / max(generation - 0.006, 1e-6) + 2


def test_eos_has_probability_0_and_others_have_not(tmp_path: Path) -> None:
    gpu_models.build(gpu_models.SHAPES["tiny"], tmp_path / "tiny")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "tiny" / "policy", dtype=torch.float32)
    ids = torch.randint(4, gpu_models.N_WORDS, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        probabilities = model(ids).logits.softmax(-1)
    assert (probabilities[..., gpu_models.EOS] == 0).all()
    assert probabilities.max() < 0.01 and (probabilities > 0).sum(-1).eq(gpu_models.N_WORDS - 1).all()


def test_figures_of_the_tiny_model_are_not_written_and_large_ones_want_a_gpu() -> None:
    refused = run("--shape", "tiny", "--write")
    assert refused.returncode == 2 and "--write keeps no figures of --shape tiny" in refused.stderr
    refused = run("--shape", "0.5b")
    assert refused.returncode == 2 and "only --shape tiny runs on a CPU" in refused.stderr


def counted_by_torch(adapters: bool, tokens: int) -> tuple[int, int]:
    """Operations of a forward and backward as torch counts them, and entries of adapters."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    with FlopCounterMode(display=False) as counter:
        ids = torch.arange(tokens)[None]
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops(), sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("tokens", [16, 400])
def test_operations_of_training_are_those_that_torch_counts(adapters: bool, tokens: int) -> None:
    counted, n_adapters = counted_by_torch(adapters, tokens)
    # with all tokens as response there are logits for all; torch's eager attention computes the other half too
    mine = measure.training_flops(SIZE, 0, tokens, n_adapters) + 6 * SIZE.layers * SIZE.heads_width * tokens**2
    # of the first layer nothing is asked about its frozen input
    assert mine == pytest.approx(counted, rel=0.04 if adapters else 0.005)


def test_prompt_tokens_need_no_logits_and_a_critic_none_at_all() -> None:
    whole, part = measure.training_flops(SIZE, 0, 30), measure.training_flops(SIZE, 10, 20)
    assert whole - part == 6 * 512 * 64 * 10
    assert part - measure.training_flops(SIZE, 10, 20, has_head=False) == 6 * 512 * 64 * 20


def test_decode_reads_the_weights_once_a_step_and_all_tokens_before() -> None:
    # two rows of 3 prompt and 3 response tokens: two steps, which see 4 and 5 tokens in each row
    weights = 2 * (6 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 256) + 512 * 64)
    cache = 2 * (4 + 5) * 6 * (32 + 32) * 2
    assert measure.decode_bytes(SIZE, rows=2, prompt=3, response=3) == 2 * weights + cache


@pytest.mark.parametrize(("name", "billions"), [("0.5b", 0.494), ("7b", 7.616)])
def test_models_have_the_sizes_of_qwen(name: str, billions: float) -> None:
    shape = gpu_models.SHAPES[name]
    width = shape.hidden // shape.heads
    size = measure.ModelSize(
        shape.layers, shape.hidden, shape.hidden, width * shape.kv_heads, shape.intermediate, shape.vocabulary
    )
    assert (size.body + size.head * (1 if shape.tied else 2)) / 1e9 == pytest.approx(billions, abs=0.001)
