"""Decode steps as CUDA graphs, which save the launches of single kernels."""

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
"""Graphs are recorded for multiples of this number of columns."""

Forward = Callable[[], Tensor]
Recorder = Callable[[Forward], Forward]
"""Records a forward; its result replays it and returns the same tensor each time."""


@dataclass(eq=False)
class DecodeGraphs:
    """Forwards over one token per row of ``cache``, recorded once for each shape.

    A graph always has the same shapes and addresses. So rows are rounded up to a power of two, and columns, for
    attention with a mask, to ``COLUMNS_TOGETHER``. Inputs that differ between steps lie in one small tensor. Weights
    and buffers may get other values, but other tensors need a new object.
    """

    model: Any
    cache: RowCache
    record: Recorder

    def __post_init__(self) -> None:
        self._addresses = addresses(self.model)
        self._recorded: dict[tuple[int, int], tuple[Tensor, Forward]] = {}

    def __call__(self, last: Tensor) -> Tensor:
        """Return logits (rows, V) after ``last`` ids (rows,), valid until the next call."""
        self.cache.make_room()
        n_rows = len(last)
        column = self.cache.window.end
        rows, columns = self._graph_shape(n_rows, column + 1)
        inputs, forward = self._recorded.get((rows, columns), (None, None))
        if inputs is None:
            inputs = torch.zeros(rows, 4, dtype=torch.long, device=last.device)

        inputs[:, 2:].fill_(column)
        inputs[:n_rows, 0] = last
        inputs[:n_rows, 1:3] = self.cache.device_starts().flip(0).T
        inputs[n_rows:, 0].zero_()  # idle rows see only their own new column
        if forward is None:
            forward = self.record(partial(self._forward, columns, inputs))
            self._recorded[rows, columns] = inputs, forward
        return forward()[:n_rows]

    def _graph_shape(self, n_rows: int, n_columns: int) -> tuple[int, int]:
        """Rows and columns of the graph for so many rows and columns."""
        rows, columns = self.cache.shape
        power_of_two = 1 << (n_rows - 1).bit_length()
        if not self.cache.window.by_lengths:
            n_blocks = -(-n_columns // COLUMNS_TOGETHER)
            columns = min(n_blocks * COLUMNS_TOGETHER, columns)
        return min(power_of_two, rows), columns

    def _forward(self, columns: int, inputs: Tensor) -> Tensor:
        """Run a forward on ``inputs`` (rows, 4) int64: token id, shift, first and current column."""
        ids = inputs[:, 0]
        shifts = inputs[:, 1]
        starts = inputs[:, 2]
        column = inputs[:1, 3]
        model_inputs = self.cache.inputs(starts, shifts, column, columns=slice(0, columns))
        with self.cache.window.fixed_to(len(inputs), columns, column):
            return self.cache.logits(self.model, ids[:, None], model_inputs)

    def still_fit(self) -> bool:
        """True if weights and buffers of the model have the addresses of the recordings."""
        return self._addresses == addresses(self.model)


def addresses(model: Any) -> list[int]:
    """Memory addresses of a model's parameters and buffers."""
    return [tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())]


class CannotRecordError(RuntimeError):
    """A decode step cannot be recorded, and need not be."""


class CUDARecorder:
    """Recorder of CUDA graphs that share their memory, since they never run together.

    Release its graphs together: torch gives up a memory pool that no graph uses any more.
    """

    def __init__(self, is_required: bool = False) -> None:
        self.is_required = is_required
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward) -> Forward:
        """Record ``forward`` as one launch; ``CannotRecordError`` if it cannot be, or ``RuntimeError`` if required."""
        current = torch.cuda.current_stream()
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(current)
        # Libraries initialize themselves at their first call, which cannot be recorded.
        with torch.cuda.stream(warm_up):
            forward()
        current.wait_stream(warm_up)

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
    """Return a factory of recorders for ``--cuda_graphs``; None to launch steps one by one.

    On a GPU, a log line says why there is none.
    """
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
    """Raise ``ValueError`` for models with windowed layers, whose windows start elsewhere at each step."""
    windowed = sorted(layer_kinds(config) - {"full_attention", "global"})
    if windowed:
        raise ValueError(
            f"--cuda_graphs: {config.get_text_config().model_type} has layers with {', '.join(windowed)}, whose decode "
            "steps cannot be recorded. Leave the flag out."
        )
