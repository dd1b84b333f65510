"""What needs a CUDA device: the same numbers as on the CPU, and PPO in bf16 on one GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.models import Actor
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.rollout.hf_engine import HFEngine
from openppo.types import Completion, SamplingParams

REPO = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.fixture
def actor() -> Actor:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Actor(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))).eval()


def test_log_probs_on_the_gpu_equal_those_on_the_cpu(actor: Actor) -> None:
    sequences = torch.randint(0, 64, (4, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20) < torch.tensor([20, 13, 7, 2])[:, None]
    on_cpu = actor(sequences, mask)
    on_gpu = actor.cuda()(sequences.cuda(), mask.cuda())
    assert (on_cpu - on_gpu.cpu()).abs().max() < 1e-4


def test_engine_on_the_gpu_reports_the_log_probs_of_a_forward(actor: Actor) -> None:
    actor.cuda()
    prompts = [[1, 5, 9], [7], [3, 3, 3, 3, 3]]
    completions = HFEngine(actor.model, [2], 0, 8).generate(prompts, SamplingParams(16), [0, 1, 2])
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([prompt + completion.token_ids], device="cuda")
        log_probs = actor(tokens, torch.ones_like(tokens, dtype=torch.bool))[0, len(prompt) :]
        assert (log_probs.cpu() - torch.tensor(completion.log_probs)).abs().max() < 1e-3


def test_recorded_decode_steps_give_the_responses_of_those_launched_one_by_one(actor: Actor) -> None:
    actor.cuda()
    prompts = [[1 + i % 60] * (1 + i % 7) for i in range(40)]
    arguments = (prompts, SamplingParams(300), list(range(40)))
    launched = HFEngine(actor.model, [2], 0, 16).generate(*arguments)
    recorded = HFEngine(actor.model, [2], 0, 16, new_recorder=CUDARecorder).generate(*arguments)
    assert len({len(completion.token_ids) for completion in launched}) > 3, "rows leave at different times"
    assert [c.token_ids for c in recorded] == [c.token_ids for c in launched]
    for one, other in zip(recorded, launched, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)


@pytest.mark.parametrize("recorder", [None, CUDARecorder], ids=["launched", "recorded"])
def test_turns_that_resume_equal_those_that_read_all_on_the_gpu(actor: Actor, recorder: Any) -> None:
    """Rows and what is kept are sized by free memory; conversations outgrow the first buffers."""
    actor.cuda()
    params = SamplingParams(40)
    engine = HFEngine(actor.model, [2], 0, new_recorder=recorder)
    turns: list[tuple[list[int], int | None]] = [([1 + i % 60] * (1 + i % 7), None) for i in range(20)]
    for turn in range(3):
        numbers = [engine.submit(ids, params, 20 * turn + i, True, handle) for i, (ids, handle) in enumerate(turns)]
        done: dict[int, Completion] = {}
        while engine.busy:
            engine.step()
            done |= engine.collect()
        prompts, seeds = [ids for ids, _ in turns], range(20 * turn, 20 * turn + 20)
        expected = HFEngine(actor.model, [2], 0).generate(prompts, params, seeds)
        turns = []
        for ids, number, whole in zip(prompts, numbers, expected, strict=True):
            assert done[number].token_ids == whole.token_ids
            assert done[number].log_probs == pytest.approx(whole.log_probs, abs=1e-3)
            turns.append(([*ids, *whole.token_ids, 7, 9], done[number].parked))
    assert engine.reused_tokens > engine.read_tokens / 2


@pytest.mark.parametrize("more", [["--cuda_graphs", "off"], ["--cuda_graphs", "on"]], ids=["launched", "recorded"])
@pytest.mark.parametrize("zero_stage", ["0", "2", "3"])
def test_ppo_runs_in_bf16_on_one_gpu(zero_stage: str, more: list[str], tmp_path: Path) -> None:
    run_ppo(tmp_path, "--zero_stage", zero_stage, *more)


@pytest.mark.parametrize("zero_stage", ["0", "3"])
def test_flash_attention_packs_samples(zero_stage: str, tmp_path: Path) -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    assert "are padded" not in run_ppo(tmp_path, "--zero_stage", zero_stage, "--flash_attn")


def execute(*words: object, cwd: Path, **more: str) -> str:
    """What Python prints; a script is named by its path in the repository."""
    script = [str(REPO / str(words[0]))] if str(words[0]).endswith(".py") else [str(words[0])]
    environment = os.environ | {"PYTHONPATH": str(REPO)} | more
    command = [sys.executable, *script, *map(str, words[1:])]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def run_ppo(tmp_path: Path, *more: str) -> str:
    """Two steps in bf16; returns the log."""
    execute("examples/sort_letters.py", "make", "--out", tmp_path, cwd=tmp_path)
    (tmp_path / "reward.py").write_text("def reward_fn(p, r, labels):\n    return [float(len(x)) for x in r]\n")
    words = """-m torch.distributed.run --standalone --nproc_per_node 1 -m openppo.cli.train_ppo --pretrain model
        --reward_fn reward.py --prompt_data prompts.jsonl --max_samples 16 --bf16 --rollout_batch_size 8
        --train_batch_size 8 --generate_max_len 8"""
    said = execute(*words.split(), *more, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "ckpt/logs/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    return said


def test_greedy_responses_on_the_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    execute("examples/sort_letters.py", "make", "--out", tmp_path, cwd=tmp_path)
    words = "-m openppo.cli.generate --pretrain model --prompt_data heldout.jsonl --max_samples 20".split()
    lines = []
    for device, more in (("gpu", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
        execute(*words, "--generate_max_len", "8", "--output_path", device, cwd=tmp_path, **more)
        lines.append([json.loads(line) for line in (tmp_path / device).read_text().splitlines()])
    for line in lines[1]:
        line["mean_log_prob"] = pytest.approx(line["mean_log_prob"], abs=1e-3)
    assert lines[0] == lines[1]
