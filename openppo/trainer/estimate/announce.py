"""The estimate of a run that is about to start, and the end of one that was only meant to be estimated."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from openppo.config import RunConfig, TrainPPOConfig
from openppo.config.commands import SupervisedCommand
from openppo.models.loading import check_model
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.trainer.data import PPOData
from openppo.trainer.estimate.estimate import Estimate
from openppo.trainer.estimate.ppo import Lengths, PPORun, estimate_ppo
from openppo.trainer.estimate.shapes import Head, ModelShape, model_shape
from openppo.trainer.estimate.supervised import SupervisedRun, estimate_supervised

logger = logging.getLogger("openppo")
T = TypeVar("T")

_PACKED = 512  # documents share rows of this length, see token_batches.py


def announce_ppo(
    config: TrainPPOConfig, data: PPOData, critic: tuple[str, str] | None, strategy: DeepspeedStrategy
) -> Estimate | None:
    """The estimate of a train_ppo run; None if one of its models cannot be built without weights.

    It is logged on rank 0: in one line, or as a table if it does not fit, or with ``--dry_run``.

    ``critic`` is flag and name of the model that the critic starts from, None without one.

    Ends the process, with status 0, if ``--dry_run`` is given. ``ValueError`` names the flag of a model that cannot be.
    """
    targets, trust, source = config.lora.target_modules, config.model.trust_remote_code, config.rewards
    models: dict[str, tuple[str, str | None, Head]] = {
        "actor": ("--pretrain", config.model.pretrain, "vocabulary"),
        "reference": ("--ref_pretrain", config.model.ref_pretrain, "vocabulary"),
        "critic": (*(critic or ("", None)), "scalar"),
        "reward model": ("--reward_pretrain", source.reward_pretrain, "scalar"),
        "process reward model": ("--prm_pretrain", source.prm_pretrain, "vocabulary"),
    }
    named = {role: (flag, name, head) for role, (flag, name, head) in models.items() if name is not None}
    shapes = _or_none(lambda: {role: _shape(*of_role, targets, trust) for role, of_role in named.items()}, config.run)
    if shapes is None:
        return None
    prompts = [len(prompt.token_ids) for prompt in data.prompts]
    documents = [len(document.token_ids) for document in data.documents]
    document = max(min(_PACKED, data.longest), *documents) if documents else 0
    lengths = Lengths(min(prompts), max(prompts), document)
    run = PPORun(config, shapes, lengths, **_machine(config.run, strategy))
    return _announce(estimate_ppo(run), config.run, strategy)


def announce_supervised(
    config: SupervisedCommand,
    head: Head,
    rows: list[list[int]],
    strategy: DeepspeedStrategy,
    rows_per_sample: int = 1,
    most_scored: int | None = None,
) -> Estimate | None:
    """As ``announce_ppo``, for the model that is trained on ``rows`` of token ids.

    ``most_scored`` is how many places of a row get logits (None: any).
    """
    options = config.supervised
    targets, trust = config.lora.target_modules, options.trust_remote_code
    shape = _or_none(lambda: _shape("--pretrain", options.pretrain, head, targets, trust), config.run)
    if shape is None:
        return None
    longest = max(map(len, rows))
    scored = longest if most_scored is None else most_scored * config.batch.micro_train_batch_size
    run = SupervisedRun(config, shape, longest, scored, rows_per_sample, **_machine(config.run, strategy))
    return _announce(estimate_supervised(run), config.run, strategy)


def _or_none(measure: Callable[[], T], options: RunConfig) -> T | None:
    """A training run does without an estimate, with a warning; a dry run does not."""
    try:
        return measure()
    except ValueError as error:
        if options.dry_run:
            raise
        logger.warning("no estimate of memory, so --max_num_seqs is not lowered to what fits: %s", error)
        return None


def _shape(flag: str, name: str, head: Head, targets: Sequence[str], trust: bool) -> ModelShape:
    try:
        return model_shape(check_model(name, flag, trust), head, targets, trust)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(flag) else f"{flag} {name}: {error}") from error


def _announce(estimate: Estimate, options: RunConfig, strategy: DeepspeedStrategy) -> Estimate:
    lines = estimate.table() if options.dry_run or not estimate.fits else [estimate.summary()]
    for line in lines if strategy.is_main else []:
        logger.info("%s", line)
    if not estimate.fits and strategy.is_main:
        logger.warning("the estimate exceeds the device's memory; what helps: %s", "; ".join(estimate.remedies()))
    if options.dry_run:
        strategy.close()
        raise SystemExit(0)
    return estimate


def _machine(options: RunConfig, strategy: DeepspeedStrategy) -> dict[str, Any]:
    """Ranks and devices to estimate for: the run's, or those that ``--dry_run_ranks`` and its like name."""
    n_ranks = options.dry_run_ranks or strategy.comm.world_size
    if options.dry_run_memory is not None:
        return {"n_ranks": n_ranks, "on_cpu": False, "device_memory": round(options.dry_run_memory * 2**30)}
    if strategy.device.type == "cuda":
        memory = torch.cuda.get_device_properties(strategy.device).total_memory
        return {"n_ranks": n_ranks, "on_cpu": False, "device_memory": memory}
    here = options.dry_run_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here
    return {"n_ranks": n_ranks, "on_cpu": True, "device_memory": memory}
