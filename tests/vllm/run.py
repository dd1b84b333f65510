"""``run.py MODELS OUT`` samples with vLLM; ``run.py OPTIONS`` is train_ppo with every weight partitioned under ZeRO-3.

The first writes completions to ``OUT``; its model changes in between, and ``OUT/<stage>`` keeps the weights of a stage.
Two ranks share one vLLM and write ``OUT/<rank>.json``.
"""

import gc
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from openppo.cli.options import parse_options
from openppo.config import DeepSpeedConfig, GenerationConfig, PPOModelConfig, TrainPPOConfig
from openppo.media import TokenIds
from openppo.models import Actor
from openppo.models.sampled_ids import SampledIds
from openppo.rollout.vllm_engine import VLLMEngine
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.comm import init_process_group
from openppo.strategy.trainable_model import merged_weights
from openppo.trainer import build_ppo_trainer
from openppo.types import Interrupted, SamplingParams

CONFIG = TrainPPOConfig(
    PPOModelConfig("unread"),
    deepspeed=DeepSpeedConfig(bf16=False),
    generation=GenerationConfig(vllm_gpu_memory_utilization=0.1),
)
EOS = [1, 6]
PROMPTS = [[3, 4, 5], [7], [8, 8, 3, 9, 10, 4], [5, 3], [9, 9, 9], [4, 10, 7, 3]]
LONG_PROMPT = [
    3 + i % 8 for i in range(140)
]  # longer than a block of vLLM's cache, which is kept by its tokens
SAMPLING = {
    "plain": SamplingParams(12),
    "warm": SamplingParams(12, temperature=0.7),
    "cut": SamplingParams(12, temperature=1.3, top_p=0.8, top_k=5),
    "stops": SamplingParams(12, stop=("ab", "hg", "ee"), stop_token_ids=(8,)),
    "late": SamplingParams(12, stop=("b", "c"), stop_token_ids=(8, 9), min_new_tokens=6),
}
LEFT_OUT = (range(5, 6), range(9, 11))
GREEDY = SamplingParams(10, temperature=0.0)
PARTITION_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class Weights:
    """Those of a model on one rank."""

    def __init__(self, model):
        self.model = model

    def gathered(self, in_lockstep):
        return nullcontext()

    def merged(self):
        return merged_weights(self.model)


def text_of(ids):
    return "".join("___abcdefgh"[i] for i in ids)


def engine_of(folder, config=CONFIG, max_tokens=200, **more):
    """An engine that has no weights yet."""
    return VLLMEngine(str(folder), config, max_tokens, EOS, decode=text_of, **more)


def plain(completions):
    return [vars(c) | {"finish_reason": c.finish_reason.value} for c in completions]


def sampled(engine, weights):
    """Completions of each way to sample, in batches, alone and entering one after the other."""
    seeds, params = [100 + i for i in range(len(PROMPTS))], SAMPLING["plain"]
    with engine.with_weights(weights):
        found = {
            name: plain(engine.generate([TokenIds(ids) for ids in PROMPTS], kind, seeds))
            for name, kind in SAMPLING.items()
        }
        found["alone"] = [
            plain(engine.generate([TokenIds(p)], params, [s]))[0]
            for p, s in zip(PROMPTS, seeds, strict=True)
        ]
        found["other seeds"] = plain(
            engine.generate([TokenIds(ids) for ids in PROMPTS], params, [s + 1000 for s in seeds])
        )
        done, numbers = {}, []
        for prompt, seed in zip(PROMPTS, seeds, strict=True):
            numbers.append(engine.submit(TokenIds(prompt), params, seed))
            engine.step()
            done |= engine.collect()
        while engine.busy:
            engine.step()
            done |= engine.collect()
    return found | {"one by one": plain([done[number] for number in numbers])}


def cancelled(engine, weights):
    """Completions of all requests but one, which is cancelled while it is decoded; and which numbers ended."""
    with engine.with_weights(weights):
        numbers = [
            engine.submit(TokenIds(prompt), SAMPLING["plain"], 100 + i)
            for i, prompt in enumerate(PROMPTS)
        ]
        engine.step()
        engine.cancel(numbers[1])
        done = {}
        while engine.busy:
            engine.step()
            done |= engine.collect()
    return [numbers.index(number) for number in sorted(done)], plain(
        [done[n] for n in numbers if n in done]
    )


def resumed(engine, weights):
    """Completions of a long prompt and of one that continues it, and how many of its tokens were not read again."""
    with engine.with_weights(weights):
        [first] = engine.generate([TokenIds(LONG_PROMPT)], GREEDY, [0])
        before = engine.reused_tokens
        longer = [*LONG_PROMPT, *first.token_ids, 4, 5]
        return (
            longer,
            plain(engine.generate([TokenIds(longer)], GREEDY, [0])),
            engine.reused_tokens - before,
        )


def greedy(engine, weights):
    """With the weights of now."""
    with engine.with_weights(weights):
        return plain(
            engine.generate(
                [TokenIds(ids) for ids in [*PROMPTS, LONG_PROMPT]], GREEDY, range(len(PROMPTS) + 1)
            )
        )


@torch.no_grad()
def change(model, seed):
    """Other values for what is trained."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def error_of(kind, work):
    """The message of what ``work`` raises."""
    try:
        work()
    except kind as error:
        return str(error)
    return None


def interrupted(engine, weights):
    """What is left of a call that a signal ends after three steps, and a call after it."""

    def cut_short():
        with engine.with_weights(weights):
            for seed, ids in enumerate(PROMPTS):
                engine.submit(TokenIds(ids), SAMPLING["plain"], seed)
            for _ in range(3):
                engine.step()
            raise Interrupted("SIGTERM")

    def too_long():
        with engine.with_weights(weights):
            engine.submit(TokenIds([3] * 195), SAMPLING["plain"], seed=0)

    found = {"signal": error_of(Interrupted, cut_short), "busy": engine.busy}
    return found | {"too long": error_of(ValueError, too_long), "again": greedy(engine, weights)}


def shared(models, out, rank):
    """Completions of two ranks with different requests, some late, one cancelled; and the share of weights of each."""
    config = replace(CONFIG, generation=replace(CONFIG.generation, vllm_tensor_parallel_size=2))
    engine = engine_of(models / "llama", config)
    weights = Weights(Actor(str(models / "llama")).model)
    mine, seeds = PROMPTS[: 2 + 4 * rank], range(100, 106)
    with engine.with_weights(weights):
        [model] = engine._llm.collective_rpc(lambda worker: worker.get_model())
        layer = model.model.layers[
            0
        ].mlp.down_proj  # on CPUs its weight is packed and shows no shape
        result = {"share": layer.input_size_per_partition / layer.input_size}
        result |= {
            name: plain(engine.generate([TokenIds(ids) for ids in mine], kind, seeds))
            for name, kind in SAMPLING.items()
        }
        numbers = []
        for prompt, seed in zip(mine, seeds, strict=False):
            numbers.append(engine.submit(TokenIds(prompt), SAMPLING["plain"], seed))
            for _ in range(1 + rank):
                assert engine.any_rank(True)
                engine.step()
        engine.cancel(numbers[-1])
        while engine.any_rank(engine.busy):
            engine.step()
        done = engine.collect()
        result["entering"] = [done[number].token_ids for number in numbers if number in done]
    (out / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # otherwise gloo's threads may abort a process that exits


def train():
    """The run of the options."""
    config = parse_options(TrainPPOConfig, sys.argv[1:])
    strategy = DeepspeedStrategy(config.deepspeed, timedelta(seconds=100), PARTITION_EVERYTHING)
    trainer = build_ppo_trainer(config, strategy)
    trainer.fit()
    trainer.close()


def sample(models, out):
    """Every stage."""
    init_process_group(timedelta(seconds=100))
    if torch.distributed.get_world_size() == 2:
        return shared(models, out, torch.distributed.get_rank())
    torch.manual_seed(3)
    random_state, n_threads = torch.get_rng_state(), torch.get_num_threads()
    engine = engine_of(models / "llama")
    result = {"threads": [n_threads, torch.get_num_threads()]}
    torch.set_num_threads(n_threads + 1)
    result["threads"].append(torch.get_num_threads())
    torch.set_num_threads(n_threads)
    torch.set_rng_state(random_state)

    model = Actor(str(models / "llama")).model
    weights = Weights(model)
    result["sampled"] = sampled(engine, weights)
    result["cancelled"] = cancelled(engine, weights)
    of_some = engine_of(models / "llama", sampled_ids=SampledIds(LEFT_OUT))
    with of_some.with_weights(weights):
        found = {
            kind: of_some.generate(
                [TokenIds(ids) for ids in PROMPTS], SAMPLING[kind], range(len(PROMPTS))
            )
            for kind in ("plain", "cut")
        }
        found["greedy"] = of_some.generate(
            [TokenIds(ids) for ids in PROMPTS], GREEDY, range(len(PROMPTS))
        )
    result["of some"] = {kind: plain(completions) for kind, completions in found.items()}
    result["resumed"] = resumed(engine, weights)
    result["greedy first"] = greedy(engine, weights)
    change(model, 1)
    model.save_pretrained(out / "changed")
    result["greedy changed"] = greedy(engine, weights)
    result["interrupted"] = interrupted(engine, weights)

    adapted = Actor(str(models / "llama"), lora_rank=4, lora_alpha=8).model
    change(adapted, 2)
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    result["greedy adapted"] = greedy(engine, Weights(adapted))
    result["adapters stay"] = all(
        torch.equal(p, before[name]) for name, p in adapted.named_parameters()
    )
    adapted.save_pretrained(out / "adapted")

    for name in ("tied", "qwen2", "qwen3"):
        other = Actor(str(models / name)).model
        change(other, 3)
        other.save_pretrained(out / name)
        result[f"greedy {name}"] = greedy(engine_of(models / name), Weights(other))
    gc.collect()
    result["group"] = torch.distributed.is_initialized()
    result["refused"] = error_of(
        ValueError, lambda: engine_of(models / "llama", max_tokens=100_000)
    )
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    train() if sys.argv[1].startswith("--") else sample(*map(Path, sys.argv[1:]))
