"""Check of an engine: its log-probs of a few sampled tokens must be the actor's.

Otherwise PPO's ratios are wrong before the first update, without any error.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed import DistError

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.media import TokenIds
from openppo.model_inputs import ModelInputs
from openppo.rollout.engine import Engine, WeightSource
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.checkpoint.random_state import get_random_state, set_random_state
from openppo.strategy.comm import collective
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.trainable_model import TrainableModel
from openppo.types import Completion, SamplingParams

Kind = tuple[str, bool]
"""Name of an engine, and True if weights and logits are float32."""

REQUESTS = (((3, 1, 0, 2, 2, 1, 3, 0, 1), 2), ((2, 3, 1), 6))
"""Prompts as places among ids, and numbers of sampled tokens.

The long row ends first, and the other continues alone.
"""

LONGEST = max(len(prompt) + n_new for prompt, n_new in REQUESTS)
"""Tokens of the longest request with its sampled tokens."""

WIDER = 16
"""Columns of padding that must not change log-probs.

On CPUs, bfloat16 rows are padded by up to 7 columns anyway.
"""

BOUNDS = {
    ("hf", True): 1e-3,
    ("hf", False): 8 * 2**-8,
    ("vllm", True): 1e-2,
    ("vllm", False): 16 * 2**-8,
}
"""Differences of log-probs that count as rounding, by ``Kind``.

In float32 they are nats of any token. Otherwise they are fractions of the largest logit, on average over tokens:
correct models differ by at most one step of bfloat16, 2**-8, wrong ones by at least twelve, whatever the scale of the
weights. Five times the largest difference that padding makes is allowed too: rounding may send a token to another
expert.
"""


def check_like(engine: Engine, check: Callable[[Mapping[str, Engine]], None]) -> None:
    """Call ``check`` on small engines like ``engine``, or on an engine of vLLM itself.

    The keys say in messages how an engine decodes. If a small engine refuses to record steps, ``engine`` records none.
    """
    if not isinstance(engine, HFEngine):
        check({"": engine})
        return

    small_engine = partial(
        HFEngine,
        engine.model,
        eos_token_ids=(),
        pad_token_id=0,
        max_batch_size=len(REQUESTS),
        sampled_ids=engine.sampled_ids,
    )
    plain = small_engine(any_rank=engine.any_rank)
    if engine.new_recorder is None:
        check({"": plain})
        return

    recording = small_engine(new_recorder=engine.new_recorder)
    check({"": plain, " with --cuda_graphs": recording})
    if recording.new_recorder is None:
        engine.stop_recording()


def check_engines(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    engines: Mapping[str, Engine],
) -> None:
    """Raise ``ValueError`` on all ranks if one of ``engines`` samples wrongly from ``actor``."""
    is_exact = not (config.deepspeed.bf16 or config.lora.load_in_4bit)
    are_own = all(isinstance(engine, HFEngine) for engine in engines.values())

    def check() -> None:
        check_sampling(
            config.model.pretrain,
            actor,
            engines,
            weights=actor,
            device=strategy.device,
            kind=("hf" if are_own else "vllm", is_exact),
        )

    with strategy.uncompiled():
        collective(strategy.comm, check)


def check_sampling(
    pretrain: str,
    actor: Any,
    engines: Mapping[str, Engine],
    weights: WeightSource | None,
    device: torch.device,
    kind: Kind,
) -> None:
    """Raise ``ValueError`` for a model ``pretrain`` with an ``engine_fault``, whose arguments the others are."""
    fault = engine_fault(actor, engines, weights, device=device, kind=kind)
    if fault is not None:
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
    """Difference between ``engines`` and ``actor`` in words; None if they agree within ``BOUNDS[kind]``.

    Without ``weights`` the actor is whole and frozen, and its training mode is not compared. Modes of all modules and
    random generators are restored afterwards.
    """
    module: torch.nn.Module = getattr(actor, "module", actor)
    modes = [(part, part.training) for part in module.modules()]
    state = get_random_state()
    try:
        return _fault(actor, engines, weights, device=device, kind=kind)
    except (torch.OutOfMemoryError, torch.AcceleratorError, DistError):
        raise  # RuntimeErrors that are not about the model
    except (
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        names_flag_and_remedy = isinstance(error, ValueError) and "--" in str(error)
        if names_flag_and_remedy:
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
    """Compare log-probs of decode steps, padded forwards and both modes; return the first fault."""
    policy: Any = getattr(actor, "module", actor).model
    n_ids = policy.config.get_text_config().vocab_size
    _, is_exact = kind

    for decoding, engine in engines.items():
        actor.train(False)
        rows, decoded = _sample(engine, weights, n_ids)
        inputs = ModelInputs.of_ids(rows, pad_token_id=0).to(device)
        mask = inputs.attention_mask
        plain = actor(inputs, temperature=1.0)  # (B, L)

        width = plain.shape[1]
        padded = actor(inputs.widened(width + WIDER), temperature=1.0)[:, :width]
        rounding = (padded - plain).abs()

        allowed = limit = BOUNDS[kind]
        if not is_exact:
            # Scale by logits of the likeliest tokens: others may be masked.
            logits: torch.Tensor = policy(input_ids=inputs.sequences, use_cache=False).logits
            allowed *= float(logits.float().amax(-1).abs().max())
            limit = max(allowed, 5 * float(rounding.max()))

        sampled = []
        for log_probs, ids, (prompt, _) in zip(plain, rows, REQUESTS, strict=True):
            sampled.append(log_probs[len(prompt) : len(ids)])
        decoding_differences = (decoded - torch.cat(sampled).cpu()).abs()

        actor.train(weights is not None)  # new adapters add 0, so their dropout does not show
        trained = actor(inputs, temperature=1.0)

        for compared, differences, bound in (
            ("forwards of rows padded to other lengths", rounding[mask], allowed),
            (f"decode steps{decoding} and the plain forward", decoding_differences, limit),
            ("forwards in training and evaluation mode", (trained - plain).abs()[mask], limit),
        ):
            difference = float(differences.max() if is_exact else differences.mean())
            if not difference <= bound:  # also NaN
                measure = "at most" if is_exact else "on average"
                return (
                    f"log-probs of {compared} differ by {difference:.2g} nats, "
                    f"where {bound:.2g} {measure} is rounding"
                )
    return None


def _sample(
    engine: Engine, weights: WeightSource | None, n_ids: int
) -> tuple[list[list[int]], torch.Tensor]:
    """Sample ``REQUESTS``; return the rows, and the log-probs (N,) of all sampled tokens.

    Rows are prompts with sampled tokens. Prompts consist of ids that can be sampled: others may stand for images.
    """
    largest_place = max(REQUESTS[0][0])
    first_ids = engine.sampled_ids.first(1 + largest_place)
    known_ids = [token_id for token_id in first_ids if token_id < n_ids]

    prompts: dict[int, list[int]] = {}
    completions: dict[int, Completion] = {}
    with nullcontext() if weights is None else engine.with_weights(weights):
        for seed, (places, n_new) in enumerate(REQUESTS):
            prompt = [known_ids[place % len(known_ids)] for place in places]
            number = engine.submit(TokenIds(prompt), SamplingParams(n_new, 1.0), seed)
            prompts[number] = prompt
        while engine.busy:
            engine.step()
            completions |= engine.collect()

    rows = []
    log_probs: list[float] = []
    for number, prompt in prompts.items():
        rows.append([*prompt, *completions[number].token_ids])
        log_probs += completions[number].log_probs
    return rows, torch.tensor(log_probs)
