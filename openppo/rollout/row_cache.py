"""Keys and values of rows that are decoded together, in buffers that are written in place.

All rows end at the same column, and each begins where its prompt does. So a decode step writes one column, and a
prefill writes prompts, padded on the left, into the rows behind those that are decoded.
"""

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from openppo.models.actor import float32_head, next_logits
from openppo.models.attention import BY_LENGTHS, finished_mask
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.models.size import cache_elements
from openppo.rollout.cache_layers import Layer, Window
from openppo.rollout.device_rows import DeviceRows
from openppo.rollout.memory import free_memory
from openppo.rollout.prefill import reads_whole
from openppo.rollout.prefixes import Prefixes, States

SLACK_COLUMNS = 64
"""Columns beyond the longest row, one for each decode step before rows must move back."""
_SHARE_FOR_ROWS = 0.5
"""Share of free memory for the rows of a rollout."""
_SHARE_TO_KEEP = 0.125
"""Share of free memory that buffers may keep between rollouts."""


class RowCache(Cache):
    """Keys and values of the rows that are decoded; ``reserve`` makes room for more.

    All are of weights of one ``version``. ``starts`` are the first columns of the rows, and ``shifts`` are how far
    their tokens' positions are above their places, since images may take fewer positions. There are ``max_rows`` at
    most; with ``free`` bytes of memory, as many as fit into half of them. ``prefixes`` keeps states of ended rows, and
    ``on_device`` has the inputs of sampling of the current ones.
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
        self.window = Window(by_lengths=model.config._attn_implementation == BY_LENGTHS)
        n_layers = model.config.get_text_config().num_hidden_layers
        super().__init__(layers=[Layer(self.window) for _ in range(n_layers)])
        self.starts: list[int] = []
        self.shifts: list[int] = []
        self._device_starts: Tensor | None = None
        """Copy of both, (2, rows); None after a change."""

    def clear(self, version: int) -> None:
        """Drop all rows and kept prefixes, for weights of another ``version``; the buffers stay."""
        self.version = version
        self.prefixes = Prefixes(self.device, self.prefixes.reads_whole)
        self.on_device = DeviceRows(self.device, self.on_device.eos_token_ids)
        self.starts = []
        self.shifts = []
        self._device_starts = None
        self.window.hold(0, start=0)

    def is_small(self) -> bool:
        """True if the buffers may stay while other work needs memory; always on CPUs."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        n_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        free = free_memory(self.device)
        return free is None or n_bytes <= _SHARE_TO_KEEP * free

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the buffers."""
        return self.window.shape

    def fit(self, length: int) -> None:
        """Lower ``max_rows`` to the rows of ``length`` tokens that fit into memory."""
        if self.free is None:
            return

        row_bytes = self._columns_for(length) * cache_elements(self.config) * self.dtype.itemsize
        self.max_rows = rows_that_fit(self.free, row_bytes, self.max_rows)

    def reserve(self, n_rows: int, length: int) -> bool:
        """Make room for ``n_rows`` rows of ``length`` tokens; return True if buffers are new."""
        old_rows, old_columns = self.shape
        wanted_rows = old_rows if n_rows <= old_rows else max(n_rows, 2 * old_rows)
        rows = min(self.max_rows, wanted_rows)
        columns = self._columns_for(length)
        if rows <= old_rows and columns == old_columns:
            return False

        self.window.resize(rows, columns)
        for layer in self.layers:
            layer.fit_window()
        return True

    def begin(self, lengths: Sequence[int], n_new: int, kept: Sequence[States]) -> dict[str, Any]:
        """Return inputs of a forward over the last ``n_new`` places of left-padded prompts.

        ``kept`` are states of each prompt's first tokens, at least of those before these places. Where a prompt has
        more, the forward computes them again in place of padding, so that each row is in one piece. Inputs are a bool
        mask (prompts, longest length) and position ids (prompts, n_new).
        """
        window = self.window
        width = max(lengths)
        if width > window.end:
            self._move(width - window.end)
        first = window.n_rows
        end = window.end
        window.show(
            rows=slice(first, first + len(lengths)),
            columns=slice(end - width, end),
            new=slice(end - n_new, end),
        )

        for row, length, states in zip(count(first), lengths, kept, strict=False):
            if states:
                self._write(row, end - length, states)

        starts = torch.tensor([[width - length] for length in lengths], device=self.device)
        places = torch.arange(width, device=self.device) - starts  # (prompts, width)
        positions = places[:, -n_new:].clamp(min=0)
        return {"attention_mask": places >= 0, "position_ids": positions, "past_key_values": self}

    def _write(self, row: int, start: int, states: States) -> None:
        """Copy ``states`` into ``row``, from column ``start`` on."""
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            columns = slice(start, start + keys.shape[1])
            layer.keys[row, :, columns] = keys
            layer.values[row, :, columns] = values

    def enter(self, rows: Sequence[int], lengths: Sequence[int], shifts: Sequence[int]) -> None:
        """Add rows: ``rows`` of the prompts that the last forward read, with ``lengths`` tokens and ``shifts``."""
        window = self.window
        first = window.n_rows
        if list(rows) != list(range(len(rows))):
            entering = slice(first, first + len(rows))
            sources = torch.tensor(rows, device=self.device) + first
            columns = window.columns
            for layer in self.layers:
                for buffer in (layer.keys, layer.values):
                    buffer[entering, :, columns] = buffer[sources, :, columns]

        self.starts += [window.end - length for length in lengths]
        self.shifts += shifts
        self._device_starts = None
        window.hold(window.n_rows + len(rows), start=min(self.starts))

    def park(self, row: int, length: int) -> States:
        """Return a copy of keys and values of a row's first ``length`` tokens."""
        columns = slice(self.starts[row], self.starts[row] + length)
        states: States = []
        for layer in self.layers:
            keys = layer.keys[row, :, columns].clone()
            values = layer.values[row, :, columns].clone()
            states.append((keys, values))
        return states

    def leave(self, ended: Sequence[int]) -> list[tuple[int, int]]:
        """Drop rows; the last rows take their places. Return (from, to) of those that moved."""
        window = self.window
        n_left = window.n_rows - len(ended)
        dropped = set(ended)
        sources = [row for row in range(n_left, window.n_rows) if row not in dropped]
        targets = sorted(row for row in ended if row < n_left)
        moves = list(zip(sources, targets, strict=True))

        columns = slice(window.start, window.end)
        for source, target in moves:
            for layer in self.layers:
                layer.keys[target, :, columns] = layer.keys[source, :, columns]
                layer.values[target, :, columns] = layer.values[source, :, columns]
            self.starts[target] = self.starts[source]
            self.shifts[target] = self.shifts[source]

        del self.starts[n_left:]
        del self.shifts[n_left:]
        self._device_starts = None
        window.hold(n_left, start=min(self.starts, default=0))
        return moves

    def next_column(self) -> dict[str, Any]:
        """Return inputs of a forward over each row's next token, except the tokens."""
        self.make_room()
        window = self.window
        seen = slice(window.start, window.end + 1)
        window.show(
            rows=slice(window.n_rows),
            columns=slice(0, self.shape[1]) if window.by_lengths else seen,
            new=slice(window.end, window.end + 1),
        )

        starts, shifts = self.device_starts()
        return self.inputs(starts, shifts, window.end, columns=seen)

    def inputs(
        self, starts: Tensor, shifts: Tensor, column: Tensor | int, columns: slice
    ) -> dict[str, Any]:
        """Return inputs of a forward over one token per row, in ``column``.

        Rows see ``columns``, of which it is the last. Inputs are position ids (rows, 1) and a bool mask (rows,
        columns); for attention by lengths, int32 offsets of the rows in the flat buffers of (rows x columns), and
        lengths of the rows.
        """
        inputs: dict[str, Any] = {
            "position_ids": (column - starts + shifts)[:, None],
            "past_key_values": self,
        }
        if not self.window.by_lengths:
            places = torch.arange(columns.start, columns.stop, device=self.device)
            inputs["attention_mask"] = (places >= starts[:, None]) & (places <= column)
            return inputs

        rows = torch.arange(len(starts) + 1, dtype=torch.int32, device=self.device)
        inputs["cu_seq_lens_q"] = rows
        inputs["cu_seq_lens_k"] = rows * self.shape[1] + pad(starts, (0, 1)).int()
        inputs["max_length_q"] = 1
        inputs["max_length_k"] = columns.stop - columns.start
        inputs["seqused_k"] = (column + 1 - starts).int()
        inputs["attention_mask"] = finished_mask(self.device)
        return inputs

    def logits(self, model: PreTrainedModel, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Run ``model`` on ``ids`` (rows, n_new) with ``inputs``; return the next tokens' logits (rows, V)."""
        return self.sampled_ids.mask(next_logits(model, self.head, input_ids=ids, **inputs))

    def device_starts(self) -> Tensor:
        """Return ``starts`` and ``shifts`` (2, rows) on the device, copied if rows have changed."""
        if self._device_starts is None:
            self._device_starts = torch.tensor([self.starts, self.shifts], device=self.device)
        return self._device_starts

    def make_room(self) -> None:
        """Move rows to the left if ``window.end`` is not a free column."""
        if self.window.end == self.shape[1]:
            self._move(-self.window.start)
        assert self.window.end < self.shape[1], "a row is longer than was reserved"

    def _columns_for(self, length: int) -> int:
        """Columns of buffers for rows of ``length`` tokens; buffers grow by at least a quarter."""
        columns = self.shape[1]
        if length < columns:
            return columns
        return max(length + SLACK_COLUMNS, columns * 5 // 4)

    def _move(self, columns: int) -> None:
        """Shift all rows to the right, or with negative ``columns`` to the left."""
        window = self.window
        old = slice(window.start, window.end)
        new = slice(window.start + columns, window.end + columns)
        if window.n_rows > 0:
            for layer in self.layers:
                for buffer in (layer.keys, layer.values):
                    rows = buffer[: window.n_rows]
                    rows[:, :, new] = rows[:, :, old].clone()

        window.shift(columns)
        self.starts = [start + columns for start in self.starts]
        self._device_starts = None


def rows_that_fit(free: int, row: int, most: int) -> int:
    """Number of rows of ``row`` bytes that fit into half of ``free`` bytes, from 1 to ``most``.

    Above 8 it is rounded down to a multiple of 8, unless it is ``most``: a small difference in free memory then does
    not change how samples are batched.
    """
    rows = int(_SHARE_FOR_ROWS * free) // row
    rows = max(1, min(most, rows))
    if rows < 8 or rows == most:
        return rows
    return rows - rows % 8
