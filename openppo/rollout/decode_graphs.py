"""Decode steps as CUDA graphs: the kernels of a forward take less time than launching them one by one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from openppo import logger
from openppo.models.pretrained import layer_kinds
from openppo.rollout.row_cache import RowCache

COLUMNS_TOGETHER = 256
"""A graph is recorded for this many columns more than the last."""

Forward = Callable[[], Tensor]
Recorder = Callable[[Forward], Forward]
"""Makes a forward that can be replayed; it returns the same tensor each time."""


@dataclass(eq=False)
class DecodeGraphs:
    """Forwards over one token per row of ``cache``, recorded once for each shape and replayed from then on.

    A graph always has the same shapes and addresses. So rows are rounded up to a power of two and columns, where a mask
    says which of them are seen, to ``COLUMNS_TOGETHER``; what differs between steps is read from one small tensor, and
    the graphs are good for these buffers and weights only, though not for their values: whoever makes others makes a
    new object.
    """

    model: Any
    cache: RowCache
    record: Recorder

    def __post_init__(self) -> None:
        self._addresses = addresses(self.model)
        self._recorded: dict[tuple[int, int], tuple[Tensor, Forward]] = {}

    def __call__(self, last: Tensor) -> Tensor:
        """Logits (rows, V) after the ids ``last`` (rows,), one of each row; good until the next call."""
        self.cache.make_room()
        n_rows, column = len(last), self.cache.window.end
        rows = min(1 << (n_rows - 1).bit_length(), self.cache.shape[0])
        columns = self.cache.shape[1]
        if not self.cache.window.by_lengths:
            columns = min(-(-(column + 1) // COLUMNS_TOGETHER) * COLUMNS_TOGETHER, columns)
        inputs, forward = self._recorded.get((rows, columns), (None, None))
        if inputs is None:
            inputs = torch.zeros(rows, 4, dtype=torch.long, device=last.device)
        inputs[:, 2:].fill_(column)
        inputs[:n_rows, 0], inputs[:n_rows, 1:3] = last, self.cache.device_starts().flip(0).T
        inputs[n_rows:, 0].zero_()  # idle rows see themselves alone: nothing else is theirs
        if forward is None:
            forward = self.record(partial(self._forward, columns, inputs))
            self._recorded[rows, columns] = inputs, forward
        return forward()[:n_rows]

    def _forward(self, columns: int, inputs: Tensor) -> Tensor:
        """``inputs`` (rows, 4) int64 are token id, shift, first column and this column of each row."""
        ids = inputs[:, 0]
        shifts = inputs[:, 1]
        starts = inputs[:, 2]
        column = inputs[:1, 3]
        where = self.cache.inputs(starts, shifts, column, columns=slice(0, columns))
        self.cache.window.fixed = len(inputs), columns, column
        try:
            return self.cache.logits(self.model, ids[:, None], where)
        finally:
            self.cache.window.fixed = None

    def still_fit(self) -> bool:
        """Whether weights and buffers of the model are where they were."""
        return self._addresses == addresses(self.model)


def addresses(model: Any) -> list[int]:
    """Where a model's parameters and buffers are."""
    return [tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())]


class CannotRecordError(RuntimeError):
    """A decode step cannot be recorded, and need not be."""


class CUDARecorder:
    """Records forwards as CUDA graphs that share their memory: they never run at the same time.

    Its graphs are let go together: torch takes a pool of memory for dead that no graph uses any more.
    """

    def __init__(self, is_required: bool = False) -> None:
        self.is_required = is_required
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward) -> Forward:
        """``forward`` as one launch. ``CannotRecordError``, or if required ``RuntimeError``, if it cannot be."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(
            aside
        ):  # libraries make what they need at a first call, which cannot be recorded
            forward()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as those that score, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                output = forward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self.is_required:
                raise CannotRecordError(str(error)) from error
            raise RuntimeError(
                f"--cuda_graphs on: a decode step of this model cannot be recorded ({error}). Leave the flag out."
            ) from error

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def choose_recorder(
    choice: str, config: PreTrainedConfig, device: torch.device, in_lockstep: bool = False
) -> Callable[[], Recorder] | None:
    """What makes recorders for ``--cuda_graphs``; None where steps are launched, with a log line on a GPU."""
    if choice == "on" and device.type != "cuda":
        raise ValueError(
            "--cuda_graphs on records steps on a GPU, and this run is on a CPU: leave it out."
        )
    if choice == "off" or device.type != "cuda":
        return None
    problem = "ranks in lockstep cannot replay steps" if in_lockstep else None
    try:
        check_layers(config)
    except ValueError as error:
        if choice == "on":
            raise
        problem = str(error)
    if problem is not None:
        logger.warning(f"decode steps are launched one by one: {problem}")
        return None
    return partial(CUDARecorder, choice == "on")


def check_layers(config: PreTrainedConfig) -> None:
    """``ValueError`` for models whose layers see a part of the row only: where it begins changes with each step."""
    windowed = sorted(layer_kinds(config) - {"full_attention", "global"})
    if windowed:
        raise ValueError(
            f"--cuda_graphs: {config.get_text_config().model_type} has layers with {', '.join(windowed)}, whose decode "
            "steps cannot be recorded. Leave the flag out."
        )
