"""Engine against actor at the start: log-probs of a few sampled tokens, on which both must agree.

Where they do not, PPO's ratios are wrong before the first update, and nothing else would say so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError

from openppo.config import TrainPPOConfig
from openppo.models.loading import context_length
from openppo.models.padding import pad_right
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.rollout.engine import Engine, PolicyWeights
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.checkpoint.random_state import get_random_state, set_random_state
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.engine import TrainingEngine
from openppo.strategy.policy_weights import PolicyWeights as ActorWeights
from openppo.trainer.startup import on_all_ranks
from openppo.types import Completion, SamplingParams

logger = logging.getLogger("openppo")

REQUESTS = (((3, 5, 4, 1, 6, 2, 7, 3, 2), 2), ((6, 2, 5), 6))
"""Prompts and numbers of sampled tokens: the long row ends first, and the other goes on without it."""
LONGEST = max(len(prompt) + n_new for prompt, n_new in REQUESTS)
WIDER = 16
"""Columns of padding that must not change log-probs; on CPUs, rows in bfloat16 are padded by up to 7 anyway."""
FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What the forward of a model raises when it is called in a way that it does not know."""


@dataclass(frozen=True)
class Bound:
    """The largest difference of log-probs in nats: ``least``, or so many ``times`` that of rounding, if it is more."""

    least: float
    times: float = 0.0


BOUNDS = {
    ("hf", True): Bound(1e-3),
    ("hf", False): Bound(0.25, 5),  # logits near 16 have steps of 1/8 in bfloat16
    ("vllm", True): Bound(1e-2),
    ("vllm", False): Bound(0.5, 10),
}
"""By engine, and whether weights and logits are float32. vLLM has kernels of its own."""


def check_hf_engine(config: TrainPPOConfig, strategy: DeepspeedStrategy, actor: TrainingEngine) -> None:
    """``ValueError`` on all ranks if an ``HFEngine`` would sample from something else than ``actor``.

    The engines here are for the check alone. Partitioned weights are not gathered, which takes memory: ranks decode in
    lockstep, which the same prompts on all of them allow.
    """
    in_lockstep = strategy.zero_stage == 3
    policy: Any = actor.module.model

    def engine(graphs: bool) -> Engine:
        together = strategy.any_rank if in_lockstep else None
        return HFEngine(policy, (), 0, len(REQUESTS), together, new_recorder=CUDARecorder if graphs else None)

    engines = {"": engine(graphs=False)}
    if config.generation.cuda_graphs and not in_lockstep:
        engines[" with --cuda_graphs"] = engine(graphs=True)
    check_engines(config, strategy, actor, engines)


def check_engines(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, actor: TrainingEngine, engines: Mapping[str, Engine]
) -> None:
    """The same for ``engines`` that are there, by how they decode, in words."""
    name, options = config.model.pretrain, config.generation
    exact = not (config.deepspeed.bf16 or config.lora.load_in_4bit)
    weights = ActorWeights(strategy, actor)

    def check() -> None:
        with strategy.uncompiled(), _left_as_it_was(actor.module):
            fault = engine_fault(actor, engines, weights, strategy.device, BOUNDS[options.rollout_engine, exact])
        if fault is not None:
            raise ValueError(
                f"--pretrain {name} cannot be sampled by --rollout_engine {options.rollout_engine} as it is trained: "
                f"{fault}. PPO's ratios would be wrong before the first update. Take another model or engine, or skip "
                "this check with --engine_check off."
            )

    on_all_ranks(strategy.comm, check)


def engine_fault(
    actor: Any, engines: Mapping[str, Engine], weights: PolicyWeights, device: torch.device, bound: Bound
) -> str | None:
    """Why ``engines`` do not sample from ``actor``, an ``Actor`` or the engine around it, in words; None if they do."""
    try:
        return _fault(actor, engines, weights, device, bound)
    except (torch.OutOfMemoryError, DistError):  # kinds of RuntimeError that say nothing about the model
        raise
    except FAILURES as error:
        return f"a tiny forward fails, {type(error).__name__}: {error}"


@torch.no_grad()
def _fault(
    actor: Any, engines: Mapping[str, Engine], weights: PolicyWeights, device: torch.device, bound: Bound
) -> str | None:
    context = context_length(getattr(actor, "module", actor).model.config)
    if context is not None and context < LONGEST:
        logger.warning("the engine is not checked: %d tokens of context are fewer than its %d", context, LONGEST)
        return None
    wider = WIDER if context is None else min(WIDER, context - LONGEST)
    for how, engine in engines.items():
        actor.train(False)
        rows, sampled = _sample(engine, weights)
        sequences, mask = (tensor.to(device) for tensor in pad_right(rows, 0))
        plain = actor(sequences, mask, temperature=1.0)
        padded = [torch.nn.functional.pad(tensor, (0, wider)) for tensor in (sequences, mask)]
        rounding = _difference(actor(*padded, temperature=1.0)[:, : plain.shape[1]], plain)
        limit = max(bound.least, bound.times * rounding)
        starts = [len(prompt) for prompt, _ in REQUESTS]
        at_engines = [plain[i, start : start + len(sampled[i])].cpu() for i, start in enumerate(starts)]
        decoded = [torch.tensor(log_probs) for log_probs in sampled]
        actor.train(True)  # new adapters add 0, so their dropout does not show
        trained = actor(sequences, mask, temperature=1.0)
        for what, difference in (
            (f"decode steps{how} and the plain forward", _difference(torch.cat(decoded), torch.cat(at_engines))),
            ("forwards in training and evaluation mode", _difference(trained, plain)),
            ("forwards of rows padded to other lengths", rounding if bound.times == 0 else 0.0),
        ):
            if not difference <= limit:  # also of NaN
                return f"{what} differ by {difference:.2g} nats in a log-prob, and {limit:.2g} is the bound"
    return None


def _sample(engine: Engine, weights: PolicyWeights) -> tuple[list[list[int]], list[list[float]]]:
    """Rows of prompts and sampled tokens, and the log-probs of the latter. Ranks take equally many steps."""
    with engine.awake(weights):
        numbers = [engine.submit(prompt, SamplingParams(n, 1.0), seed) for seed, (prompt, n) in enumerate(REQUESTS)]
        done: dict[int, Completion] = {}
        while engine.busy:
            engine.step()
            done |= engine.collect()
    completions = [done[number] for number in numbers]
    rows = [[*prompt, *completion.token_ids] for (prompt, _), completion in zip(REQUESTS, completions, strict=True)]
    return rows, [completion.log_probs for completion in completions]


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@contextmanager
def _left_as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """The mode of each part and all random generators."""
    modes, state = [(part, part.training) for part in module.modules()], get_random_state()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        set_random_state(state)
