"""The engine that options ask for, and its check: log-probs of a few sampled tokens, on which the actor must agree.

Where they do not, PPO's ratios are wrong before the first update, without any error.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import DistError
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.models.padding import pad_right
from openppo.models.pretrained import (
    base_model_of,
    context_length,
    eos_token_ids,
    load_processor,
    pad_token_id,
    sampled_ids,
)
from openppo.models.vision_models import placeholders
from openppo.rollout.decode_graphs import choose_recorder
from openppo.rollout.engine import Engine, WeightSource
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import decoder
from openppo.rollout.vllm_engine import VLLMEngine
from openppo.strategy.checkpoint.random_state import get_random_state, set_random_state
from openppo.strategy.comm import collective
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.trainable_model import TrainableModel
from openppo.types import Completion, SamplingParams, StopCheck

Kind = tuple[str, bool]
REQUESTS = (((3, 1, 0, 2, 2, 1, 3, 0, 1), 2), ((2, 3, 1), 6))
"""Prompts as places among ids, and numbers of sampled tokens: the long row ends first, the other continues alone."""
LONGEST = max(len(prompt) + n_new for prompt, n_new in REQUESTS)
WIDER = 16  # columns of padding that must not change log-probs; on CPUs, bfloat16 rows are padded by up to 7 anyway
BOUNDS = {
    ("hf", True): 1e-3,
    ("hf", False): 8 * 2**-8,
    ("vllm", True): 1e-2,
    ("vllm", False): 16 * 2**-8,
}
"""Differences of log-probs that count as rounding, by engine, and whether weights and logits are float32.

In float32 they are nats of any token. Else they are shares of the largest logit, on average over tokens: correct
models differ by at most one step of bfloat16, 2**-8, wrong ones by at least twelve, whatever the weights' scale.
Five times the largest difference that padding makes is allowed too: rounding may send a token to another expert.
"""


def training_engine(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    actor_config: PreTrainedConfig,
) -> Engine:
    """Samples with the actor's own module, or a copy of it in vLLM; checked with ``--engine_check on``."""
    if (
        config.orchestrator.rollout_ranks > 0
    ):  # it only evaluates: what a vLLM takes is on the ranks that sample
        config = replace(config, generation=replace(config.generation, rollout_engine="hf"))
    policy: Any = actor.module.model
    together = None if strategy.fits_gathered(actor, config.ppo.offload_idle) else strategy.any_rank
    engine = new_engine(
        config,
        policy,
        tokenizer,
        stop=stop,
        actor_config=actor_config,
        together=together,
        show_progress=strategy.is_main,
    )
    if isinstance(engine, HFEngine) and config.lora.lora_rank > 0 and together is None:
        actor.merges_adapters = strategy.fits_merged(actor, config.ppo.offload_idle)
    if config.generation.engine_check == "on":
        check_like(engine, lambda engines: check_engines(config, strategy, actor, engines=engines))
    engine.decode = decoder(tokenizer)
    return engine


def new_engine(
    config: TrainPPOConfig,
    policy: Any,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    actor_config: PreTrainedConfig,
    together: Callable[[bool], bool] | None = None,
    show_progress: bool = False,
) -> Engine:
    """An engine that samples from ``policy``, in lockstep with ``together``."""
    eos, generation = eos_token_ids(policy, tokenizer), config.generation
    ids = sampled_ids(tokenizer, actor_config)
    ids.check_ends(eos, generation.stop_token_ids)
    common: dict[str, Any] = {"show_progress": show_progress, "stop": stop}
    if generation.rollout_engine == "vllm":
        episode = config.agents.episode_max_len or 0
        longest = max(config.data.prompt_max_len + generation.generate_max_len, episode, LONGEST)
        max_tokens = min(longest, context_length(actor_config) or longest)
        if placeholders(actor_config):  # vLLM loads the processor too, and its errors name no flag
            load_processor(config.model.pretrain, "--pretrain", config.model.trust_remote_code)
        common |= {"reads_images": bool(placeholders(actor_config)), "sampled_ids": ids}
        return VLLMEngine(
            base_model_of(config.model.pretrain), config, max_tokens, eos_token_ids=eos, **common
        )
    device = next(policy.parameters()).device
    recorder = choose_recorder(
        generation.cuda_graphs, actor_config, device, in_lockstep=together is not None
    )
    common |= {"any_rank": together, "new_recorder": recorder}
    engine = HFEngine(
        policy, eos, pad_token_id(tokenizer), max_batch_size=generation.max_num_seqs, **common
    )
    engine.sampled_ids = ids
    return engine


def check_like(engine: Engine, check: Callable[[Mapping[str, Engine]], None]) -> None:
    """``check`` small engines like ``engine``, or itself; where recording is refused, it records no steps either."""
    if not isinstance(engine, HFEngine):
        return check({"": engine})
    given = engine.model, (), 0, len(REQUESTS)
    last = plain = HFEngine(*given, engine.any_rank)
    checked: dict[str, Engine] = {"": plain}
    if engine.new_recorder is not None:
        checked[" with --cuda_graphs"] = last = HFEngine(*given, new_recorder=engine.new_recorder)
    for small in checked.values():
        small.sampled_ids = engine.sampled_ids
    check(checked)
    engine.new_recorder = last.new_recorder


def check_engines(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    engines: Mapping[str, Engine],
) -> None:
    """Refuse, on all ranks, an actor that one of ``engines`` samples wrongly."""
    kind = config.generation.rollout_engine, not (config.deepspeed.bf16 or config.lora.load_in_4bit)
    given = config.model.pretrain, actor, engines, actor, strategy.device, kind
    with strategy.uncompiled():
        collective(strategy.comm, lambda: check_sampling(*given))


def check_sampling(pretrain: str, *given: Any) -> None:
    """Refuse a model ``pretrain`` with an ``engine_fault``, which is ``given`` its arguments."""
    if fault := engine_fault(*given):
        raise ValueError(
            f"--pretrain {pretrain} cannot be sampled: {fault}. PPO's ratios, and samples, would be wrong. "
            "Take another model or engine, or skip this check with --engine_check off."
        )


def engine_fault(
    actor: Any,
    engines: Mapping[str, Engine],
    weights: WeightSource | None,
    device: torch.device,
    kind: Kind,
) -> str | None:
    """Difference between ``engines`` and ``actor`` in words, if any; ``kind`` is a key of ``BOUNDS``.

    Without ``weights`` the actor is whole and frozen, and its training mode is not compared. Modes of all parts and
    random generators are as before afterwards.
    """
    module: torch.nn.Module = getattr(actor, "module", actor)
    modes, state = [(part, part.training) for part in module.modules()], get_random_state()
    try:
        return _fault(actor, engines, weights, device=device, kind=kind)
    except (
        torch.OutOfMemoryError,
        torch.AcceleratorError,
        DistError,
    ):  # RuntimeErrors that are not about the model
        raise
    except (
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        if isinstance(error, ValueError) and "--" in str(
            error
        ):  # it names a flag and its own remedy
            raise
        logger.debug("the check of the engine failed", exc_info=True)
        return f"a tiny forward fails, {type(error).__name__}: {error}"
    finally:
        for part, mode in modes:
            part.training = mode
        set_random_state(state)


@torch.no_grad()
def _fault(
    actor: Any,
    engines: Mapping[str, Engine],
    weights: WeightSource | None,
    device: torch.device,
    kind: Kind,
) -> str | None:
    policy: Any = getattr(actor, "module", actor).model
    n_ids, is_exact = policy.config.get_text_config().vocab_size, kind[1]
    for how, engine in engines.items():
        actor.train(False)
        rows, decoded = _sample(engine, weights, n_ids)
        sequences, mask = (tensor.to(device) for tensor in pad_right(rows, 0))
        plain = actor(sequences, mask, temperature=1.0)
        padded = [torch.nn.functional.pad(tensor, (0, WIDER)) for tensor in (sequences, mask)]
        rounding = (actor(*padded, temperature=1.0)[:, : plain.shape[1]] - plain).abs()
        allowed = limit = BOUNDS[kind]
        if not is_exact:  # of the likeliest tokens' logits; others may be masked
            logits: torch.Tensor = policy(input_ids=sequences, use_cache=False).logits
            allowed *= float(logits.float().amax(-1).abs().max())
            limit = max(allowed, 5 * float(rounding.max()))
        sampled = [
            row[len(prompt) : len(ids)]
            for row, ids, (prompt, _) in zip(plain, rows, REQUESTS, strict=True)
        ]
        actor.train(weights is not None)  # new adapters add 0, so their dropout does not show
        trained = actor(sequences, mask, temperature=1.0)
        for what, differences, most in (
            ("forwards of rows padded to other lengths", rounding[mask], allowed),
            (
                f"decode steps{how} and the plain forward",
                (decoded - torch.cat(sampled).cpu()).abs(),
                limit,
            ),
            ("forwards in training and evaluation mode", (trained - plain).abs()[mask], limit),
        ):
            found = float(differences.max() if is_exact else differences.mean())
            if not found <= most:  # also of NaN
                how_far = "at most" if is_exact else "on average"
                return f"log-probs of {what} differ by {found:.2g} nats, where {most:.2g} {how_far} is rounding"
    return None


def _sample(
    engine: Engine, weights: WeightSource | None, n_ids: int
) -> tuple[list[list[int]], torch.Tensor]:
    """Rows of prompts and sampled tokens, and the log-probs (N,) of all sampled ones.

    Prompts are made of ids that can be sampled: others may stand for images.
    """
    known = [
        token_id
        for token_id in engine.sampled_ids.first(1 + max(REQUESTS[0][0]))
        if token_id < n_ids
    ]
    done: dict[int, Completion] = {}
    prompts: dict[int, list[int]] = {}
    with nullcontext() if weights is None else engine.with_weights(weights):
        for seed, (prompt, n_new) in enumerate(REQUESTS):
            token_ids = [known[number % len(known)] for number in prompt]
            prompts[engine.submit(token_ids, SamplingParams(n_new, 1.0), seed)] = token_ids
        while engine.busy:
            engine.step()
            done |= engine.collect()
    rows = [[*prompt, *done[number].token_ids] for number, prompt in prompts.items()]
    return rows, torch.tensor(
        [log_prob for number in prompts for log_prob in done[number].log_probs]
    )
