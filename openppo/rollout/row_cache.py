"""Keys and values of rows that are decoded together, in buffers that are written in place.

Rows come and go: all of them end at the same column, and each begins where its prompt does. So a decode step writes
one column, and prompts are read into the rows behind those that are decoded, padded on the left.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from openppo.models.actor import float32_head, next_logits
from openppo.models.attention import BY_LENGTHS, finished_mask
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.models.size import cache_elements
from openppo.rollout.device_rows import DeviceRows
from openppo.rollout.memory import free_memory
from openppo.rollout.prefill import reads_whole
from openppo.rollout.prefixes import Prefixes, States

SLACK_COLUMNS = 64
"""Beyond the longest row: so many decode steps pass before rows are moved back to the first column."""
_SHARE_FOR_ROWS = 0.5  # of free memory
_SHARE_TO_KEEP = 0.125  # of free memory, between rollouts


@dataclass
class _Window:
    """What all layers share: ``n_rows`` rows lie in columns ``start`` to ``end``, the last not included.

    A forward sees ``rows`` and ``columns`` of the buffers, which have the ``shape`` (rows, columns), and writes the
    columns ``new``. With ``fixed`` layers see the first rows and columns, so many, and write where the tensor says:
    (1,) int64 on the buffers' device, so that a forward that is recorded works for other columns too. For attention
    ``by_lengths`` columns come before heads in memory, and decode steps see all of them.
    """

    n_rows: int = 0
    start: int = 0
    end: int = 0
    rows: slice = field(default_factory=lambda: slice(0))
    columns: slice = field(default_factory=lambda: slice(0, 0))
    new: slice = field(default_factory=lambda: slice(0, 1))
    shape: tuple[int, int] = (0, 0)
    fixed: tuple[int, int, Tensor] | None = None
    by_lengths: bool = False

    def buffer(self, tensor: Tensor) -> Tensor:
        """A copy (rows, heads, columns, width) with room for all rows and columns, and zeros there.

        Zeros, since what is masked must be finite: 0 x NaN is NaN.
        """
        (n_rows, n_columns) = self.shape
        heads = tensor.shape[1]
        width = tensor.shape[3]
        if self.by_lengths:
            made = tensor.new_zeros((n_rows, n_columns, heads, width)).transpose(1, 2)
        else:
            made = tensor.new_zeros((n_rows, heads, n_columns, width))
        rows = tensor[:n_rows]
        if len(rows) > 0:
            made[: len(rows), :, : rows.shape[2]] = rows
        return made


class _Layer(DynamicLayer):
    """The part of a cache that transformers' attention layers see."""

    keys: Any
    values: Any

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self.window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns; returns all columns that the forward sees, (rows, heads, columns, width) each."""
        if self.window.fixed is not None:
            n_rows, n_columns, column = self.window.fixed
            self.keys[:n_rows].index_copy_(2, column, key_states)
            self.values[:n_rows].index_copy_(2, column, value_states)
            return self.keys[:n_rows, :, :n_columns], self.values[:n_rows, :, :n_columns]
        if not self.is_initialized:
            self.keys, self.values = (
                self.window.buffer(key_states[:0]),
                self.window.buffer(value_states[:0]),
            )
            self.is_initialized = True
        rows = self.window.rows
        columns = self.window.columns
        new = self.window.new
        self.keys[rows, :, new] = key_states
        self.values[rows, :, new] = value_states
        return self.keys[rows, :, columns], self.values[rows, :, columns]

    def get_seq_length(self) -> int:
        """Columns before those that are being written; of a fixed shape, before the last."""
        window = self.window
        if window.fixed is not None:
            return window.fixed[1] - 1
        return window.new.start - window.columns.start


class RowCache(Cache):
    """Keys and values of the rows that are decoded; ``reserve`` says how many and how long they may become.

    All are of weights of one ``version``. ``starts`` are the first columns of the rows, and ``shifts`` are how far
    their tokens' positions are above their places, since images may take fewer. There are ``max_rows`` at most; with
    ``free`` bytes of memory what fits into half of them. ``prefixes`` are kept of rows that have left, and
    ``on_device`` has what sampling needs of those that are here.
    """

    layers: list[Any]

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Collection[int],
        max_rows: int,
        free: int | None,
        version: int,
        sampled_ids: SampledIds = ALL_IDS,
    ) -> None:
        weight = next(model.parameters())
        self.config = model.config
        self.dtype = weight.dtype
        self.device = weight.device
        self.on_device = DeviceRows(self.device, eos_token_ids)
        self.head = float32_head(model, self.device)
        self.sampled_ids = sampled_ids
        self.max_rows = max_rows
        self.free = free
        self.version = version
        self.prefixes = Prefixes(weight.device, reads_whole(model))
        self.window = _Window(by_lengths=model.config._attn_implementation == BY_LENGTHS)
        n_layers = model.config.get_text_config().num_hidden_layers
        super().__init__(layers=[_Layer(self.window) for _ in range(n_layers)])
        self.starts, self.shifts = list[int](), list[int]()
        self._device_starts: Tensor | None = (
            None  # both, (2, rows), once they are needed; None: other ones
        )

    def clear(self, version: int) -> None:
        """Empty the buffers, for weights of another ``version``; nothing that was kept is known any more."""
        self.version, self.prefixes = version, Prefixes(self.device, self.prefixes.reads_whole)
        self.on_device = DeviceRows(self.device, self.on_device.eos_token_ids)
        self.starts = []
        self.shifts = []
        self._device_starts = None
        self.window.n_rows = self.window.start = self.window.end = 0

    def is_small(self) -> bool:
        """Whether its buffers may stay while other work needs memory; on CPUs they may."""
        n_bytes = sum(
            layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized
        )
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
                layer.keys, layer.values = (
                    self.window.buffer(layer.keys),
                    self.window.buffer(layer.values),
                )
        return True

    def begin(self, lengths: Sequence[int], n_new: int, kept: Sequence[States]) -> dict[str, Any]:
        """For a forward over the last ``n_new`` places of prompts of these ``lengths``, padded on the left.

        ``kept`` are states of each prompt's first tokens, of all that lie before those places at least: where a prompt
        has more, they are computed again in place of padding, so that each row is in one piece. Returns inputs: a bool
        mask (prompts, longest length) and position ids (prompts, n_new).
        """
        window = self.window
        width = max(lengths)
        first = self.window.n_rows
        if width > window.end:
            self._move(width - window.end)
        end = window.end
        window.rows, window.columns = slice(first, first + len(lengths)), slice(end - width, end)
        window.new = slice(end - n_new, end)
        for row, length, states in zip(count(first), lengths, kept, strict=False):
            for layer, (keys, values) in zip(self.layers if states else (), states, strict=True):
                columns = slice(end - length, end - length + keys.shape[1])
                layer.keys[row, :, columns], layer.values[row, :, columns] = keys, values
        starts = torch.tensor([[width - length] for length in lengths], device=self.device)
        places = torch.arange(width, device=self.device) - starts  # (prompts, width)
        positions = places[:, -n_new:].clamp(min=0)
        return {"attention_mask": places >= 0, "position_ids": positions, "past_key_values": self}

    def enter(self, rows: Sequence[int], lengths: Sequence[int], shifts: Sequence[int]) -> None:
        """Add rows: ``rows`` of the prompts that the last forward read, with ``lengths`` tokens and ``shifts``."""
        window = self.window
        first = self.window.n_rows
        columns = self.window.columns
        if list(rows) != list(range(len(rows))):
            indices = torch.tensor(rows, device=self.device) + first
            for layer in self.layers:
                for kept in (layer.keys, layer.values):
                    kept[first : first + len(rows), :, columns] = kept[indices, :, columns]
        self.starts += [window.end - length for length in lengths]
        self.shifts += shifts
        self._device_starts = None
        window.n_rows += len(rows)
        window.start = min(self.starts)

    def park(self, row: int, length: int) -> States:
        """A copy of keys and values of a row's first ``length`` tokens."""
        columns = slice(self.starts[row], self.starts[row] + length)
        return [
            (layer.keys[row, :, columns].clone(), layer.values[row, :, columns].clone())
            for layer in self.layers
        ]

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
            self.starts[target], self.shifts[target] = self.starts[source], self.shifts[source]
        del self.starts[n_left:], self.shifts[n_left:]
        self._device_starts = None
        self.window.n_rows = n_left
        if n_left == 0:
            self.window.end = 0
        self.window.start = min(self.starts, default=0)
        return moves

    def next_column(self) -> dict[str, Any]:
        """Inputs of a forward over each row's next token, but for the tokens."""
        self.make_room()
        window = self.window
        seen, window.new = slice(window.start, window.end + 1), slice(window.end, window.end + 1)
        window.rows, window.columns = (
            slice(window.n_rows),
            slice(0, self.shape[1]) if window.by_lengths else seen,
        )
        starts, shifts = self.device_starts()
        return self.inputs(starts, shifts, window.end, columns=seen)

    def inputs(
        self, starts: Tensor, shifts: Tensor, column: Tensor | int, columns: slice
    ) -> dict[str, Any]:
        """Inputs of a forward over a token per row in ``column``, the last of ``columns`` that any row sees.

        Position ids (rows, 1), and a bool mask (rows, columns) or int32 where each row begins in the flat buffers of
        (rows x columns), and how long it is.
        """
        inputs: dict[str, Any] = {
            "position_ids": (column - starts + shifts)[:, None],
            "past_key_values": self,
        }
        if not self.window.by_lengths:
            places = torch.arange(columns.start, columns.stop, device=self.device)
            return inputs | {"attention_mask": (places >= starts[:, None]) & (places <= column)}
        rows = torch.arange(len(starts) + 1, dtype=torch.int32, device=self.device)
        inputs |= {
            "cu_seq_lens_q": rows,
            "cu_seq_lens_k": rows * self.shape[1] + pad(starts, (0, 1)).int(),
        }
        inputs |= {"max_length_q": 1, "max_length_k": columns.stop - columns.start}
        return inputs | {
            "seqused_k": (column + 1 - starts).int(),
            "attention_mask": finished_mask(self.device),
        }

    def logits(self, model: PreTrainedModel, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Logits (rows, V) after ``ids`` (rows, n_new), for ``inputs`` beside them."""
        return self.sampled_ids.mask(next_logits(model, self.head, input_ids=ids, **inputs))

    def device_starts(self) -> Tensor:
        """``starts`` and ``shifts`` (2, rows) on the device; copied there when rows have changed."""
        if self._device_starts is None:
            self._device_starts = torch.tensor([self.starts, self.shifts], device=self.device)
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
        old, new = (
            slice(window.start, window.end),
            slice(window.start + columns, window.end + columns),
        )
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
