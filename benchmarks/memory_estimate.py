"""The memory estimate against measured memory, on the benchmark's models and CPUs.

    python benchmarks/memory_estimate.py [--only TEXT] [--library_defaults]

Each case is a train_ppo run of two steps in real processes. A tiny model runs first in each process, so that libraries
are loaded; memory is the peak of the resident set above that, by phase, in MiB.

Two things are kept out unless ``--library_defaults`` is given, since they depend on neither model nor options: memory
that the C library's allocator keeps for reuse (blocks from 64 KiB on go back at once) and oneDNN's AVX-512 kernels for
bf16, of which each new shape of a batch leaves about 12 MiB behind (the AVX2 ones do not).
"""

import argparse
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from openppo.build.check import check_run
from openppo.build.data import load_data
from openppo.build.objects import OwnObjects
from openppo.config import TrainPPOConfig, from_options
from openppo.strategy import DeepspeedStrategy
from openppo.tracking import PhaseTimer
from openppo.trainer import PPOTrainer, build_ppo_trainer

VOCABULARY = 4096
W1 = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SHORT = {
    "rollout_batch_size": 32,
    "micro_rollout_batch_size": 32,
    "train_batch_size": 32,
    "micro_train_batch_size": 8,
    "generate_max_len": 48,
}
LONG = SHORT | {"rollout_batch_size": 64, "micro_rollout_batch_size": 64, "train_batch_size": 64}
LONG["generate_max_len"] = 256
STORIES = SHORT | {"micro_train_batch_size": 32, "generate_max_len": 192}
PHASES = ("loading", "generation", "experience", "training")
MIB = 2**20


def cases() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, ranks and options."""
    for ranks in (1, 2):
        for bf16 in (False, True):
            for stage in (0, 2, 3):
                name = f"{'bf16' if bf16 else 'float32'}, ZeRO-{stage}"
                yield name, ranks, {**SHORT, "zero_stage": stage, "bf16": bf16}
    yield "float32, ZeRO-1", 2, {**SHORT, "zero_stage": 1}
    yield "float32, ZeRO-2, LoRA 16", 1, {**SHORT, "zero_stage": 2, "lora_rank": 16}
    yield "float32, ZeRO-3, LoRA 16", 2, {**SHORT, "zero_stage": 3, "lora_rank": 16}
    yield "bf16, ZeRO-2, LoRA 16", 2, {**SHORT, "zero_stage": 2, "lora_rank": 16, "bf16": True}
    yield (
        "float32, ZeRO-2, checkpointing",
        1,
        {**SHORT, "zero_stage": 2, "gradient_checkpointing": True},
    )
    offloaded = {"zero_stage": 2, "adam_offload": True, "ema_beta": 0.992}
    yield "float32, ZeRO-2, Adam offloaded, EMA", 2, SHORT | offloaded
    grpo = {"advantage_estimator": "group_norm", "n_samples_per_prompt": 4, "rollout_batch_size": 8}
    yield "float32, ZeRO-2, group_norm", 1, {**SHORT, "zero_stage": 2, **grpo}
    yield "W1 whole: 64 x 256 tokens, float32, ZeRO-2", 1, {**LONG, "zero_stage": 2}
    yield "W1 whole: 64 x 256 tokens, float32, ZeRO-2", 2, {**LONG, "zero_stage": 2}
    yield "stories260K, float32, ZeRO-2", 1, {**STORIES, "zero_stage": 2}


def write_models(folder: Path, sizes: dict[str, int]) -> None:
    """Policy and reward model with a tokenizer of whole words, as in the speed benchmarks."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3} | {
        f"w{i}": i for i in range(4, VOCABULARY)
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=sizes["num_attention_heads"] // 2,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=2,
        **sizes,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)


def write_prompts(file: Path, words: list[str]) -> None:
    """Prompts of 16 to 64 words, enough for two steps of each case."""
    rng = random.Random(0)
    rows = [{"input": " ".join(rng.choices(words, k=rng.randint(16, 64)))} for _ in range(128)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def process_memory(field: str) -> int:
    """Bytes; ``VmRSS`` is resident now, ``VmHWM`` its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """Let ``VmHWM`` start again from now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure_phases(timer: PhaseTimer) -> dict[str, int]:
    """Peaks of the phases that ``timer`` times from now on. Scoring counts as experience, as the estimate has it."""
    peaks: dict[str, int] = {}
    timed = timer.phase

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        forget_peak()
        with timed(name):
            yield
        seen = "experience" if name == "scoring" else name
        peaks[seen] = max(peaks.get(seen, 0), process_memory("VmHWM"))

    timer.phase = phase  # type: ignore[method-assign]
    return peaks


def run_steps(trainer: PPOTrainer, steps: int) -> None:
    """Without keeping anything."""
    for _, prompts in zip(range(steps), trainer.prompt_batches(), strict=False):
        trainer.step(prompts)


def measure(folder: Path, name: str, options: dict[str, Any]) -> None:
    """One rank of a case: print what is estimated and measured, in bytes by phase."""

    def config(kind: str) -> TrainPPOConfig:
        paths = {"prompt_data": str(folder / f"{kind}.jsonl"), "save_path": str(folder / "run")}
        if kind == "stories260K":
            return from_options(
                TrainPPOConfig, pretrain=options["stories"], reward_fn=__file__, **paths, **own
            )
        rewards = {"reward_pretrain": str(folder / kind / "reward")}
        return from_options(
            TrainPPOConfig, pretrain=str(folder / kind / "policy"), **rewards, **paths, **own
        )

    own = {key: value for key, value in options.items() if key != "stories"}
    strategy = DeepspeedStrategy(config("tiny").deepspeed)
    warm_up = build_ppo_trainer(config("tiny"), strategy)
    run_steps(warm_up, 1)
    warm_up.components.trackers.close()
    del warm_up
    checked = check_run(config(name), strategy, source=None, objects=OwnObjects())
    estimate = load_data(checked).estimate
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = process_memory("VmRSS")
    forget_peak()
    trainer = build_ppo_trainer(config(name), strategy)
    peaks = {"loading": process_memory("VmHWM")}
    phases = measure_phases(trainer.maker.hooks.timer)
    run_steps(trainer, 2)
    peaks |= phases
    gathered = strategy.comm.all_gather_object({phase: peaks[phase] - before for phase in PHASES})
    assert estimate is not None
    if strategy.is_main:
        measured = {phase: max(rank[phase] for rank in gathered) for phase in PHASES}
        print(
            "RESULT", json.dumps({"measured": measured, "estimated": estimate.phases}), flush=True
        )
    trainer.close()


def reward_fn(response: str) -> float:
    """For models without a reward model."""
    return float(len(response) % 7)


def run_case(
    folder: Path, ranks: int, options: dict[str, Any], library_defaults: bool
) -> dict[str, dict[str, float]]:
    """Estimated and measured bytes by phase."""
    kind = "stories260K" if "stories" in options else "w1"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [
        sys.executable,
        *torchrun,
        __file__,
        "--measure",
        str(folder),
        kind,
        json.dumps(options),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not library_defaults:
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    if result is None:
        raise RuntimeError(done.stderr)
    return json.loads(result.removeprefix("RESULT"))


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="run cases whose 'name, N ranks' starts with this"
    )
    parser.add_argument(
        "--library_defaults", action="store_true", help="with allocator and oneDNN as they come"
    )
    parser.add_argument(
        "--stories", default=os.environ.get("OPENPPO_ASSETS", "") + "/models/stories260K"
    )
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        folder, name, options = given.measure
        measure(Path(folder), name, json.loads(options))
        return
    print("| case | ranks | loading | generation | experience | training | peak | off by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, sizes in (("w1", W1), ("tiny", TINY)):
            write_models(folder / kind, sizes)
            write_prompts(folder / f"{kind}.jsonl", [f"w{i}" for i in range(4, VOCABULARY)])
        write_prompts(folder / "stories260K.jsonl", ["dog", "cat", "sun", "big", "the", "a", "and"])
        for case, ranks, options in cases():
            if not f"{case}, {ranks} ranks".startswith(given.only):
                continue
            if case.startswith("stories260K"):
                options = options | {"stories": given.stories}
            got = run_case(folder, ranks, options, given.library_defaults)
            pairs = [(got["estimated"][phase], got["measured"][phase]) for phase in PHASES]
            cells = [
                f"{estimated / MIB:.0f} / {measured / MIB:.0f}" for estimated, measured in pairs
            ]
            estimated, measured = (
                max(got[kind][phase] for phase in PHASES) for kind in ("estimated", "measured")
            )
            cells.append(f"{estimated / MIB:.0f} / {measured / MIB:.0f}")
            cells.append(f"{100 * (estimated / measured - 1):+.0f} %")
            print(f"| {case} | {ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
