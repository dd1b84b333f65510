"""Engine against actor at the start: log-probs of a few sampled tokens, on which both must agree.

Where they do not, PPO's ratios are wrong before the first update, without any error.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch.distributed import DistError

from openppo.config import PromptsConfig, TrainPPOConfig
from openppo.models.actor import Actor
from openppo.models.padding import pad_right
from openppo.models.pretrained import context_length
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.rollout.engine import Engine, WeightSource
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.checkpoint.random_state import get_random_state, set_random_state
from openppo.strategy.comm import collective
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.trainable_model import PolicyWeights, TrainableModel
from openppo.types import Completion, SamplingParams

logger = logging.getLogger("openppo")

REQUESTS = (((3, 1, 0, 2, 2, 1, 3, 0, 1), 2), ((2, 3, 1), 6))
"""Prompts and numbers of sampled tokens: the long row ends first, and the other continues without it."""
LONGEST = max(len(prompt) + n_new for prompt, n_new in REQUESTS)
WIDER = 16
"""Columns of padding that must not change log-probs; on CPUs, rows in bfloat16 are padded by up to 7 anyway."""
FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of a model's forward that is called in an unknown way."""


class Bound(NamedTuple):
    """Largest difference of log-probs that counts as rounding.

    If ``exact``, ``size`` nats for each token. Else, on average over tokens, ``size`` times the largest logit, or five
    times the largest difference that padding makes: rounded weights may send a single token to another expert.
    """

    exact: bool
    size: float


_STEP, _TIMES = 2**-8, 5
"""Relative distance of numbers in bfloat16: correct models differ on average by at most one of the largest logit, wrong
ones by at least twelve, whatever the scale of their weights."""
BOUNDS = {
    ("hf", True): Bound(True, 1e-3),
    ("hf", False): Bound(False, 8 * _STEP),
    ("vllm", True): Bound(True, 1e-2),
    ("vllm", False): Bound(False, 16 * _STEP),
}
"""By engine, and whether weights and logits are float32. vLLM has kernels of its own."""


def check_hf_engine(config: TrainPPOConfig, strategy: DeepspeedStrategy, actor: TrainableModel) -> None:
    """Refuse, on all ranks, an actor that an ``HFEngine`` samples wrongly.

    The engines are for the check alone, and decode as the run's: with whole weights, or in lockstep.
    """
    in_lockstep = not strategy.fits_gathered(actor, config.ppo.offload_idle)
    together, policy = strategy.any_rank if in_lockstep else None, cast(Any, actor.module.model)
    engines: dict[str, Engine] = {"": HFEngine(policy, (), 0, len(REQUESTS), together)}
    if config.generation.cuda_graphs and not in_lockstep:
        engines[" with --cuda_graphs"] = HFEngine(policy, (), 0, len(REQUESTS), new_recorder=CUDARecorder)
    check_engines(config, strategy, actor, engines)


def check_engines(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, actor: TrainableModel, engines: Mapping[str, Engine]
) -> None:
    """Refuse, on all ranks, an actor that one of ``engines`` samples wrongly."""
    name, engine = config.model.pretrain, config.generation.rollout_engine
    bound = BOUNDS[engine, not (config.deepspeed.bf16 or config.lora.load_in_4bit)]
    weights = PolicyWeights(strategy.for_generation, actor)

    def check() -> None:
        with strategy.uncompiled(), _restored(actor.module):
            fault = engine_fault(actor, engines, weights, strategy.device, bound)
        if fault is not None:
            raise ValueError(
                f"--pretrain {name} cannot be sampled by --rollout_engine {engine} as it is trained: {fault}. PPO's "
                "ratios would be wrong before the first update. Take another model or engine, or skip this check with "
                "--engine_check off."
            )

    collective(strategy.comm, check)


def check_frozen(options: PromptsConfig, actor: Actor, device: torch.device) -> None:
    """Refuse a frozen ``actor`` that an ``HFEngine`` samples wrongly."""
    bound, engine = BOUNDS["hf", not options.bf16], HFEngine(cast(Any, actor.model), (), 0, len(REQUESTS))
    with _restored(actor):
        fault = engine_fault(actor, {"": engine}, None, device, bound)
    if fault is not None:
        raise ValueError(
            f"--pretrain {options.pretrain} cannot be sampled by OpenPPO's engine: {fault}. Take another model, or "
            "skip this check with --engine_check off."
        )


def engine_fault(
    actor: Any, engines: Mapping[str, Engine], weights: WeightSource | None, device: torch.device, bound: Bound
) -> str | None:
    """Difference between ``engines`` and ``actor`` in words, if any.

    Without ``weights`` the actor is whole and frozen, and its training mode is not compared.
    """
    try:
        return _fault(actor, engines, weights, device, bound)
    except (torch.OutOfMemoryError, torch.AcceleratorError, DistError):  # RuntimeErrors that are not about the model
        raise
    except FAILURES as error:
        if isinstance(error, ValueError) and "--" in str(error):  # it names a flag and its own remedy
            raise
        logger.debug("the check of the engine failed", exc_info=True)
        return f"a tiny forward fails, {type(error).__name__}: {error}"


@torch.no_grad()
def _fault(
    actor: Any, engines: Mapping[str, Engine], weights: WeightSource | None, device: torch.device, bound: Bound
) -> str | None:
    policy: Any = getattr(actor, "module", actor).model
    context, n_ids = context_length(policy.config), policy.config.get_text_config().vocab_size
    if context is not None and context < LONGEST:
        logger.warning("the engine is not checked: %d tokens of context are fewer than its %d", context, LONGEST)
        return None
    wider = WIDER if context is None else min(WIDER, context - LONGEST)
    for how, engine in engines.items():
        actor.train(False)
        rows, sampled = _sample(engine, weights, n_ids)
        sequences, mask = (tensor.to(device) for tensor in pad_right(rows, 0))
        plain = actor(sequences, mask, temperature=1.0)
        padded = [torch.nn.functional.pad(tensor, (0, wider)) for tensor in (sequences, mask)]
        rounding = (actor(*padded, temperature=1.0)[:, : plain.shape[1]] - plain).abs()
        allowed = bound.size if bound.exact else bound.size * _largest_logit(policy, sequences)
        limit = allowed if bound.exact else max(allowed, _TIMES * float(rounding.max()))
        starts = [len(prompt) for prompt, _ in REQUESTS]
        at_engines = [plain[i, start : start + len(sampled[i])].cpu() for i, start in enumerate(starts)]
        decoded = [torch.tensor(log_probs) for log_probs in sampled]
        actor.train(weights is not None)  # new adapters add 0, so their dropout does not show
        trained = actor(sequences, mask, temperature=1.0)
        for what, differences, most in (
            ("forwards of rows padded to other lengths", rounding[mask], allowed),
            (f"decode steps{how} and the plain forward", (torch.cat(decoded) - torch.cat(at_engines)).abs(), limit),
            ("forwards in training and evaluation mode", (trained - plain).abs()[mask], limit),
        ):
            found = float(differences.max() if bound.exact else differences.mean())
            if not found <= most:  # also of NaN
                how_far = "at most" if bound.exact else "on average"
                return f"log-probs of {what} differ by {found:.2g} nats, where {most:.2g} {how_far} is rounding"
    return None


def _largest_logit(policy: Any, sequences: torch.Tensor) -> float:
    """Size of the likeliest tokens' logits; others may be masked."""
    logits: torch.Tensor = policy(input_ids=sequences, use_cache=False).logits
    return float(logits.float().amax(-1).abs().max())


def _sample(engine: Engine, weights: WeightSource | None, n_ids: int) -> tuple[list[list[int]], list[list[float]]]:
    """Rows of prompts and sampled tokens, and the log-probs of the sampled ones."""
    prompts = [[token_id % n_ids for token_id in prompt] for prompt, _ in REQUESTS]
    with nullcontext() if weights is None else engine.with_weights(weights):
        numbers = [
            engine.submit(prompt, SamplingParams(n, 1.0), seed)
            for seed, (prompt, (_, n)) in enumerate(zip(prompts, REQUESTS, strict=True))
        ]
        done: dict[int, Completion] = {}
        while engine.busy:
            engine.step()
            done |= engine.collect()
    completions = [done[number] for number in numbers]
    rows = [[*prompt, *completion.token_ids] for prompt, completion in zip(prompts, completions, strict=True)]
    return rows, [completion.log_probs for completion in completions]


@contextmanager
def _restored(module: torch.nn.Module) -> Iterator[None]:
    """Put back the mode of each part and all random generators."""
    modes, state = [(part, part.training) for part in module.modules()], get_random_state()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        set_random_state(state)
