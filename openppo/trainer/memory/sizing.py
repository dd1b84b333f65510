"""An estimate of memory in the log, before a model is loaded; and on GPUs sizes of batches that it allows."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig

from openppo import logger
from openppo.config import TrainPPOConfig, flat_dict
from openppo.config.commands import SupervisedCommand
from openppo.config.remedies import remedies
from openppo.models.pretrained import check_model
from openppo.models.size import ModelSize, model_size
from openppo.models.vision_models import n_patches
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.trainer.data import PPOData
from openppo.trainer.memory.estimate import Estimate, Machine
from openppo.trainer.memory.ppo_estimate import Lengths, estimate_ppo
from openppo.trainer.roles import critic_start
from openppo.trainer.supervised.batches import PACKED_ROW

Sizes = dict[str, ModelSize]
TOKEN_BUDGETS = (131072, 65536, 32768, 16384, 8192, 4096, 2048)
"""Tokens of a micro-batch on a GPU: of fewer, kernels take less time than launching them."""
_USUAL_BUDGET = 32768
_LAUNCHING_A_LAYER = 6e-3
"""Seconds of the host for a forward and backward pass of a layer, and ``_FLOPS`` that training reaches in a second.

On an H200 with a model of 0.5B, benchmarks/results/2026-11-27-h200.md.
"""
_FLOPS = 2.5e14
_SHARE = 0.9  # of a GPU's memory; the rest is for what allocators keep
_SCALAR, _PROCESS = (
    ("reward model", "critic"),
    "process reward model",
)  # roles with a scalar head, with whole logits


def token_budgets(actor: ModelSize) -> Sequence[int]:
    """Budgets worth trying, the largest first: of more tokens than the first, training does not wait for launches.

    A token takes six operations for each parameter, forward and backward.
    """
    launching_s = _LAUNCHING_A_LAYER * actor.layers
    enough = max(_USUAL_BUDGET, launching_s * _FLOPS / (6 * actor.n_parameters))
    return [tokens for tokens in TOKEN_BUDGETS if tokens < 2 * enough]


def sizes_for_gpu(
    config: TrainPPOConfig,
    estimate_of: Callable[[TrainPPOConfig], Estimate],
    budgets: Sequence[int],
) -> TrainPPOConfig:
    """``config`` with the first token budgets that fit, where it gives no size of micro-batches.

    As it is on CPUs, and where no budget fits: then a few samples do, or nothing.
    """
    given = {"micro_train_tokens": config.batch.micro_train_batch_size}
    given["micro_rollout_tokens"] = config.ppo.micro_rollout_batch_size
    for (name, rows), phase in zip(given.items(), ("training", "experience"), strict=True):
        for tokens in budgets if rows is None and vars(config.ppo)[name] is None else ():
            budget: dict[str, Any] = {name: tokens}
            sized = replace(config, ppo=replace(config.ppo, **budget))
            estimate = estimate_of(sized)
            if estimate.machine.on_cpu:
                break
            if estimate.phases[phase] <= _SHARE * estimate.machine.room:
                config = sized
                break
    return config


def estimated_ppo(
    config: TrainPPOConfig,
    data: PPOData,
    strategy: DeepspeedStrategy,
    configs: Mapping[str, PreTrainedConfig],
) -> tuple[TrainPPOConfig, Estimate | None]:
    """Memory of a train_ppo run, without prompts as if they had ``--prompt_max_len`` tokens; and ``sizes_for_gpu``.

    ``configs`` by flag are those of models that are known already.
    """
    model, rewards = config.model, config.rewards
    reference = model.ref_pretrain or (model.pretrain if config.lora.lora_rank == 0 else None)
    models = {
        "reward model": ("--reward_pretrain", rewards.reward_pretrain),
        _PROCESS: ("--prm_pretrain", rewards.prm_pretrain),
        "critic": critic_start(config) or ("", None),
        "actor": ("--pretrain", model.pretrain),
        "reference": ("--ref_pretrain", reference if config.kl.init_kl_coef > 0 else None),
    }
    prompts = [len(prompt.token_ids) for prompt in data.prompts] or [config.data.prompt_max_len]
    documents = [len(document.token_ids) for document in data.documents]
    document = max(min(PACKED_ROW, data.longest), *documents) if documents else 0
    seen = configs.get("--pretrain")
    patches = max(
        (n_patches(prompt.media, seen) for prompt in data.prompts if prompt.media), default=0
    )
    lengths = Lengths(
        min(prompts), data.longest - config.generation.generate_max_len, document, patches=patches
    )
    sizes = _count(models, config, configs)
    if sizes is None:
        return config, None
    machine = _machine(config, strategy)
    sized = sizes_for_gpu(
        config,
        lambda one: estimate_ppo(one, lengths, sizes, machine=machine),
        token_budgets(sizes["actor"]),
    )
    chosen = {name: n for name, n in vars(sized.ppo).items() if n != vars(config.ppo)[name]}
    if chosen:
        flags = " ".join(f"--{name} {tokens}" for name, tokens in chosen.items())
        logger.info("micro-batches by the GPU's memory: %s", flags)
    return sized, _estimate(partial(estimate_ppo, sized, lengths, sizes), machine)


def log_memory(
    estimate_of: Callable[[Sizes, Machine], Estimate],
    models: Mapping[str, tuple[str, str | None]],
    config: SupervisedCommand,
    strategy: DeepspeedStrategy,
) -> Estimate | None:
    """Log an estimate of ``models``, flag and name by role; None where a model cannot be counted."""
    sizes = _count(models, config, {})
    estimate = (
        None
        if sizes is None
        else _estimate(partial(estimate_of, sizes), _machine(config, strategy))
    )
    log_estimate(estimate, config, strategy)
    return estimate


def log_estimate(
    estimate: Estimate | None,
    config: TrainPPOConfig | SupervisedCommand,
    strategy: DeepspeedStrategy,
) -> None:
    """Log it; with --dry_run, end the process."""
    run = config.run
    if estimate is None:
        return
    for line in estimate.table() if run.dry_run or not estimate.fits else [estimate.summary()]:
        logger.info("%s", line)
    if not estimate.fits and strategy.is_main:
        flags = remedies(estimate.largest, flat_dict(config), estimate.machine.on_cpu)
        logger.warning(
            "the estimate exceeds the device's memory; what lowers it: %s", ", ".join(flags)
        )
    if run.dry_run:
        strategy.close()
        raise SystemExit(0)


def _estimate(estimate_of: Callable[[Machine], Estimate], machine: Machine) -> Estimate:
    """The estimate; suggests ZeRO-1 where it fits in place of ZeRO-2."""
    stage_1 = replace(machine, options=replace(machine.options, zero_stage=1))
    if (
        machine.options.zero_stage == 2
        and machine.n_ranks > 1
        and not machine.on_cpu
        and estimate_of(stage_1).fits
    ):
        logger.info(
            "--zero_stage 1 fits too, and reduces gradients once in an optimizer step, not per micro-batch"
        )
    return estimate_of(machine)


def _count(
    models: Mapping[str, tuple[str, str | None]],
    config: TrainPPOConfig | SupervisedCommand,
    configs: Mapping[str, PreTrainedConfig],
) -> Sizes | None:
    """Models by role in numbers; None, with a warning, where one cannot be counted."""
    vision = config.model if isinstance(config, TrainPPOConfig) else config.supervised
    options: Any = config.lora.target_modules, vision.trust_remote_code
    try:
        sizes = {
            role: model_size(
                configs.get(flag) or check_model(name, flag, options[1]), role in _SCALAR, *options
            )
            for role, (flag, name) in models.items()
            if name is not None
        }
    except ValueError as error:
        if config.run.dry_run:
            raise
        logger.warning("no estimate of memory: %s", error)
        return None
    adapted = config.lora.lora_rank > 0
    tower, connector = vision.freeze_vision_tower or adapted, vision.freeze_connector or adapted
    sizes = {
        r: size._replace(n_frozen=size.tower * tower + size.connector * connector)
        for r, size in sizes.items()
    }
    some = sizes if config.deepspeed.zero_stage == 3 else sizes.keys() & {_PROCESS}
    return sizes | {role: sizes[role]._replace(whole_logits=True) for role in some}


def _machine(config: TrainPPOConfig | SupervisedCommand, strategy: DeepspeedStrategy) -> Machine:
    """That of the run, or the one that --dry_run describes; of GPUs the smallest of all ranks."""
    run, on_cpu = config.run, strategy.device.type == "cpu" and config.run.dry_run_memory is None
    if run.dry_run_memory is not None:
        memory = round(run.dry_run_memory * 2**30)
    elif on_cpu:
        here = run.dry_run_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // here
    else:
        memory = torch.cuda.get_device_properties(strategy.device).total_memory
        memory = min(strategy.comm.all_gather_object(memory))
    return Machine(
        config.deepspeed, run.dry_run_ranks or strategy.comm.world_size, on_cpu, memory=memory
    )
