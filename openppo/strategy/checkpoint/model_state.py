"""State of a trained model, as fragments: float32 weights, Adam's moments, position in the schedule.

A file holds fragments by name and place, so any number of ranks can read the files that any other number has written.
DeepSpeed's own checkpoints are pickles, tied to the number of ranks, and its ``safe_get_full_...`` functions gather
every tensor on every rank; these fragments are views of a rank's memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from safetensors import safe_open
from torch import Tensor

from openppo.strategy.trainable_model import MOMENTS, TrainableModel
from openppo.strategy.weights import buckets
from openppo.weight_files import save_tensors

PIECE_BYTES = 4 * 2**30
"""Size of one file, and of one copy to the host."""


@dataclass(frozen=True)
class Fragment:
    """Elements ``start`` to ``start + values.numel()`` of a flattened tensor.

    ``values`` (n,) is a view: writing into it changes the tensor.
    """

    start: int
    values: Tensor


def write_fragments(file: Path, fragments: Mapping[str, Fragment]) -> None:
    """Write safetensors ``file``, and numbered ones beside it, each of up to ``PIECE_BYTES``.

    A key is a tensor's name and a start.
    """
    for number, piece in enumerate(buckets(_cut(fragments), PIECE_BYTES)):
        path = file if number == 0 else file.with_stem(f"{file.stem}-{number:05d}")
        save_tensors({key: values.detach().cpu() for key, values in piece}, path)


def _cut(fragments: Mapping[str, Fragment]) -> Iterator[tuple[str, Tensor]]:
    """Yield keys and values of parts that fit into a piece."""
    for name, fragment in fragments.items():
        n_fit = PIECE_BYTES // fragment.values.element_size()
        for number, part in enumerate(fragment.values.split(n_fit)):
            yield f"{name}@{fragment.start + number * n_fit}", part


class _Stored(NamedTuple):
    """Fragment in a file: elements ``start`` to ``end`` of a flattened tensor."""

    start: int
    end: int
    file: Any
    key: str


class FragmentReader(ExitStack):
    """Context manager that reads any part of a tensor from the files that hold its fragments."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self._stored: dict[str, list[_Stored]] = {}
        for path in sorted(files):
            file = self.enter_context(safe_open(path, framework="pt"))
            for key in file.keys():  # noqa: SIM118 (not a dict)
                name, _, first = key.rpartition("@")
                start = int(first)
                (length,) = file.get_slice(key).get_shape()
                stored = _Stored(start, start + length, file, key=key)
                self._stored.setdefault(name, []).append(stored)

    def sizes(self) -> dict[str, int]:
        """Return the number of elements of each tensor, counted up to the last one in the files."""
        sizes: dict[str, int] = {}
        for name, fragments in self._stored.items():
            sizes[name] = max(stored.end for stored in fragments)
        return sizes

    def read_into(self, name: str, fragment: Fragment) -> None:
        """Fill ``fragment.values``. ``ValueError`` if the files do not hold all of its elements."""
        start = fragment.start
        end = start + fragment.values.numel()
        missing = torch.ones(end - start, dtype=torch.bool)
        for stored in self._stored.get(name, []):
            low = max(start, stored.start)
            high = min(end, stored.end)
            if low < high:
                values = stored.file.get_slice(stored.key)
                part = values[low - stored.start : high - stored.start]
                fragment.values[low - start : high - start].copy_(part)
                missing[low - start : high - start] = False

        if missing.any():
            raise ValueError(
                f"{int(missing.sum())} of {end - start} elements of {name} are not in the checkpoint."
            )


class _Part(NamedTuple):
    """This rank's part of a trained parameter: ``numel`` elements from ``start``.

    They lie in the optimizer's tensor ``flat``, starting at ``offset``.
    """

    name: str
    flat: Tensor
    offset: int
    start: int
    numel: int

    def fragment(self, state: Tensor) -> Fragment:
        """Return this part of a tensor in the layout of ``flat``."""
        flattened = state.detach().view(-1)
        return Fragment(self.start, flattened[self.offset : self.offset + self.numel])


def model_fragments(model: TrainableModel) -> dict[str, Fragment]:
    """Return float32 weights and moments of this rank, by kind and parameter name."""
    adam = _adam(model)
    fragments: dict[str, Fragment] = {}
    for part in _parts(model):
        tensors = {"weight": part.flat, **adam.state.get(part.flat, {})}
        for kind in ("weight", *MOMENTS):
            if kind in tensors:
                fragments[f"{kind}/{part.name}"] = part.fragment(tensors[kind])
    return fragments


def model_numbers(model: TrainableModel) -> dict[str, int]:
    """Return the steps of Adam (without skipped ones) and of the schedule; collective."""
    adam = _adam(model)
    n_steps = 0  # a rank may hold no fragment
    for part in _parts(model):
        state = adam.state.get(part.flat, {})
        n_steps = max(n_steps, int(state.get("step", 0)))

    adam_steps = torch.tensor(n_steps)
    dist.all_reduce(adam_steps, dist.ReduceOp.MAX)
    return {"adam_steps": int(adam_steps), "schedule_steps": model.scheduler.last_epoch}


def load_model_state(
    model: TrainableModel, reader: FragmentReader, numbers: dict[str, int]
) -> None:
    """Load the state in ``reader`` into ``model``; collective."""
    adam_steps = numbers["adam_steps"]
    if adam_steps > 0:
        for part in _parts(model):
            _make_moments(_adam(model), part.flat, adam_steps)
    for name, fragment in model_fragments(model).items():
        reader.read_into(name, fragment)
    _write_parameters(model)

    # The learning rate follows the current options, so that a changed option takes effect.
    schedule: Any = model.scheduler
    steps = numbers["schedule_steps"]
    rates = []
    for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True):
        rates.append(base * rate(steps))
    schedule.last_epoch = steps
    schedule._step_count = steps + 1
    schedule._last_lr = rates
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _parts(model: TrainableModel) -> Iterator[_Part]:
    """Yield this rank's parts of the trained parameters."""
    stage = model.deepspeed.zero_optimization_stage()
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        part: _Part | None
        if stage == 0:
            part = _Part(name, parameter, 0, start=0, numel=parameter.numel())
        elif stage == 3:
            part = _part_of_stage_3(model.deepspeed.optimizer, name, parameter)
        else:
            part = _part_of_stages_1_and_2(model.deepspeed.optimizer, name, parameter)
        if part is not None:
            yield part


def _part_of_stage_3(optimizer: Any, name: str, parameter: Any) -> _Part | None:
    """Return this rank's part of a partitioned parameter, None if it has padding only."""
    group, offset, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    start = dist.get_rank() * padded
    numel = min(padded, parameter.ds_numel - start)
    if numel <= 0:
        return None
    return _Part(name, flat, offset, start=start, numel=numel)


def _part_of_stages_1_and_2(optimizer: Any, name: str, parameter: Any) -> _Part | None:
    """Return this rank's part of a parameter, None if all of it is on other ranks."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None

    # DeepSpeed's optimizer for bfloat16 has another name for the same tensors.
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        flats = optimizer.fp32_groups_flat_partition
    else:
        flats = optimizer.single_partition_of_fp32_groups
    flat = flats[mapping.param_group_index]
    offset = mapping.hp_fragment_address.start
    in_parameter = mapping.lp_fragment_address
    return _Part(name, flat, offset, start=in_parameter.start, numel=in_parameter.numel)


def _adam(model: TrainableModel) -> torch.optim.Optimizer:
    """Return the Adam inside DeepSpeed's optimizer."""
    optimizer: Any = model.deepspeed.optimizer
    return optimizer if model.deepspeed.zero_optimization_stage() == 0 else optimizer.optimizer


def _make_moments(adam: torch.optim.Optimizer, flat: Tensor, steps: int) -> None:
    """Create the state of ``flat`` as Adam does in its first step."""
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
            weights = part.fragment(part.flat).values
            parameters[part.name].ds_tensor.data[: part.numel].copy_(weights)
        # Drops old values that DeepSpeed keeps gathered.
        optimizer.checkpoint_event_prologue()
        optimizer.checkpoint_event_epilogue()
