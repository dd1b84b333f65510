"""What the corridor of groups costs beside the engine alone, on a model whose decode step takes about a millisecond.

    python benchmarks/corridor.py [--rounds 21] [--model FOLDER] [--prompts 4] [--tokens 256]

In turns, the same prompts and seeds are answered by ``Engine.generate`` and as groups of single responses, which a
future each brings from the engine's thread to the loop's. Responses must be equal bit for bit. The model is stories260K
of the assets, or else a random Llama of its size.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from openppo.rollout.driver import EngineDriver
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.players import ResponsePlayer
from openppo.sources.groups import GroupPlayer, PlayedGroup, play_together
from openppo.sources.held_out import held_out_group
from openppo.tracking import Metrics
from openppo.types import Completion, Prompt, Sample, SamplingParams, SingleProcess

T = TypeVar("T")
ASSETS = Path(os.environ.get("OPENPPO_ASSETS", "../shared/assets"))
SAMPLES, PROMPT_TOKENS = 2, 32
LIMIT = 1.03
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def load(folder: Path) -> PreTrainedModel:
    """Load the model of ``folder``, or make a random one if it is missing."""
    if folder.is_dir():
        print(f"{folder.name}:")
        return AutoModelForCausalLM.from_pretrained(folder).eval()
    print(f"no {folder.name}: a random Llama of its size")
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of ``work``, and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=21, help="measured ones, after one to warm up"
    )
    parser.add_argument("--model", type=Path, default=ASSETS / "models/stories260K")
    parser.add_argument("--prompts", type=int, default=4, help=f"of {SAMPLES} samples each")
    parser.add_argument("--tokens", type=int, default=256, help="of a response")
    arguments = parser.parse_args()

    engine = HFEngine(load(arguments.model), eos_token_ids=(), pad_token_id=0)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 500, (arguments.prompts, PROMPT_TOKENS), generator=generator).tolist()
    params = SamplingParams(arguments.tokens)
    groups = [
        held_out_group(Prompt("", ids), number, params=params, n_samples=SAMPLES, seed=1)
        for number, ids in enumerate(rows)
    ]
    prompts = [group.prompt for group in groups for _ in group.seeds]
    seeds = [seed for group in groups for seed in group.seeds]
    driver = EngineDriver(engine)
    player = GroupPlayer({"": ResponsePlayer(driver)}, driver)

    def generate() -> list[Completion]:
        return engine.generate(prompts, params, seeds)

    def play() -> list[PlayedGroup]:
        return play_together(player, groups, SingleProcess(), metrics=Metrics())

    alone: list[float] = []
    in_corridor: list[float] = []
    for number in range(arguments.rounds + 1):
        if number % 2 == 0:
            completions, seconds_alone = timed(generate)
            played, seconds_in_corridor = timed(play)
        else:
            played, seconds_in_corridor = timed(play)
            completions, seconds_alone = timed(generate)

        samples: list[Sample] = [sample for group in played for sample in group.samples]
        for sample, completion in zip(samples, completions, strict=True):
            assert sample.last.response_ids == completion.token_ids
            assert sample.last.log_probs[PROMPT_TOKENS:] == completion.log_probs
        if number > 0:
            alone.append(seconds_alone)
            in_corridor.append(seconds_in_corridor)
    player.close()

    ratio = statistics.median(in_corridor) / statistics.median(alone)
    step = 1000 * statistics.median(alone) / arguments.tokens
    print(
        f"{len(prompts)} responses of {arguments.tokens} tokens, medians of {arguments.rounds} rounds\n\n"
        "| engine alone, s | in the corridor, s | ratio | a decode step, ms | at most 1.03 |\n"
        "| --- | --- | --- | --- | --- |\n"
        f"| {statistics.median(alone):.3f} | {statistics.median(in_corridor):.3f} | {ratio:.3f} | {step:.2f} | "
        f"{'yes' if ratio <= LIMIT else 'no'} |"
    )


if __name__ == "__main__":
    main()
