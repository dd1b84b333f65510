"""Keys and values of rows that are decoded together, in buffers that are written in place.

Rows come and go: all of them end at the same column, and each begins where its prompt does. So a decode step writes
one column, and prompts are read into the rows behind those that are decoded, padded on the left.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from openppo.models.size import cache_elements
from openppo.rollout.device_rows import DeviceRows
from openppo.rollout.requests import Prefixes, States, free_memory

SLACK_COLUMNS = 64
"""Beyond the longest row: so many decode steps pass before rows are moved back to the first column."""
_SHARE_FOR_ROWS = 0.5  # of free memory
_SHARE_TO_KEEP = 0.125  # of free memory, between rollouts


@dataclass
class _Window:
    """What all layers share: ``n_rows`` rows lie in columns ``start`` to ``end``, the last not included.

    A forward sees ``rows`` and ``columns`` of the buffers, which have the ``shape`` (rows, columns), and writes the
    last ``n_new`` of these columns. With ``fixed`` layers see the first rows and columns, so many, and write where the
    tensor says: (1,) int64 on the buffers' device, so that a forward that is recorded works for other columns too.
    """

    n_rows: int = 0
    start: int = 0
    end: int = 0
    rows: slice = field(default_factory=lambda: slice(0))
    columns: slice = field(default_factory=lambda: slice(0, 0))
    n_new: int = 1
    shape: tuple[int, int] = (0, 0)
    fixed: tuple[int, int, Tensor] | None = None


class _Layer(DynamicLayer):
    """The part of a cache that transformers' attention layers see."""

    keys: Any
    values: Any

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self.window = window

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new columns; returns all columns that the forward sees, (rows, heads, columns, width) each."""
        if self.window.fixed is not None:
            n_rows, n_columns, column = self.window.fixed
            self.keys[:n_rows].index_copy_(2, column, key_states)
            self.values[:n_rows].index_copy_(2, column, value_states)
            return self.keys[:n_rows, :, :n_columns], self.values[:n_rows, :, :n_columns]
        if not self.is_initialized:
            shape = self.window.shape
            self.keys, self.values = _larger(key_states[:0], shape), _larger(value_states[:0], shape)
            self.is_initialized = True
        rows, columns = self.window.rows, self.window.columns
        new = slice(columns.stop - self.window.n_new, columns.stop)
        self.keys[rows, :, new] = key_states
        self.values[rows, :, new] = value_states
        return self.keys[rows, :, columns], self.values[rows, :, columns]

    def get_seq_length(self) -> int:
        """Columns before those that are being written; of a fixed shape, before the last."""
        window = self.window
        if window.fixed is not None:
            return window.fixed[1] - 1
        return window.columns.stop - window.columns.start - window.n_new


def _larger(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    """A copy (rows, heads, columns, width) with room for so many rows and columns, and zeros there.

    Zeros, since what is masked must be finite: 0 x NaN is NaN.
    """
    heads, width = tensor.shape[1], tensor.shape[3]
    made = tensor.new_zeros((shape[0], heads, shape[1], width))
    rows = tensor[: shape[0]]
    if len(rows) > 0:
        made[: len(rows), :, : rows.shape[2]] = rows
    return made


# Layers of these kinds keep keys and values alone, one of each for a token and a head.
_CACHED = {"full_attention", "sliding_attention", "chunked_attention", "dynamic_mask", "global", "local"}


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    """Kinds of a model's layers, by its config."""
    text = config.get_text_config()
    named = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    if named:
        return set(named)
    windows = {"sliding_window": "sliding_attention", "keep_window_size": "dynamic_mask"}
    found = {kind for name, kind in windows.items() if getattr(text, name, None) is not None}
    return found or {"full_attention"}


def check_cache(config: PreTrainedConfig) -> None:
    """``ValueError`` for models that keep something else than keys and values of their own in each layer."""
    text = config.get_text_config()
    kinds = sorted(layer_kinds(config) - _CACHED)
    if (getattr(text, "num_kv_shared_layers", None) or 0) > 0:
        kinds.append("shared keys and values")
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # None: code of its own
    if not kinds and model is not None and "past_key_values" not in inspect.signature(model.forward).parameters:
        kinds.append("no key-value cache")
    if kinds:
        raise ValueError(
            f"{text.model_type} has layers with {', '.join(kinds)}, from which OpenPPO's engine cannot sample: take a "
            "model whose layers all have attention of their own."
        )


class RowCache(Cache):
    """Keys and values of the rows that are decoded; ``reserve`` says how many and how long they may become.

    All are of weights of one ``version``. ``starts`` are the first columns of the rows. There are ``max_rows`` at most;
    with ``measure`` what fits in half of the memory that is free now. ``prefixes`` are kept of rows that have left, and
    ``on_device`` has what sampling needs of those that are here.
    """

    layers: list[Any]

    def __init__(
        self, model: PreTrainedModel, on_device: DeviceRows, max_rows: int, measure: bool, version: int
    ) -> None:
        weight, self.on_device = next(model.parameters()), on_device
        self.config, self.dtype, self.device = model.config, weight.dtype, weight.device
        self.max_rows = max_rows
        self.free = free_memory(weight.device) if measure else None
        self.version = version
        self.prefixes = Prefixes(weight.device)
        self.window = _Window()
        n_layers = model.config.get_text_config().num_hidden_layers
        super().__init__(layers=[_Layer(self.window) for _ in range(n_layers)])
        self.starts: list[int] = []
        self._device_starts: Tensor | None = None  # the same, once they are needed; None: other ones

    def clear(self, version: int) -> None:
        """Empty the buffers, for weights of another ``version``; nothing that was kept is known any more."""
        self.version, self.prefixes = version, Prefixes(self.device)
        self.on_device = DeviceRows(self.device, self.on_device.eos_token_ids)
        self.starts, self._device_starts = [], None
        self.window.n_rows = self.window.start = self.window.end = 0

    def is_small(self) -> bool:
        """Whether its buffers may stay while other work needs memory; on CPUs they may."""
        n_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)
        free = free_memory(self.device)
        return free is None or n_bytes <= _SHARE_TO_KEEP * free

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns there is room for."""
        return self.window.shape

    def fit(self, length: int) -> None:
        """Lower ``max_rows`` to what memory has room for, if rows become this long."""
        if self.free is not None:
            row = self._columns_for(length) * cache_elements(self.config) * self.dtype.itemsize
            self.max_rows = rows_that_fit(self.free, row, self.max_rows)

    def reserve(self, n_rows: int, length: int) -> bool:
        """Make room for so many rows of so many tokens; what is there stays. Returns whether that took new buffers."""
        rows, columns = self.shape
        wanted = n_rows if rows == 0 else rows if n_rows <= rows else max(n_rows, 2 * rows)
        shape = min(self.max_rows, wanted), self._columns_for(length)
        if shape[0] <= rows and shape[1] == columns:
            return False
        self.window.shape = shape
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = _larger(layer.keys, shape), _larger(layer.values, shape)
        return True

    def begin(self, lengths: Sequence[int], n_new: int, kept: Sequence[States]) -> tuple[Tensor, Tensor]:
        """For a forward over the last ``n_new`` places of prompts of these ``lengths``, padded on the left.

        ``kept`` are states of each prompt's first tokens, of all that lie before those places at least: where a prompt
        has more, they are computed again in place of padding, so that each row is in one piece. Returns a bool mask
        (prompts, longest length) and position ids (prompts, n_new).
        """
        window, width, first = self.window, max(lengths), self.window.n_rows
        if width > window.end:
            self._move(width - window.end)
        end = window.end
        window.rows, window.columns, window.n_new = slice(first, first + len(lengths)), slice(end - width, end), n_new
        for row, length, states in zip(count(first), lengths, kept, strict=False):
            for layer, (keys, values) in zip(self.layers if states else (), states, strict=True):
                columns = slice(end - length, end - length + keys.shape[1])
                layer.keys[row, :, columns], layer.values[row, :, columns] = keys, values
        starts = torch.tensor([[width - length] for length in lengths], device=self.device)
        places = torch.arange(width, device=self.device) - starts  # (prompts, width)
        return places >= 0, places[:, -n_new:].clamp(min=0)

    def enter(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Add rows: ``rows`` of the prompts that the last forward read, with ``lengths`` tokens."""
        window, first, columns = self.window, self.window.n_rows, self.window.columns
        if list(rows) != list(range(len(rows))):
            indices = torch.tensor(rows, device=self.device) + first
            for layer in self.layers:
                for kept in (layer.keys, layer.values):
                    kept[first : first + len(rows), :, columns] = kept[indices, :, columns]
        self.starts += [window.end - length for length in lengths]
        self._device_starts = None
        window.n_rows += len(rows)
        window.start = min(self.starts)

    def park(self, row: int, length: int) -> States:
        """A copy of keys and values of a row's first ``length`` tokens."""
        columns = slice(self.starts[row], self.starts[row] + length)
        return [(layer.keys[row, :, columns].clone(), layer.values[row, :, columns].clone()) for layer in self.layers]

    def leave(self, gone: Sequence[int]) -> list[tuple[int, int]]:
        """Drop rows; the last rows take their places. Returns (from, to) of those that moved."""
        n_left = self.window.n_rows - len(gone)
        dropped = set(gone)
        sources = [row for row in range(n_left, self.window.n_rows) if row not in dropped]
        moves = list(zip(sources, sorted(row for row in gone if row < n_left), strict=True))
        columns = slice(self.window.start, self.window.end)
        for source, target in moves:
            for layer in self.layers:
                layer.keys[target, :, columns] = layer.keys[source, :, columns]
                layer.values[target, :, columns] = layer.values[source, :, columns]
            self.starts[target] = self.starts[source]
        del self.starts[n_left:]
        self._device_starts = None
        self.window.n_rows = n_left
        if n_left == 0:
            self.window.end = 0
        self.window.start = min(self.starts, default=0)
        return moves

    def next_column(self) -> tuple[Tensor, Tensor]:
        """For a forward over each row's next token: bool mask (rows, columns so far + 1) and position ids (rows, 1)."""
        self.make_room()
        window, starts = self.window, self.device_starts()[:, None]
        window.rows, window.columns, window.n_new = slice(window.n_rows), slice(window.start, window.end + 1), 1
        return torch.arange(window.start, window.end + 1, device=self.device) >= starts, window.end - starts

    def device_starts(self) -> Tensor:
        """``starts`` on the device; copied there when rows have changed."""
        if self._device_starts is None:
            self._device_starts = torch.tensor(self.starts, device=self.device)
        return self._device_starts

    def make_room(self) -> None:
        """Have a free column at ``window.end``."""
        if self.window.end == self.shape[1]:
            self._move(-self.window.start)
        assert self.window.end < self.shape[1], "a row is longer than was reserved"

    def _columns_for(self, length: int) -> int:
        """Columns of buffers for rows of so many tokens; at least a quarter more than now where they must grow."""
        columns = self.shape[1]
        return columns if length < columns else max(length + SLACK_COLUMNS, columns * 5 // 4)

    def _move(self, columns: int) -> None:
        """Shift all rows to the right, or with negative ``columns`` to the left."""
        window = self.window
        old, new = slice(window.start, window.end), slice(window.start + columns, window.end + columns)
        for layer in self.layers if window.n_rows > 0 else ():
            for buffer in (layer.keys, layer.values):
                buffer[: window.n_rows, :, new] = buffer[: window.n_rows, :, old].clone()
        window.start, window.end = new.start, new.stop
        self.starts, self._device_starts = [start + columns for start in self.starts], None


def rows_that_fit(free: int, row: int, most: int) -> int:
    """Rows of ``row`` bytes for which half of ``free`` bytes is enough, at most ``most``; eights of them beyond 8.

    Eights, so that a small difference in free memory does not change how samples are batched.
    """
    rows = max(1, min(most, int(_SHARE_FOR_ROWS * free) // row))
    return rows if rows < 8 or rows == most else rows - rows % 8
