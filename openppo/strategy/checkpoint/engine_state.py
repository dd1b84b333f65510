"""What a trained engine has to remember, as fragments: float32 weights, Adam's moments, the schedule's position.

DeepSpeed's own checkpoints are pickles, tied to the number of ranks. Its ``safe_get_full_...`` functions gather every
tensor on every rank; these fragments are views of what a rank holds anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor

from openppo.strategy.checkpoint.fragments import Fragment, FragmentReader
from openppo.strategy.trainable_model import MOMENTS, TrainableModel

_BYTES_PER_ELEMENT = 4 * (1 + len(MOMENTS))


class _Part(NamedTuple):
    """This rank's part of a trained parameter: ``numel`` elements from ``offset`` on of ``flat``, its optimizer's."""

    name: str
    flat: Tensor
    offset: int
    start: int
    numel: int

    def of(self, tensor: Tensor, name: str) -> tuple[str, Fragment]:
        values = tensor.detach().view(-1)[self.offset : self.offset + self.numel]
        return f"{name}/{self.name}", Fragment(self.start, values)


def engine_fragments(engine: TrainableModel) -> dict[str, Fragment]:
    """Float32 weights and moments of this rank, by kind and parameter name; no moments before the first step."""
    fragments: dict[str, Fragment] = {}
    for part in _parts(engine):
        fragments.update([part.of(part.flat, "weight")])
        state = _adam(engine).state.get(part.flat, {})
        fragments.update(part.of(state[moment], moment) for moment in MOMENTS if moment in state)
    return fragments


def engine_numbers(engine: TrainableModel) -> dict[str, int]:
    """Steps of Adam (a skipped one does not count) and of the schedule. All ranks call this together."""
    steps = [int(_adam(engine).state.get(part.flat, {}).get("step", 0)) for part in _parts(engine)]
    most = torch.tensor(max(steps, default=0))  # a rank may hold no fragment, and so know of no step
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"adam_steps": int(most), "schedule_steps": engine.scheduler.last_epoch}


def fragment_bytes(engine: TrainableModel) -> int:
    """What this rank's fragments take on disk once there are moments."""
    return _BYTES_PER_ELEMENT * sum(part.numel for part in _parts(engine))


def load_engine(engine: TrainableModel, prefix: str, reader: FragmentReader, numbers: dict[str, int]) -> None:
    """Give ``engine`` the state that ``prefix`` names in ``reader``. All ranks call this together."""
    if numbers["adam_steps"] > 0:
        for part in _parts(engine):
            _make_moments(_adam(engine), part.flat, numbers["adam_steps"])
    for name, fragment in engine_fragments(engine).items():
        reader.read_into(prefix + name, fragment)
    _write_parameters(engine)
    _set_schedule(engine, numbers["schedule_steps"])


def _parts(engine: TrainableModel) -> Iterator[_Part]:
    optimizer: Any = engine.deepspeed.optimizer
    stage = engine.deepspeed.zero_optimization_stage()
    parameters: Iterator[tuple[str, Any]] = engine.module.named_parameters()
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if stage == 0:
            yield _Part(name, parameter, 0, 0, parameter.numel())
        elif stage == 3:
            group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank() * padded
            numel = min(padded, parameter.ds_numel - start)
            if numel > 0:
                yield _Part(name, optimizer.fp32_partitioned_groups_flat[group], offset, start, numel)
        elif parameter._hp_mapping is not None:  # else all of it is on other ranks
            mapping = parameter._hp_mapping
            flat = _flat_groups(optimizer)[mapping.param_group_index]
            address, place = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield _Part(name, flat, address.start, place.start, place.numel)


def _flat_groups(optimizer: Any) -> list[Tensor]:
    """This rank's float32 weights of each group, in DeepSpeed's optimizer for stages 1 and 2 or in that for bf16."""
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return optimizer.fp32_groups_flat_partition
    return optimizer.single_partition_of_fp32_groups


def _adam(engine: TrainableModel) -> torch.optim.Optimizer:
    optimizer: Any = engine.deepspeed.optimizer
    return optimizer if engine.deepspeed.zero_optimization_stage() == 0 else optimizer.optimizer


def _make_moments(adam: torch.optim.Optimizer, flat: Tensor, steps: int) -> None:
    """The state that Adam makes in its first step."""
    state = adam.state[flat]
    for moment in MOMENTS:
        state.setdefault(moment, torch.zeros_like(flat, requires_grad=False))
    counts_in_python = isinstance(adam, DeepSpeedCPUAdam)
    state["step"] = steps if counts_in_python else torch.tensor(float(steps), device=flat.device)


def _write_parameters(engine: TrainableModel) -> None:
    """The optimizer's float32 weights into the parameters that the module computes with."""
    optimizer: Any = engine.deepspeed.optimizer
    stage = engine.deepspeed.zero_optimization_stage()
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        parameters: dict[str, Any] = dict(engine.module.named_parameters())
        for part in _parts(engine):
            _, fragment = part.of(part.flat, "weight")
            parameters[part.name].ds_tensor.data[: part.numel].copy_(fragment.values)
        optimizer.checkpoint_event_prologue()  # drops what DeepSpeed keeps gathered of the old values
        optimizer.checkpoint_event_epilogue()


def _set_schedule(engine: TrainableModel, steps: int) -> None:
    """The rate follows from the options in force and the position, so that a changed option has its effect."""
    schedule: Any = engine.scheduler
    rates = [base * rate(steps) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    schedule.last_epoch, schedule._step_count, schedule._last_lr = steps, steps + 1, rates
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
