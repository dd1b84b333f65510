"""State of a trained model, as fragments: float32 weights, Adam's moments, position in the schedule.

A fragment is on disk by name and place, so any number of ranks can read what any other number wrote. DeepSpeed's own
checkpoints are pickles, tied to the number of ranks, and its ``safe_get_full_...`` functions gather every tensor on
every rank; these fragments are views of what a rank holds.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from safetensors import safe_open
from torch import Tensor

from openppo.strategy.trainable_model import MOMENTS, TrainableModel
from openppo.strategy.weights import buckets
from openppo.weight_files import save_tensors

PIECE_BYTES = 4 * 2**30
"""Of one file, and of what is copied to the host at a time."""


@dataclass(frozen=True)
class Fragment:
    """Elements ``start`` to ``start + values.numel()`` of a flattened tensor.

    ``values`` (n,) is the memory of its owner: writing into it changes the owner.
    """

    start: int
    values: Tensor


def write_fragments(file: Path, fragments: Mapping[str, Fragment]) -> None:
    """Safetensors ``file``, and numbered ones beside it, of ``PIECE_BYTES``; a key is a tensor's name and a start."""
    for number, piece in enumerate(buckets(_cut(fragments), PIECE_BYTES)):
        place = file if number == 0 else file.with_stem(f"{file.stem}-{number:05d}")
        save_tensors({key: values.detach().cpu() for key, values in piece}, place)


def _cut(fragments: Mapping[str, Fragment]) -> Iterator[tuple[str, Tensor]]:
    """Keys and values of parts that a piece has room for."""
    for name, fragment in fragments.items():
        n_fit = PIECE_BYTES // fragment.values.element_size()
        for number, part in enumerate(fragment.values.split(n_fit)):
            yield f"{name}@{fragment.start + number * n_fit}", part


class FragmentReader(ExitStack):
    """Reads any part of a tensor from the files that hold fragments of it. A context manager."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self._places: dict[str, list[tuple[int, int, Any, str]]] = {}
        for file in sorted(files):
            opened = self.enter_context(safe_open(file, framework="pt"))
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                name, _, start = key.rpartition("@")
                (length,) = opened.get_slice(key).get_shape()
                self._places.setdefault(name, []).append(
                    (int(start), int(start) + length, opened, key)
                )

    def sizes(self) -> dict[str, int]:
        """Elements of each tensor, whole or partial, up to the last that the files hold."""
        return {name: max(end for _, end, _, _ in places) for name, places in self._places.items()}

    def read_into(self, name: str, fragment: Fragment) -> None:
        """Fill ``fragment.values``. ``ValueError`` if the files do not hold all of its elements."""
        start, end = fragment.start, fragment.start + fragment.values.numel()
        missing = torch.ones(end - start, dtype=torch.bool)
        for first, last, opened, key in self._places.get(name, []):
            low, high = max(start, first), min(end, last)
            if low < high:
                part = opened.get_slice(key)[low - first : high - first]
                fragment.values[low - start : high - start].copy_(part)
                missing[low - start : high - start] = False
        if missing.any():
            raise ValueError(
                f"{int(missing.sum())} of {end - start} elements of {name} are not in the checkpoint."
            )


class _Part(NamedTuple):
    """This rank's part of a trained parameter: ``numel`` elements of ``flat``, its optimizer's, from ``offset``."""

    name: str
    flat: Tensor
    offset: int
    start: int
    numel: int

    def of(self, tensor: Tensor, name: str) -> tuple[str, Fragment]:
        values = tensor.detach().view(-1)[self.offset : self.offset + self.numel]
        return f"{name}/{self.name}", Fragment(self.start, values)


def model_fragments(model: TrainableModel) -> dict[str, Fragment]:
    """Float32 weights and moments of this rank, by kind and parameter name."""
    fragments: dict[str, Fragment] = {}
    for part in _parts(model):
        tensors = {"weight": part.flat, **_adam(model).state.get(part.flat, {})}
        fragments.update(
            part.of(tensors[name], name) for name in ("weight", *MOMENTS) if name in tensors
        )
    return fragments


def model_numbers(model: TrainableModel) -> dict[str, int]:
    """Steps of Adam (without skipped ones) and of the schedule; collective."""
    steps = [int(_adam(model).state.get(part.flat, {}).get("step", 0)) for part in _parts(model)]
    most = torch.tensor(max(steps, default=0))  # a rank may hold no fragment
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"adam_steps": int(most), "schedule_steps": model.scheduler.last_epoch}


def load_model_state(
    model: TrainableModel, reader: FragmentReader, numbers: dict[str, int]
) -> None:
    """Give ``model`` the state in ``reader``; collective."""
    for part in _parts(model) if numbers["adam_steps"] > 0 else ():
        _make_moments(_adam(model), part.flat, numbers["adam_steps"])
    for name, fragment in model_fragments(model).items():
        reader.read_into(name, fragment)
    _write_parameters(model)
    # The rate follows the current options, so that a changed one has its effect.
    schedule, steps = cast(Any, model.scheduler), numbers["schedule_steps"]
    rates = [
        base * rate(steps)
        for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    schedule.last_epoch = steps
    schedule._step_count = steps + 1
    schedule._last_lr = rates
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _parts(model: TrainableModel) -> Iterator[_Part]:
    optimizer: Any = model.deepspeed.optimizer
    stage = model.deepspeed.zero_optimization_stage()
    parameters: Iterator[tuple[str, Any]] = model.module.named_parameters()
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        if stage == 0:
            yield _Part(name, parameter, 0, start=0, numel=parameter.numel())
        elif stage == 3:
            group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = dist.get_rank() * padded
            numel = min(padded, parameter.ds_numel - start)
            if numel > 0:
                yield _Part(
                    name,
                    optimizer.fp32_partitioned_groups_flat[group],
                    offset,
                    start=start,
                    numel=numel,
                )
        elif parameter._hp_mapping is not None:  # else all of it is on other ranks
            mapping = parameter._hp_mapping
            is_bf16 = hasattr(
                optimizer, "fp32_groups_flat_partition"
            )  # DeepSpeed's optimizer for it has other names
            flats = (
                optimizer.fp32_groups_flat_partition
                if is_bf16
                else optimizer.single_partition_of_fp32_groups
            )
            address, place = mapping.hp_fragment_address, mapping.lp_fragment_address
            yield _Part(
                name,
                flats[mapping.param_group_index],
                address.start,
                start=place.start,
                numel=place.numel,
            )


def _adam(model: TrainableModel) -> torch.optim.Optimizer:
    optimizer: Any = model.deepspeed.optimizer
    return optimizer if model.deepspeed.zero_optimization_stage() == 0 else optimizer.optimizer


def _make_moments(adam: torch.optim.Optimizer, flat: Tensor, steps: int) -> None:
    """Make the state that Adam makes in its first step."""
    state = adam.state[flat]
    for moment in MOMENTS:
        state.setdefault(moment, torch.zeros_like(flat, requires_grad=False))
    counts_in_python = isinstance(adam, DeepSpeedCPUAdam)
    state["step"] = steps if counts_in_python else torch.tensor(float(steps), device=flat.device)


def _write_parameters(model: TrainableModel) -> None:
    """Copy the optimizer's float32 weights into the module's parameters."""
    optimizer: Any = model.deepspeed.optimizer
    stage = model.deepspeed.zero_optimization_stage()
    if stage in (1, 2):
        optimizer.update_lp_params()
    elif stage == 3:
        parameters: dict[str, Any] = dict(model.module.named_parameters())
        for part in _parts(model):
            _, fragment = part.of(part.flat, "weight")
            parameters[part.name].ds_tensor.data[: part.numel].copy_(fragment.values)
        optimizer.checkpoint_event_prologue()  # drops what DeepSpeed keeps gathered of the old values
        optimizer.checkpoint_event_epilogue()
