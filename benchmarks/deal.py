"""Experience forwards with rows dealt between ranks beside forwards of each rank's own rows, on two processes.

    python benchmarks/deal.py [--rounds 11] [--samples 64] [--hidden 256] [--longest 512] [--zero_stage 3 ...]

The script starts itself with torchrun; flags that it does not know are those of ``train_ppo``. The model is a random
Llama, which is actor, critic and reference. Both ways are measured in turns on the same samples, with three
distributions of lengths: equal, geometric (clipped, as of a policy that ends at random), and one rank with responses
three times as long as the other's. "forwards" are the experience forwards alone, "step" is ``train_on``, so without
generation. Where no rows move ("no" in the table), the ratio is noise. Log-probs and values of both ways must agree.
One thread for each process.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from agents import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.models import dealing
from openppo.trainer import PPOTrainer, build_ppo_trainer, quiet_libraries
from openppo.types import Experience, FinishReason, Prompt, Sample, Segment

RANKS, GROUP, PROMPT_TOKENS = 2, 4, 64
TOLERANCE = 1e-3
LENGTHS = ["equal", "geometric", "one rank long"]
OPTIONS = """--pretrain model --prompt_data prompts.jsonl --reward_fn reward.py --save_path saved
    --rollout_batch_size {prompts} --n_samples_per_prompt {group} --train_batch_size {samples}
    --generate_max_len {longest} --old_log_probs recompute"""


def prepare(folder: Path, hidden: int) -> None:
    """Write a random model, prompts and a reward function, none of which is used to sample."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=4,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prompts = [json.dumps({"input": f"{i:03d} say something"}) for i in range(256)]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    (folder / "reward.py").write_text("def reward_fn(response):\n    return len(response)\n")


def response_lengths(distribution: str, longest: int, n: int, rank: int) -> list[int]:
    """Lengths of a rank's responses; their mean is near half or a quarter of ``longest``."""
    dice = random.Random(rank)
    if distribution == "equal":
        return [longest // 2] * n
    if distribution == "geometric":
        draws = [math.ceil(dice.expovariate(4 / longest)) for _ in range(n)]
        return [min(max(draw, 1), longest) for draw in draws]
    mean = longest * (3 if rank == 0 else 1) // 4
    return [dice.randint(mean - mean // 8, mean + mean // 8) for _ in range(n)]


def make_samples(lengths: Sequence[int], n_ids: int, rank: int) -> list[Sample]:
    """Make a sample of each length, in groups that share a prompt."""
    dice = random.Random(100 + rank)
    samples = []
    for number, length in enumerate(lengths):
        if number % GROUP == 0:
            prompt = Prompt("", [dice.randrange(4, n_ids) for _ in range(PROMPT_TOKENS)])
        mask = [False] * PROMPT_TOKENS + [True] * length
        segment = Segment(
            prompt.token_ids + [dice.randrange(4, n_ids) for _ in range(length)],
            mask,
            [-4.0 * is_action for is_action in mask],
            versions=[0 if is_action else -1 for is_action in mask],
            n_prompt=PROMPT_TOKENS,
            finish_reason=FinishReason.LENGTH,
        )
        group = rank * len(lengths) + number // GROUP
        samples.append(Sample(prompt, group, [segment], scores={"reward_fn": dice.random()}))
    return samples


def without_dealing() -> AbstractContextManager[Any]:
    """Let each rank keep its own rows."""
    return patch.object(dealing, "_WORTH_DEALING", math.inf)


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dealt": nullcontext,
    "kept": without_dealing,
}


def is_dealt(trainer: PPOTrainer, samples: Sequence[Sample]) -> bool:
    """Return True if rows move between ranks."""
    prompts = []
    if trainer.maker.resolved.shares_prompts:
        prompts = [(sample.group, PROMPT_TOKENS) for sample in samples]
    lengths = [len(sample.last.token_ids) for sample in samples]
    deal = dealing.Deal(lengths, trainer.comm, prompts)
    return deal.shares != deal.own


def timed(trainer: PPOTrainer, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of ``work``, and the seconds until all ranks have ended it."""
    trainer.comm.all_gather_object(None)
    start = time.perf_counter()
    result = work()
    trainer.comm.all_gather_object(None)
    return result, time.perf_counter() - start


def difference(one: Experience, other: Experience) -> float:
    """Largest difference between log-probs and values of two experiences at action tokens."""
    differences = []
    for name in ("log_probs", "ref_log_probs", "values"):
        both = getattr(one, name) - getattr(other, name)
        differences.append(float(both[one.action_mask].abs().max()))
    return max(differences)


def measure(trainer: PPOTrainer, samples: list[Sample], rounds: int) -> tuple[list[str], float]:
    """Return cells of a row of the table, and the largest difference of a rank."""
    seconds: dict[str, list[float]] = defaultdict(list)
    largest = 0.0
    for number in range(rounds + 1):
        order = list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]
        outputs = {}
        for way in order:
            forward = partial(trainer.maker.forwards, samples, "recompute", values=True)
            with WAYS[way]():
                outputs[way], forwards = timed(trainer, forward)
            if number > 0:
                seconds[f"{way}, forwards"].append(forwards)
        largest = max(largest, difference(outputs["dealt"], outputs["kept"]))
        for way in order:
            with WAYS[way]():
                _, step = timed(trainer, partial(trainer.train_on, samples))
            if number > 0:
                seconds[f"{way}, step"].append(step)

    cells = []
    for part in ("forwards", "step"):
        kept = statistics.median(seconds[f"kept, {part}"])
        dealt = statistics.median(seconds[f"dealt, {part}"])
        cells += [f"{kept:.3f}", f"{dealt:.3f}", f"{kept / dealt:.3f}"]
    return cells, max(trainer.comm.all_gather_object(largest))


def measure_all(arguments: argparse.Namespace, flags: list[str]) -> None:
    """Measure on one rank of several, and print the table on the first."""
    quiet_libraries()
    n_samples = RANKS * arguments.samples
    options = OPTIONS.format(
        prompts=n_samples // GROUP, group=GROUP, samples=n_samples, longest=arguments.longest
    )
    trainer = build_ppo_trainer(parse_options(TrainPPOConfig, [*options.split(), *flags]))
    rank = trainer.comm.rank
    head = ["lengths", "tokens of ranks", "rows move"]
    head += ["kept, forwards, s", "dealt", "kept / dealt"]
    head += ["kept, step, s", "dealt", "kept / dealt", "differ by at most"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for distribution in LENGTHS:
        lengths = response_lengths(distribution, arguments.longest, arguments.samples, rank=rank)
        samples = make_samples(lengths, len(trainer.components.tokenizer), rank)
        tokens = trainer.comm.all_gather_object(sum(lengths) + PROMPT_TOKENS * len(lengths))
        cells, largest = measure(trainer, samples, arguments.rounds)
        assert largest < TOLERANCE, f"{distribution}: outputs differ by {largest:.1e}"
        moves = "yes" if is_dealt(trainer, samples) else "no"
        row = [distribution, " and ".join(map(str, tokens)), moves, *cells, f"{largest:.0e}"]
        lines.append(f"| {' | '.join(row)} |")
    if rank == 0:
        print(f"Medians of {arguments.rounds} rounds\n\n" + "\n".join(lines))
    trainer.close()


def main() -> None:
    """Start the ranks, or measure on one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=11, help="measured ones, after one to warm up"
    )
    parser.add_argument("--samples", type=int, default=64, help=f"of each rank, {GROUP} a prompt")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a response")
    arguments, flags = parser.parse_known_args()
    if "RANK" in os.environ:
        measure_all(arguments, flags)
        return

    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), arguments.hidden)
        torchrun = "-m torch.distributed.run --standalone --nproc_per_node".split()
        command = [sys.executable, *torchrun, str(RANKS), str(Path(__file__).resolve())]
        root = str(Path(__file__).resolve().parents[1])
        paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
        ended = subprocess.run(
            [*command, *sys.argv[1:]], cwd=folder, env=os.environ | settings, check=False
        )
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
