"""What a run logs at its start: versions, models, and the arithmetic of its batches."""

import itertools
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
import transformers
from torch import nn

from openppo.config import TrainPPOConfig, mask_credentials
from openppo.models.adapters import AdapterOffReference
from openppo.rewards.model import ModelScorer
from openppo.rewards.process import ProcessScorer
from openppo.rewards.scoring import CombinedScorer, Scorer
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.tracking.console import log_lines, table_lines
from openppo.trainer.components import PPOComponents
from openppo.trainer.memory import Estimate, format_bytes
from openppo.trainer.supervised.loop import SupervisedTrainer

_LONGEST_NAME = 40
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "4 bit"}
Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class StepPlan:
    """One global step on ``n_prompts`` prompts, over all ranks unless a field says otherwise."""

    n_prompts: int
    n_samples: int
    """Responses that are trained on."""
    most_on_a_rank: int
    """Sampled responses of the busiest rank."""
    forwards: int | None
    """Passes of each model on that rank to make experience, at least; None with ``--micro_rollout_tokens``."""
    mini_batches: int
    """Optimizer steps of actor and critic in each epoch."""
    micro_batches: int | None
    """Passes of a full mini-batch on each rank, at least; None with ``--micro_train_tokens``."""
    optimizer_steps: int


@dataclass(frozen=True)
class BatchPlan:
    """The global steps of one episode, all of full batches except perhaps the last, and the number of episodes."""

    episodes: int
    steps: list[StepPlan]
    max_steps: int | None = None
    """``--max_steps``, which may end the last episode early."""

    @property
    def n_steps(self) -> int:
        """Global steps."""
        n_steps = self.episodes * len(self.steps)
        return n_steps if self.max_steps is None else min(n_steps, self.max_steps)

    def optimizer_steps(self, without: int = 0) -> int:
        """Optimizer steps after the first ``without`` global steps."""
        return sum([step.optimizer_steps for step in self.steps * self.episodes][without : self.n_steps])


def batch_plan(config: TrainPPOConfig, n_prompts: int, world_size: int, n_steps: int | None = None) -> BatchPlan:
    """Plan for ``n_prompts`` prompts; with ``--dynamic_sampling`` an upper bound.

    A source without prompts has ``n_steps`` steps, each planned as one of full batches.
    """
    if n_steps is not None:
        full_batch = _step_plan(config, config.ppo.rollout_batch_size, world_size)
        return BatchPlan(1, [full_batch] * n_steps, config.ppo.max_steps)
    full, rest = divmod(n_prompts, config.ppo.rollout_batch_size)
    sizes = [config.ppo.rollout_batch_size] * full + [rest] * (rest > 0)
    steps = [_step_plan(config, size, world_size) for size in sizes]
    return BatchPlan(config.ppo.num_episodes, steps, config.ppo.max_steps)


def _step_plan(config: TrainPPOConfig, n_prompts: int, world_size: int) -> StepPlan:
    ppo, batch = config.ppo, config.batch
    bounds = [rank * n_prompts // world_size for rank in range(world_size + 1)]  # as prompts are dealt out
    on_ranks = [(end - start) * ppo.n_samples_per_prompt for start, end in itertools.pairwise(bounds)]
    n_samples = sum(min(n, ppo.buffer_limit) if ppo.buffer_limit > 0 else n for n in on_ranks)
    mini_batches = -(-n_samples // batch.train_batch_size)
    share = -(-min(n_samples, batch.train_batch_size) // world_size)
    return StepPlan(
        n_prompts=n_prompts,
        n_samples=n_samples,
        most_on_a_rank=max(on_ranks),
        forwards=None if ppo.micro_rollout_tokens else -(-max(on_ranks) // ppo.micro_rollout_batch_size),
        mini_batches=mini_batches,
        micro_batches=None if ppo.micro_train_tokens else -(-share // batch.micro_train_batch_size),
        optimizer_steps=batch.max_epochs * mini_batches,
    )


class Role(NamedTuple):
    """A model of the run, or a source of rewards without weights; counts are of whole models."""

    name: str
    model: str
    trained: int = 0
    frozen: int = 0
    dtype: str = ""
    place: str = ""


def model_role(name: str, model: str, module: nn.Module, strategy: DeepspeedStrategy, is_trained: bool) -> Role:
    """The role of ``module``, which ``DeepspeedStrategy`` may have wrapped and partitioned."""
    parameters: list[Any] = list(module.parameters())
    trained = sum(_elements(p) for p in parameters if p.requires_grad)
    stage = strategy.zero_stage if is_trained or strategy.zero_stage == 3 else 0
    n_ranks, device = strategy.comm.world_size, strategy.device.type
    place = f"{device if n_ranks == 1 else f'{n_ranks} x {device}'}, {f'ZeRO-{stage}' if stage > 0 else 'whole'}"
    names = dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in parameters)
    dtype = ", ".join(_DTYPES.get(name, name) for name in names)
    if is_trained and strategy.config.bf16:
        dtype += " + fp32 master"
    return Role(name, model, trained, sum(map(_elements, parameters)) - trained, dtype, place)


def _elements(parameter: Any) -> int:
    """Elements of a whole parameter, also one that ZeRO-3 partitions or bitsandbytes packs."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    if getattr(parameter, "quant_state", None) is not None:
        return int(parameter.quant_state.shape.numel())
    return int(parameter.numel())


def _scorer_roles(scorer: Scorer, sources: dict[str, str], strategy: DeepspeedStrategy) -> Iterator[Role]:
    """Sources of rewards; ``sources`` has what each flag names."""
    if isinstance(scorer, CombinedScorer):
        for part in scorer.scorers:
            yield from _scorer_roles(part, sources, strategy)
    elif isinstance(scorer, ModelScorer | ProcessScorer):
        flag = "reward_pretrain" if isinstance(scorer, ModelScorer) else "prm_pretrain"
        module: Any = scorer.model
        yield model_role("reward", sources[flag], module, strategy, is_trained=False)
    else:  # a function, a server, a verifier
        flag, _, where = str(scorer).partition(" ")
        yield Role("reward", where or sources.get(flag.removeprefix("--"), flag))


def log_ppo_start(config: TrainPPOConfig, components: PPOComponents, plan: BatchPlan, critic: str, done: int) -> None:
    """Log models and batch arithmetic of a train_ppo run, on rank 0.

    ``critic`` is what the critic starts from; ``done`` counts the global steps of earlier sessions.
    """
    if not components.strategy.is_main:
        return
    facts = _ppo_facts(config, plan, len(components.prompts), components.strategy.comm.world_size)
    if done > 0:
        facts.append(("resumes", f"after step {done:,} of {plan.n_steps:,}"))
    _log(_ppo_roles(config, components, critic), facts, components.estimate)


def _ppo_roles(config: TrainPPOConfig, components: PPOComponents, critic: str) -> list[Role]:
    strategy, pretrain, source = components.strategy, config.model.pretrain, config.rewards
    roles = [model_role("actor", pretrain, components.actor.module, strategy, is_trained=True)]
    if components.critic is not None:
        roles.append(model_role("critic", critic, components.critic.module, strategy, is_trained=True))
    reference: Any = components.maker.reference
    if isinstance(reference, AdapterOffReference):
        roles.append(Role("reference", "the actor, its adapters off"))
    elif reference is not None:
        name = config.model.ref_pretrain or pretrain
        roles.append(model_role("reference", name, reference, strategy, is_trained=False))
    sources = {
        "reward_pretrain": source.reward_pretrain or "",
        "prm_pretrain": source.prm_pretrain or "",
        "remote_rm_url": mask_credentials(source.remote_rm_url or ""),
        "verifiable_reward": " ".join(source.verifiable_reward),
    }
    return roles if components.scorer is None else [*roles, *_scorer_roles(components.scorer, sources, strategy)]


def _ppo_facts(config: TrainPPOConfig, plan: BatchPlan, n_prompts: int, ranks: int) -> Facts:
    ppo, batch, first, last = config.ppo, config.batch, plan.steps[0], plan.steps[-1]
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    most = "at most " if ppo.dynamic_sampling else ""
    sampled = first.n_prompts * ppo.n_samples_per_prompt
    responses = count(ppo.n_samples_per_prompt, "response")
    samples = f"{count(first.n_prompts, 'prompt')} x {responses} = {sampled:,} samples"
    kept = f", {first.n_samples:,} kept by --buffer_limit" if first.n_samples < sampled else ""
    passes = _pieces(first.forwards, "passes", f"{ppo.micro_rollout_batch_size} samples", ppo.micro_rollout_tokens)
    micro = _pieces(first.micro_batches, "micro-batches", str(batch.micro_train_batch_size), ppo.micro_train_tokens)
    mini = count(first.mini_batches, "mini-batch", "mini-batches")
    size = min(batch.train_batch_size, first.n_samples)
    rest = f", the last of {last.n_prompts:,}" if last.n_prompts < first.n_prompts else ""
    batches = f"{count(len(plan.steps), 'batch', 'batches')}{rest}"
    total = count(plan.optimizer_steps(), "optimizer step")
    if (frozen := config.ppo.frozen_actor_steps) > 0:
        total += f", {plan.optimizer_steps(without=frozen):,} of them of the actor"
    in_all = f"{count(plan.episodes, 'episode')} of {n_prompts:,} prompts in {batches}"
    return [
        *([("each step", f"{most}{samples}{kept}")] if n_prompts else []),
        ("experience", passes + each),
        ("training", f"{count(batch.max_epochs, 'epoch')} of {mini} of {size:,} samples, in {micro}{each}"),
        ("in all", in_all if n_prompts else "trajectories of the given source"),
        ("", f"{most}{count(plan.n_steps, 'step')}, {total}"),
    ]


def log_supervised_start(trainer: SupervisedTrainer[Any]) -> None:
    """Log the model and the batch arithmetic of supervised training, on rank 0."""
    components, config, ranks = trainer.components, trainer.config, trainer.comm.world_size
    if not components.strategy.is_main:
        return
    batch, n = config.batch, len(components.train_examples)
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    size = min(batch.train_batch_size, n)
    share = -(-size // ranks)
    micro = count(-(-share // batch.micro_train_batch_size), "micro-batch", "micro-batches")
    whole = batch.max_epochs * -(-n // batch.train_batch_size)
    cut = f"; --max_steps ends it after {trainer.total_steps:,}" if trainer.total_steps < whole else ""
    facts = [
        ("each step", f"{size:,} samples, in {micro} of up to {batch.micro_train_batch_size}{each}"),
        ("in all", f"{count(batch.max_epochs, 'epoch')} of {count(n, 'sample')}, {count(whole, 'step')}{cut}"),
    ]
    if components.eval_examples:
        facts.append(("held out", count(len(components.eval_examples), "sample")))
    if trainer.global_step > 0:
        facts.append(("resumes", f"after step {trainer.global_step:,} of {trainer.total_steps:,}"))
    role = model_role(
        "model", config.supervised.pretrain, components.model.module, components.strategy, is_trained=True
    )
    _log([role], facts, components.estimate)


def _log(roles: Sequence[Role], facts: Facts, estimate: Estimate | None) -> None:
    """Log versions, the table of roles, and ``facts`` with the estimated memory."""
    if estimate is not None:
        memory = estimate.machine.memory
        room = "" if memory is None else f"; there are {format_bytes(memory)}"
        each = " on each rank" if estimate.machine.n_ranks > 1 else ""
        peak = f"{format_bytes(estimate.peak)} at most by estimate, in {estimate.largest}"
        facts = [*facts, ("memory", f"{peak}{room}{each} (--dry_run says more)")]
    libraries = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, transformers {transformers.__version__}"
    table: list[Sequence[str]] = [("role", "model", "trained", "frozen", "dtype", "where")]
    for role in roles:
        counts = [f"{n:,}" if role.dtype else "" for n in (role.trained, role.frozen)]
        model = role.model if len(role.model) <= _LONGEST_NAME else "..." + role.model[3 - _LONGEST_NAME :]
        table.append((role.name, model, *counts, role.dtype, role.place))
    versions = f"{libraries}, Python {platform.python_version()}"
    log_lines(["", versions, "", *table_lines(table, right=(2, 3)), "", *table_lines(facts), ""])


def _pieces(n: int | None, what: str, size: str, tokens: int | None) -> str:
    """``n`` or more pieces, since batches are split further where that saves padding; None: bounded by ``tokens``."""
    return f"{what} of up to {tokens:,} tokens" if n is None else f"{n:,} or more {what} of up to {size}"


def count(n: int, one: str, many: str = "") -> str:
    """``n`` of what is called ``one`` in the singular."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
