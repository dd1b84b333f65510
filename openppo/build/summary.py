"""Log of a run at its start: versions, models, and the arithmetic of its batches."""

import platform
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import transformers

from openppo.build.batch_plan import BatchPlan
from openppo.build.roles import critic_start
from openppo.config import TrainPPOConfig, mask_credentials
from openppo.config.resolved import Resolved
from openppo.models.adapters import AdapterOffReference
from openppo.models.size import n_elements
from openppo.rewards.model import ModelScorer
from openppo.rewards.process import ProcessScorer
from openppo.rewards.scoring import CombinedScorer, Scorer
from openppo.strategy.compilation import has_compiled_layers
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.fused_kernels import fused_in
from openppo.strategy.start_reference import StartReference
from openppo.tracking.console import log_lines, table_lines
from openppo.trainer.components import PPOComponents
from openppo.trainer.supervised.loop import SupervisedTrainer

_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "4 bit"}

Facts = list[tuple[str, str]]
"""Rows of a table: a name, empty in continued rows, and a text."""


def model_role(
    name: str, model: str, module: Any, strategy: DeepspeedStrategy, is_trained: bool
) -> Facts:
    """Name and facts of ``module``, which ``DeepspeedStrategy`` may have wrapped and partitioned.

    Parameters are counted for the whole model.
    """
    parameters: list[Any] = list(module.parameters())
    n_trained = sum(n_elements(p) for p in parameters if p.requires_grad)
    n_frozen = sum(map(n_elements, parameters)) - n_trained
    facts = []
    if n_trained > 0:
        facts.append(f"{n_trained:,} trained")
    if n_frozen > 0:
        facts.append(f"{n_frozen:,} frozen")

    names = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters)
    dtype = ", ".join(_DTYPES.get(name, name) for name in names)
    if is_trained and strategy.config.bf16:
        dtype += " + fp32 master"
    facts.append(dtype)

    n_ranks = strategy.comm.world_size
    device = strategy.device.type
    facts.append(device if n_ranks == 1 else f"{n_ranks} x {device}")
    stage = strategy.zero_stage if is_trained or strategy.zero_stage == 3 else 0
    facts.append(f"ZeRO-{stage}" if stage > 0 else "whole")

    kernels = fused_in(module)
    if kernels:
        facts.append(f"fused {', '.join(kernels)}")
    if is_trained and has_compiled_layers(module):
        facts.append("layers compiled")
    return [(name, model), ("", ", ".join(facts))]


def log_ppo_start(config: TrainPPOConfig, components: PPOComponents, plan: BatchPlan) -> None:
    """Log models and batch arithmetic of a train_ppo run, on rank 0."""
    if not components.strategy.is_main:
        return
    roles = _trained_roles(config, components)
    roles += _reference_role(config, components)
    scorers = [task.scorer for task in components.data.tasks]
    if any(scorer is not None for scorer in scorers) or config.rewards.are_none:
        roles += _reward_roles(config, components.strategy, scorers)

    ids = components.maker.hooks.sampled_ids
    if ids.left_out:
        roles.append(("never sampled", f"ids {ids}"))

    facts = _ppo_facts(plan, len(components.data.prompts), components.maker.resolved)
    _log(roles, facts, components.state.global_step, total=plan.n_steps)


def _trained_roles(config: TrainPPOConfig, components: PPOComponents) -> Facts:
    """Facts of actor and critic."""
    strategy = components.strategy
    actor = components.actor.module
    roles = model_role("actor", config.model.pretrain, actor, strategy=strategy, is_trained=True)
    start = critic_start(config)
    if components.critic is not None and start is not None:
        _, name = start
        critic = components.critic.module
        roles += model_role("critic", name, critic, strategy=strategy, is_trained=True)
    return roles


def _reference_role(config: TrainPPOConfig, components: PPOComponents) -> Facts:
    """Facts of the reference, if there is one."""
    reference = components.maker.reference
    if reference is None:
        return []
    if isinstance(reference, AdapterOffReference):
        return [("reference", "the actor, its adapters off")]
    if isinstance(reference, StartReference):
        return [("reference", "the actor, its adapters as they began")]
    name = config.model.ref_pretrain or config.model.pretrain
    strategy = components.strategy
    return model_role("reference", name, reference, strategy=strategy, is_trained=False)


def _reward_roles(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, scorers: Sequence[Scorer | None]
) -> Facts:
    """Facts of the sources of rewards: names of functions, and models."""
    rewards = config.rewards
    if rewards.are_none:
        return [("reward", "none, the KL to the reference alone")]
    names = [
        rewards.reward_fn,
        mask_credentials(rewards.remote_rm_url or ""),
        " ".join(rewards.verifiable_reward),
    ]
    roles = [("reward", name) for name in names if name]

    single_scorers: list[Scorer | None] = []
    for scorer in scorers:
        if isinstance(scorer, CombinedScorer):
            single_scorers += scorer.scorers
        else:
            single_scorers.append(scorer)
    for scorer in single_scorers:
        if isinstance(scorer, ModelScorer):
            model = rewards.reward_pretrain
        elif isinstance(scorer, ProcessScorer):
            model = rewards.prm_pretrain
        else:
            continue
        roles += model_role(
            "reward",
            model or "",
            scorer.model,
            strategy=strategy,
            is_trained=False,
        )
    return roles


def _ppo_facts(plan: BatchPlan, n_prompts: int, resolved: Resolved) -> Facts:
    """Arithmetic of a step and of the whole run."""
    ppo = plan.config.ppo
    batch = plan.config.batch
    first = plan.steps[0]
    last = plan.steps[-1]
    on_each = f" on each of {plan.n_ranks} ranks" if plan.n_ranks > 1 else ""
    at_most = "at most " if ppo.dynamic_sampling else ""

    n_samples = plan.n_samples(first)
    samples = f"{count(first, 'prompt')} x {count(ppo.n_samples_per_prompt, 'response')} = {n_samples:,} samples"

    passes = _size(resolved.micro_rollout_tokens, ppo.forward_rows)
    micro = _size(resolved.micro_train_tokens, batch.micro_rows)
    mini = count(plan.mini_batches(first), "mini-batch", "mini-batches")
    mini += f" of {min(batch.train_batch_size, n_samples):,} samples"
    epochs = count(batch.max_epochs, "epoch")

    episodes = f"{count(plan.prompt_epochs, 'episode')} of {n_prompts:,} prompts in "
    episodes += count(len(plan.steps), "batch", "batches")
    if last < first:
        episodes += f", the last of {last:,}"
    n_steps = count(plan.n_steps, "step")
    optimizer_steps = count(plan.optimizer_steps(), "optimizer step")
    if ppo.frozen_actor_steps > 0:
        n_of_actor = plan.optimizer_steps(without=ppo.frozen_actor_steps)
        optimizer_steps += f", {n_of_actor:,} of them of the actor"

    facts = []
    if n_prompts:
        facts.append(("each step", f"{at_most}{samples}"))
    facts += [
        ("experience", f"passes of {passes}{on_each}"),
        ("training", f"{epochs} of {mini}, in micro-batches of {micro}{on_each}"),
        ("in all", episodes if n_prompts else "samples of the given source"),
        ("", f"{at_most}{n_steps}, {optimizer_steps}"),
    ]
    return facts


def _size(tokens: int | None, rows: int) -> str:
    """Limit of a micro-batch, in tokens or in samples."""
    return f"up to {tokens:,} tokens" if tokens else f"up to {rows:,} samples"


def log_supervised_start(trainer: SupervisedTrainer[Any]) -> None:
    """Log the model and the batch arithmetic of supervised training, on rank 0."""
    components = trainer.components
    config = trainer.config
    if not components.strategy.is_main:
        return

    facts = _supervised_facts(trainer)
    if components.eval_examples:
        facts.append(("held out", count(len(components.eval_examples), "sample")))
    name = config.supervised.pretrain
    module = components.model.module
    role = model_role("model", name, module, strategy=components.strategy, is_trained=True)
    _log(role, facts, trainer.global_step, total=trainer.total_steps)


def _supervised_facts(trainer: SupervisedTrainer[Any]) -> Facts:
    """Arithmetic of a step and of the whole run."""
    config = trainer.config
    batch = config.batch
    n_ranks = trainer.comm.world_size
    n_examples = len(trainer.components.train_examples)
    on_each = f" on each of {n_ranks} ranks" if n_ranks > 1 else ""

    step_size = min(batch.train_batch_size, n_examples)
    per_rank = -(-step_size // n_ranks)
    micro = count(-(-per_rank // batch.micro_rows), "micro-batch", "micro-batches")
    split = f"in {micro} of up to {batch.micro_rows}"
    if config.pack_to is not None:
        split = f"packed into rows of {config.pack_to} tokens, in micro-batches of up to {batch.micro_rows} rows"

    epochs = count(batch.max_epochs, "epoch")
    n_steps = batch.max_epochs * -(-n_examples // batch.train_batch_size)
    steps = count(n_steps, "step")
    if trainer.total_steps < n_steps:
        steps += f"; --max_steps ends it after {trainer.total_steps:,}"
    return [
        ("each step", f"{step_size:,} samples, {split}{on_each}"),
        ("in all", f"{epochs} of {count(n_examples, 'sample')}, {steps}"),
    ]


def _log(roles: Facts, facts: Facts, done: int, total: int) -> None:
    """Log versions and both tables; a resumed run has ``done`` steps already."""
    if done > 0:
        facts = [*facts, ("resumes", f"after step {done:,} of {total:,}")]
    libraries = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, transformers {transformers.__version__}"
    versions = f"{libraries}, Python {platform.python_version()}"
    tables = [*table_lines(roles), "", *table_lines(facts)]
    log_lines(["", versions, "", *tables, ""])


def count(n: int, singular: str, plural: str = "") -> str:
    """Return ``n`` with its noun, as in "2,000 steps"; the plural ends in s by default."""
    noun = singular if n == 1 else plural or singular + "s"
    return f"{n:,} {noun}"
