"""The table at the start of a run: roles, and what its batches come to."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import transformers
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from openppo.config import TrainPPOConfig, mask_credentials
from openppo.models.adapters import AdapterOffReference
from openppo.tracking.terminal import announce
from openppo.trainer.components import PPOComponents
from openppo.trainer.memory import Estimate, readable
from openppo.trainer.overview.batch_plan import BatchPlan, StepPlan, batch_plan
from openppo.trainer.overview.roles import Role, model_role, scorer_roles
from openppo.trainer.steps.update_step import frozen_actor_steps

_LONGEST_NAME = 40
Facts = list[tuple[str, str]]
"""Lines: what they are about, and their text."""


def announce_ppo_start(config: TrainPPOConfig, parts: PPOComponents, critic: str, done: int) -> None:
    """Log roles and batch arithmetic of a train_ppo run, on rank 0.

    ``critic`` is what the critic starts from; ``done`` the global steps that a resumed run has behind it.
    """
    if not parts.strategy.is_main:
        return
    plan = batch_plan(config, len(parts.prompts), parts.strategy.comm.world_size)
    facts = _ppo_facts(config, plan, parts)
    if done > 0:
        facts.append(("goes on", f"after step {done:,} of {plan.n_steps:,}"))
    announce(
        page(_ppo_roles(config, parts, critic), facts + memory_fact(parts.estimate, parts.strategy.comm.world_size))
    )


def _ppo_roles(config: TrainPPOConfig, parts: PPOComponents, critic: str) -> list[Role]:
    strategy, pretrain = parts.strategy, config.model.pretrain
    roles = [model_role("actor", pretrain, parts.actor.module, strategy, is_trained=True)]
    if parts.critic is not None:
        roles.append(model_role("critic", critic, parts.critic.module, strategy, is_trained=True))
    reference: Any = parts.maker.reference
    if isinstance(reference, AdapterOffReference):
        roles.append(Role("reference", "the actor, its adapters off"))
    elif reference is not None:
        name = config.model.ref_pretrain or pretrain
        roles.append(model_role("reference", name, reference, strategy, is_trained=False))
    source = config.rewards
    sources = {
        "reward_pretrain": source.reward_pretrain or "",
        "prm_pretrain": source.prm_pretrain or "",
        "remote_rm_url": mask_credentials(source.remote_rm_url or ""),
        "verifiable_reward": " ".join(source.verifiable_reward),
    }
    return [*roles, *scorer_roles(parts.scorer, sources, strategy)]


def _ppo_facts(config: TrainPPOConfig, plan: BatchPlan, parts: PPOComponents) -> Facts:
    batch, ranks, first = config.batch, parts.strategy.comm.world_size, plan.steps[0]
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    most = "at most " if config.ppo.dynamic_sampling else ""
    facts = [("each step", _samples(first, config.ppo.n_samples_per_prompt, most))]
    ppo = config.ppo
    passes = _pieces(first.forwards, "passes", f"{ppo.micro_rollout_batch_size} samples", ppo.micro_rollout_tokens)
    facts.append(("experience", passes + each))
    size = min(batch.train_batch_size, first.n_samples)
    micro = _pieces(first.micro_batches, "micro-batches", str(batch.micro_train_batch_size), ppo.micro_train_tokens)
    mini = count(first.mini_batches, "mini-batch", "mini-batches")
    facts.append(("training", f"{count(batch.max_epochs, 'epoch')} of {mini} of {size:,} samples, in {micro}{each}"))
    total = count(plan.optimizer_steps(), "optimizer step")
    if (frozen := frozen_actor_steps(config)) > 0:
        total += f", {plan.optimizer_steps(without=frozen):,} of them of the actor"
    last = plan.steps[-1]
    rest = f", the last of {last.n_prompts:,}" if last.n_prompts < first.n_prompts else ""
    in_all = f"{count(plan.episodes, 'episode')} of {len(parts.prompts):,} prompts in "
    facts.append(("in all", in_all + f"{count(len(plan.steps), 'batch', 'batches')}{rest}"))
    return [*facts, ("", f"{most}{count(plan.n_steps, 'step')}, {total}")]


def _pieces(n: int | None, what: str, size: str, tokens: int | None) -> str:
    """``n`` or more, since they are cut where that saves padding; None where ``tokens`` bound them."""
    return f"{what} of up to {tokens:,} tokens" if n is None else f"{n:,} or more {what} of up to {size}"


def _samples(step: StepPlan, n_responses: int, most: str) -> str:
    sampled = step.n_prompts * n_responses
    kept = f", {step.n_samples:,} kept by --buffer_limit" if step.n_samples < sampled else ""
    text = f"{count(step.n_prompts, 'prompt')} x {count(n_responses, 'response')} = {sampled:,} samples"
    return f"{most}{text}{kept}"


def memory_fact(estimate: Estimate | None, ranks: int) -> Facts:
    """The estimated peak of each rank, if there is an estimate."""
    if estimate is None:
        return []
    peak = f"{readable(estimate.peak)} at most by estimate, in {estimate.largest}"
    room = "" if estimate.machine.memory is None else f"; there are {readable(estimate.machine.memory)}"
    each = " on each rank" if ranks > 1 else ""
    return [("memory", f"{peak}{room}{each} (--dry_run says more)")]


def page(roles: Sequence[Role], facts: Facts) -> RenderableType:
    """Versions, the table of roles, and ``facts`` below it."""
    versions = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, transformers {transformers.__version__}"
    headline = Text(f"{versions}, Python {platform.python_version()}", style="dim")
    below = Table.grid(padding=(0, 2))
    below.add_column(style="dim", no_wrap=True, min_width=9)
    below.add_column()
    for name, text in facts:
        below.add_row(name, text)
    return Group("", headline, "", _table(roles), "", below, "")


def _table(roles: Sequence[Role]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("role", style="bold", no_wrap=True, min_width=9)
    table.add_column("model", overflow="fold")
    for name in ("trained", "frozen"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("dtype", overflow="fold")
    table.add_column("where", no_wrap=True)
    for role in roles:
        counts = [f"{n:,}" if role.dtype else "" for n in (role.trained, role.frozen)]
        table.add_row(role.name, _shortened(role.model), *counts, role.dtype, role.place)
    return table


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else "..." + name[3 - _LONGEST_NAME :]


def count(n: int, one: str, many: str = "") -> str:
    """``n`` of what is called ``one`` if there is one of it."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
