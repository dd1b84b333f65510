"""Memory estimates before models are loaded, and batch sizes that fit a GPU."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedConfig

from openppo import logger
from openppo.build.memory.budgets import machine_memory, token_budgets, with_token_budgets
from openppo.build.memory.estimate import Estimate
from openppo.build.memory.machine import Machine
from openppo.build.memory.ppo_estimate import Lengths, estimate_ppo
from openppo.build.roles import critic_start
from openppo.config import TrainPPOConfig, flat_dict
from openppo.config.remedies import remedies
from openppo.config.resolved import Resolved
from openppo.config.train_supervised import SupervisedCommand
from openppo.models.pretrained import check_model
from openppo.models.size import ModelSize, model_size
from openppo.models.vision_models import n_patches
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.trainer.run_data import RunData
from openppo.trainer.supervised.batches import PACKED_ROW

Sizes = dict[str, ModelSize]
_SCALAR = ("reward model", "critic")
"""Roles with a scalar head."""
_PROCESS = "process reward model"
"""The role that always computes whole logits."""

ModelNames = Mapping[str, tuple[str, str | None]]
"""Flag and name of models by role; None as a name: there is no such model."""


def estimated_ppo(
    config: TrainPPOConfig,
    data: RunData,
    strategy: DeepspeedStrategy,
    configs: Mapping[str, PreTrainedConfig],
) -> tuple[Resolved, Estimate | None]:
    """Choose the sizes of micro-batches, and estimate a train_ppo run with them.

    Without prompts a prompt has ``--prompt_max_len`` tokens. ``configs`` are those of models that are known, by flag.
    """
    sizes = _count(_models(config), config, configs)
    if sizes is None:
        return Resolved.of(config), None

    lengths = _lengths(config, data, configs.get("--pretrain"))
    machine = _machine(config, strategy)

    def estimate(candidate: Resolved, on: Machine = machine) -> Estimate:
        return estimate_ppo(config, candidate, lengths, sizes=sizes, machine=on)

    budgets = token_budgets(sizes["actor"], machine.on_cpu)
    resolved = with_token_budgets(config, estimate, budgets)
    stated = Resolved.of(config).options
    chosen = {name: n for name, n in resolved.options.items() if n != stated[name]}
    if chosen:
        flags = " ".join(f"--{name} {tokens}" for name, tokens in chosen.items())
        logger.info(
            "micro-batches by the %s's memory: %s", "CPU" if machine.on_cpu else "GPU", flags
        )
    return resolved, _estimate(partial(estimate, resolved), machine)


def _models(config: TrainPPOConfig) -> ModelNames:
    """Models of the run in the order of loading."""
    model = config.model
    rewards = config.rewards
    reference = model.ref_pretrain or None
    if reference is None and config.lora.lora_rank == 0:
        reference = model.pretrain
    if config.kl.init_kl_coef == 0:
        reference = None
    return {
        "reward model": ("--reward_pretrain", rewards.reward_pretrain),
        _PROCESS: ("--prm_pretrain", rewards.prm_pretrain),
        "critic": critic_start(config) or ("", None),
        "actor": ("--pretrain", model.pretrain),
        "reference": ("--ref_pretrain", reference),
    }


def _lengths(config: TrainPPOConfig, data: RunData, policy: PreTrainedConfig | None) -> Lengths:
    """Token and patch counts of the data; ``policy`` is the config that cuts images into patches."""
    prompts = [len(prompt.token_ids) for prompt in data.prompts] or [config.data.prompt_max_len]
    documents = [len(document.token_ids) for document in data.documents]
    patches = [n_patches(prompt.media, policy) for prompt in data.prompts if prompt.media]
    return Lengths(
        shortest_prompt=min(prompts),
        longest_prompt=data.longest - config.generation.generate_max_len,
        document=max(min(PACKED_ROW, data.longest), *documents) if documents else 0,
        patches=max(patches, default=0),
    )


def log_memory(
    estimate_of: Callable[[Sizes, Machine], Estimate],
    models: ModelNames,
    config: SupervisedCommand,
    strategy: DeepspeedStrategy,
) -> Estimate | None:
    """Log an estimate of ``models`` and return it; None where a model cannot be counted."""
    sizes = _count(models, config, {})
    estimate = None
    if sizes is not None:
        machine = _machine(config, strategy)
        estimate = _estimate(partial(estimate_of, sizes), machine)
    log_estimate(estimate, config, strategy)
    return estimate


def log_estimate(
    estimate: Estimate | None,
    config: TrainPPOConfig | SupervisedCommand,
    strategy: DeepspeedStrategy,
) -> None:
    """Log ``estimate``, if there is one; with --dry_run, end the process."""
    if estimate is None:
        return

    run = config.run
    lines = estimate.table() if run.dry_run or not estimate.fits else [estimate.summary()]
    for line in lines:
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
    """Return the estimate on ``machine``; suggest ZeRO-1 where it fits in place of ZeRO-2."""
    zero_2 = machine.options.zero_stage == 2 and machine.n_ranks > 1
    if zero_2 and not machine.on_cpu:
        stage_1 = replace(machine, options=replace(machine.options, zero_stage=1))
        if estimate_of(stage_1).fits:
            logger.info(
                "--zero_stage 1 fits too, and reduces gradients once in an optimizer step, not per micro-batch"
            )
    return estimate_of(machine)


def _count(
    models: ModelNames,
    config: TrainPPOConfig | SupervisedCommand,
    configs: Mapping[str, PreTrainedConfig],
) -> Sizes | None:
    """Count the elements of models by role; None, with a warning, where one cannot be counted."""
    options = config.model if isinstance(config, TrainPPOConfig) else config.supervised
    sizes: Sizes = {}
    try:
        for role, (flag, name) in models.items():
            if name is None:
                continue
            model = configs.get(flag) or check_model(name, flag, options.trust_remote_code)
            sizes[role] = model_size(
                model,
                scalar=role in _SCALAR,
                targets=config.lora.target_modules,
                trust=options.trust_remote_code,
            )
    except ValueError as error:
        if config.run.dry_run:
            raise
        logger.warning("no estimate of memory: %s", error)
        return None

    adapted = config.lora.lora_rank > 0
    for role, size in sizes.items():
        tower = size.tower if options.freeze_vision_tower or adapted else 0
        connector = size.connector if options.freeze_connector or adapted else 0
        has_whole_logits = config.deepspeed.zero_stage == 3 or role == _PROCESS
        sizes[role] = size._replace(
            n_frozen=tower + connector, whole_logits=size.whole_logits or has_whole_logits
        )
    return sizes


def _machine(config: TrainPPOConfig | SupervisedCommand, strategy: DeepspeedStrategy) -> Machine:
    """Describe the run's machine, or that of --dry_run; the smallest GPU of all ranks counts."""
    run = config.run
    on_cpu = strategy.device.type == "cpu" and run.dry_run_memory is None
    if run.dry_run_memory is not None:
        memory = round(run.dry_run_memory * 2**30)
    elif on_cpu:
        n_processes = run.dry_run_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        memory = machine_memory() // n_processes
    else:
        memory = torch.cuda.get_device_properties(strategy.device).total_memory
        memory = min(strategy.comm.all_gather_object(memory))

    n_ranks = run.dry_run_ranks or strategy.comm.world_size
    return Machine(config.deepspeed, n_ranks, on_cpu, memory=memory)
