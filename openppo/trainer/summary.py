"""What a run logs at its start: versions, models, and the arithmetic of its batches."""

import platform
from typing import Any

import deepspeed
import torch
import transformers

from openppo.config import TrainPPOConfig, mask_credentials
from openppo.models.adapters import AdapterOffReference
from openppo.models.size import n_elements
from openppo.rewards.model import ModelScorer, ProcessScorer
from openppo.strategy.compilation import has_compiled_layers
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.fused_kernels import fused_in
from openppo.tracking.console import log_lines, table_lines
from openppo.trainer.batch_plan import BatchPlan
from openppo.trainer.components import PPOComponents
from openppo.trainer.roles import critic_start
from openppo.trainer.supervised.loop import SupervisedTrainer

_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "4 bit"}
Facts = list[tuple[str, str]]


def model_role(
    name: str, model: str, module: Any, strategy: DeepspeedStrategy, is_trained: bool
) -> Facts:
    """Name and facts of ``module``, which ``DeepspeedStrategy`` may have wrapped and partitioned.

    Parameters are counted for the whole model.
    """
    parameters: list[Any] = list(module.parameters())
    trained = sum(n_elements(p) for p in parameters if p.requires_grad)
    frozen = sum(map(n_elements, parameters)) - trained
    stage = strategy.zero_stage if is_trained or strategy.zero_stage == 3 else 0
    n_ranks, device = strategy.comm.world_size, strategy.device.type
    device = device if n_ranks == 1 else f"{n_ranks} x {device}"
    counts = [f"{n:,} {state}" for n, state in ((trained, "trained"), (frozen, "frozen")) if n > 0]
    names = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters)
    dtype = ", ".join(_DTYPES.get(name, name) for name in names)
    if is_trained and strategy.config.bf16:
        dtype += " + fp32 master"
    facts = [*counts, dtype, device, f"ZeRO-{stage}" if stage > 0 else "whole"]
    if kernels := fused_in(module):
        facts.append(f"fused {', '.join(kernels)}")
    if is_trained and has_compiled_layers(module):
        facts.append("layers compiled")
    return [(name, model), ("", ", ".join(facts))]


def log_ppo_start(config: TrainPPOConfig, components: PPOComponents, plan: BatchPlan) -> None:
    """Log models and batch arithmetic of a train_ppo run, on rank 0."""
    strategy = components.strategy
    pretrain = config.model.pretrain
    rewards = config.rewards
    if not strategy.is_main:
        return
    roles = model_role(
        "actor", pretrain, components.actor.module, strategy=strategy, is_trained=True
    )
    if components.critic is not None and (start := critic_start(config)) is not None:
        roles += model_role(
            "critic", start[1], components.critic.module, strategy=strategy, is_trained=True
        )
    reference = components.maker.reference
    if isinstance(reference, AdapterOffReference):
        roles.append(("reference", "the actor, its adapters off"))
    elif reference is not None:
        name = config.model.ref_pretrain or pretrain
        roles += model_role("reference", name, reference, strategy=strategy, is_trained=False)
    if components.scorer is not None:
        others = (
            rewards.reward_fn,
            mask_credentials(rewards.remote_rm_url or ""),
            " ".join(rewards.verifiable_reward),
        )
        roles += [("reward", source) for source in others if source]
        for scorer in getattr(components.scorer, "scorers", [components.scorer]):
            if isinstance(scorer, ModelScorer | ProcessScorer):
                source = (
                    rewards.reward_pretrain
                    if isinstance(scorer, ModelScorer)
                    else rewards.prm_pretrain
                )
                roles += model_role(
                    "reward", source or "", scorer.model, strategy=strategy, is_trained=False
                )
    if (ids := components.maker.hooks.sampled_ids).left_out:
        roles.append(("never sampled", f"ids {ids}"))
    _log(
        roles,
        _ppo_facts(plan, len(components.data.prompts)),
        components.state.global_step,
        total=plan.n_steps,
    )


def _ppo_facts(plan: BatchPlan, n_prompts: int) -> Facts:
    ppo = plan.config.ppo
    batch = plan.config.batch
    first = plan.steps[0]
    last = plan.steps[-1]
    each = f" on each of {plan.n_ranks} ranks" if plan.n_ranks > 1 else ""
    most = "at most " if ppo.dynamic_sampling else ""
    sampled, trained = first * ppo.n_samples_per_prompt, plan.n_samples(first)
    samples = f"{count(first, 'prompt')} x {count(ppo.n_samples_per_prompt, 'response')} = {sampled:,} samples"
    kept = f", {trained:,} kept by --buffer_limit" if trained < sampled else ""
    sizes = (
        (ppo.micro_rollout_tokens, ppo.forward_rows),
        (ppo.micro_train_tokens, batch.micro_rows),
    )
    passes, micro = (
        f"up to {tokens:,} tokens" if tokens else f"up to {rows:,} samples"
        for tokens, rows in sizes
    )
    mini = count(plan.mini_batches(first), "mini-batch", "mini-batches")
    mini += f" of {min(batch.train_batch_size, trained):,} samples"
    rest = f", the last of {last:,}" if last < first else ""
    in_all = f"{count(plan.episodes, 'episode')} of {n_prompts:,} prompts in "
    in_all += f"{count(len(plan.steps), 'batch', 'batches')}{rest}"
    total = count(plan.optimizer_steps(), "optimizer step")
    if ppo.frozen_actor_steps > 0:
        total += f", {plan.optimizer_steps(without=ppo.frozen_actor_steps):,} of them of the actor"
    return [
        *([("each step", f"{most}{samples}{kept}")] if n_prompts else []),
        ("experience", f"passes of {passes}{each}"),
        (
            "training",
            f"{count(batch.max_epochs, 'epoch')} of {mini}, in micro-batches of {micro}{each}",
        ),
        ("in all", in_all if n_prompts else "trajectories of the given source"),
        ("", f"{most}{count(plan.n_steps, 'step')}, {total}"),
    ]


def log_supervised_start(trainer: SupervisedTrainer[Any]) -> None:
    """Log the model and the batch arithmetic of supervised training, on rank 0."""
    components = trainer.components
    config = trainer.config
    ranks = trainer.comm.world_size
    if not components.strategy.is_main:
        return
    batch, n = config.batch, len(components.train_examples)
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    size = min(batch.train_batch_size, n)
    share = -(-size // ranks)
    micro = count(-(-share // batch.micro_rows), "micro-batch", "micro-batches")
    whole = batch.max_epochs * -(-n // batch.train_batch_size)
    cut = (
        f"; --max_steps ends it after {trainer.total_steps:,}"
        if trainer.total_steps < whole
        else ""
    )
    split = f"in {micro} of up to {batch.micro_rows}"
    if config.pack_to is not None:
        split = f"packed into rows of {config.pack_to} tokens, in micro-batches of up to {batch.micro_rows} rows"
    facts = [
        ("each step", f"{size:,} samples, {split}{each}"),
        (
            "in all",
            f"{count(batch.max_epochs, 'epoch')} of {count(n, 'sample')}, {count(whole, 'step')}{cut}",
        ),
    ]
    if components.eval_examples:
        facts.append(("held out", count(len(components.eval_examples), "sample")))
    name, module = config.supervised.pretrain, components.model.module
    role = model_role("model", name, module, strategy=components.strategy, is_trained=True)
    _log(role, facts, trainer.global_step, total=trainer.total_steps)


def _log(roles: Facts, facts: Facts, done: int, total: int) -> None:
    """Log versions, the table of roles, and ``facts`` with steps ``done`` before."""
    if done > 0:
        facts = [*facts, ("resumes", f"after step {done:,} of {total:,}")]
    libraries = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, transformers {transformers.__version__}"
    versions = f"{libraries}, Python {platform.python_version()}"
    log_lines(["", versions, "", *table_lines(roles), "", *table_lines(facts), ""])


def count(n: int, one: str, many: str = "") -> str:
    """``n`` of what is called ``one`` in the singular."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
