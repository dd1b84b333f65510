"""What needs a CUDA device: the same numbers as on the CPU, and PPO on one GPU or two."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.media import TokenIds
from openppo.models import Actor
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.rollout.hf_engine import HFEngine
from openppo.types import Completion, FinishReason, ModelInputs, SamplingParams
from tests.fork_server import PYTHON_PATH
from tests.gpu.devices import DEVICES, ON_CUDA, recorder, rounding_borders

REPO = Path(__file__).parents[2]
REWARD = "def reward_fn(response):\n    return float(len(response))\n"
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two nccl ranks need two GPUs")


def needs_cuda(test: Any) -> Any:
    """A test that the CPU says nothing about."""
    for mark in ON_CUDA:
        test = mark(test)
    return test


@pytest.fixture
def actor() -> Actor:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return Actor(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))).eval()


@needs_cuda
def test_log_probs_on_the_gpu_equal_those_on_the_cpu(actor: Actor) -> None:
    sequences = torch.randint(0, 64, (4, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(20) < torch.tensor([20, 13, 7, 2])[:, None]
    on_cpu = actor(ModelInputs(sequences, mask))
    on_gpu = actor.cuda()(sequences.cuda(), mask.cuda())
    assert (on_cpu - on_gpu.cpu()).abs().max() < 1e-4


@needs_cuda
def test_engine_on_the_gpu_reports_the_log_probs_of_a_forward(actor: Actor) -> None:
    actor.cuda()
    prompts = [[1, 5, 9], [7], [3, 3, 3, 3, 3]]
    completions = HFEngine(actor.model, [2], 0, 8).generate(
        [TokenIds(ids) for ids in prompts], SamplingParams(16), [0, 1, 2]
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([prompt + completion.token_ids], device="cuda")
        log_probs = actor(ModelInputs(tokens, torch.ones_like(tokens, dtype=torch.bool)))[
            0, len(prompt) :
        ]
        assert (log_probs.cpu() - torch.tensor(completion.log_probs)).abs().max() < 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_decode_steps_give_the_responses_of_launched_ones(
    actor: Actor, device: str
) -> None:
    actor.to(device)
    prompts = [[1 + i % 60] * (1 + i % 7) for i in range(40)]
    requests = [TokenIds(prompt) for prompt in prompts]
    arguments = (requests, SamplingParams(300 if device == "cuda" else 60), list(range(40)))
    launched = HFEngine(actor.model, [2], 0, 16).generate(*arguments)
    recorded = HFEngine(actor.model, [2], 0, 16, new_recorder=recorder(device)).generate(*arguments)
    assert len({len(completion.token_ids) for completion in launched}) > 3, (
        "rows leave at different times"
    )
    assert rounding_borders(recorded, launched) <= 2, (
        "of some 12,000 draws one falls near a border in 100 runs"
    )


def test_a_draw_at_a_border_differs_by_one_id_and_is_counted() -> None:
    def completions(*token_ids: int) -> list[Completion]:
        return [
            Completion(
                list(token_ids), [-1.0] * len(token_ids), [0] * len(token_ids), FinishReason.LENGTH
            )
        ]

    assert rounding_borders(completions(5, 6, 7), completions(5, 6, 7)) == 0
    assert rounding_borders(completions(5, 6, 7), completions(5, 7, 1, 2)) == 1
    for other in (completions(5, 9, 7), completions(5, 6)):
        with pytest.raises(AssertionError):
            rounding_borders(completions(5, 6, 7), other)


@pytest.mark.parametrize("new_recorder", [None, CUDARecorder], ids=["launched", "recorded"])
@needs_cuda
def test_turns_that_resume_equal_those_that_read_all_on_the_gpu(
    actor: Actor, new_recorder: Any
) -> None:
    """Rows and what is kept are sized by free memory; conversations outgrow the first buffers."""
    actor.cuda()
    params, n_different = SamplingParams(40), 0
    engine = HFEngine(actor.model, [2], 0, new_recorder=new_recorder)
    turns: list[tuple[list[int], int | None]] = [
        ([1 + i % 60] * (1 + i % 7), None) for i in range(20)
    ]
    for turn in range(3):
        numbers = [
            engine.submit(TokenIds(ids), params, 20 * turn + i, True, handle)
            for i, (ids, handle) in enumerate(turns)
        ]
        done: dict[int, Completion] = {}
        while engine.busy:
            engine.step()
            done |= engine.collect()
        prompts, seeds = [ids for ids, _ in turns], range(20 * turn, 20 * turn + 20)
        expected = HFEngine(actor.model, [2], 0).generate(
            [TokenIds(ids) for ids in prompts], params, seeds
        )
        answers = [done[number] for number in numbers]
        n_different += rounding_borders(answers, expected)
        turns = [
            ([*ids, *a.token_ids, 7, 9], a.parked) for ids, a in zip(prompts, answers, strict=True)
        ]
    assert n_different <= 2
    assert engine.reused_tokens > engine.read_tokens / 2


@pytest.mark.parametrize(
    "more", [["--cuda_graphs", "off"], ["--cuda_graphs", "on"]], ids=["launched", "recorded"]
)
@pytest.mark.parametrize("zero_stage", ["0", "2", "3"])
@needs_cuda
def test_ppo_runs_in_bf16_on_one_gpu(zero_stage: str, more: list[str], tmp_path: Path) -> None:
    run_ppo(tmp_path, "--zero_stage", zero_stage, *more)


@pytest.mark.parametrize("zero_stage", ["0", "3"])
@needs_cuda
def test_flash_attention_packs_samples(zero_stage: str, tmp_path: Path) -> None:
    pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    assert "are padded" not in run_ppo(tmp_path, "--zero_stage", zero_stage, "--flash_attn")


def execute(*words: object, cwd: Path, **more: str) -> str:
    """What Python prints; a script is named by its path in the repository."""
    script = [str(REPO / str(words[0]))] if str(words[0]).endswith(".py") else [str(words[0])]
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH} | more
    command = [sys.executable, *script, *map(str, words[1:])]
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def run_ppo(
    folder: Path, *more: str, n_ranks: int = 1, dtype: str = "--bf16", **environment: str
) -> str:
    """Two steps; returns the log."""
    folder.mkdir(exist_ok=True)
    execute("examples/sort_letters.py", "make", "--out", folder, cwd=folder)
    (folder / "reward.py").write_text(REWARD)
    words = f"""-m torch.distributed.run --standalone --nproc_per_node {n_ranks} -m openppo.cli.train_ppo
        --pretrain model --reward_fn reward.py --prompt_data prompts.jsonl --max_samples 16 {dtype}
        --rollout_batch_size 8 --train_batch_size 8 --generate_max_len 8"""
    said = execute(*words.split(), *more, cwd=folder, **environment)
    assert [row["step"] for row in metrics_of(folder)] == [1, 2]
    return said


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """One row for each step."""
    return [
        json.loads(line) for line in (folder / "ckpt/logs/metrics.jsonl").read_text().splitlines()
    ]


TRAINED = ("reward", "kl", "policy_loss", "value_loss", "response_length", "grad_norm")


@pytest.mark.parametrize("zero_stage", ["2", "3"])
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS]),
    ],
)
def test_two_ranks_train_as_one_does(device: str, zero_stage: str, tmp_path: Path) -> None:
    """In float32, so that both sample the same tokens; on GPUs over nccl."""
    environment = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    made = []
    for n_ranks in (1, 2):
        folder = tmp_path / str(n_ranks)
        run_ppo(folder, "--zero_stage", zero_stage, n_ranks=n_ranks, dtype="", **environment)
        made.append(
            [{name: row[name] for name in TRAINED if name in row} for row in metrics_of(folder)]
        )
    assert len(made[0][0]) >= 5
    for one, two in zip(*made, strict=True):
        assert two == pytest.approx(one, rel=1e-2, abs=1e-4)


def above_estimate(metrics: Mapping[str, float], allowed: float = 1.1) -> dict[str, float]:
    """Peak over estimate, by phase, where it is more than ``allowed``."""
    names = [name.removesuffix("_peak_gib") for name in metrics if name.endswith("_peak_gib")]
    found = {
        name: metrics[f"{name}_peak_gib"] / metrics[f"{name}_estimated_gib"]
        for name in names
        if f"{name}_estimated_gib" in metrics
    }
    assert found, "no phase has both a peak and an estimate"
    return {name.removeprefix("memory/"): share for name, share in found.items() if share > allowed}


def test_peaks_are_compared_with_estimates_by_phase() -> None:
    metrics = {"memory/training_peak_gib": 2.3, "memory/training_estimated_gib": 2.0, "reward": 1.0}
    metrics |= {
        "memory/step_peak_gib": 2.3,
        "memory/step_estimated_gib": 2.2,
        "memory/scoring_peak_gib": 9.0,
    }
    assert above_estimate(metrics) == {"training": pytest.approx(1.15)}


@needs_cuda
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_peak_memory_is_within_a_tenth_above_the_estimate(tuning: str, tmp_path: Path) -> None:
    """170 million parameters, so that what libraries take for themselves is a small part."""
    models = runpy.run_path(str(REPO / "benchmarks" / "gpu" / "models.py"))
    models["build"](models["SHAPES"]["small"], tmp_path / "assets")
    (tmp_path / "reward.py").write_text(REWARD)
    words = """-m openppo.cli.train_ppo --pretrain assets/policy --reward_fn reward.py --bf16 --max_steps 2
        --prompt_data assets/prompts.jsonl --input_key input --prompt_max_len 256 --generate_max_len 128
        --rollout_batch_size 32 --train_batch_size 32 --micro_train_batch_size 8 --num_episodes 2"""
    execute(*words.split(), *(["--lora_rank", "16"] if tuning == "lora" else []), cwd=tmp_path)
    assert above_estimate(metrics_of(tmp_path)[-1]) == {}


@needs_cuda
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
