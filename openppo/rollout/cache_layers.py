"""Layers of the cache of rows, and the window of their buffers that forwards see."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


@dataclass
class Window:
    """Place of the rows in all layers: ``n_rows`` rows in columns ``start`` to ``end`` (excluded).

    A forward sees ``rows`` and ``columns`` of the buffers, which have the ``shape`` (rows, columns), and writes the
    columns ``new``. ``fixed`` is (number of rows, number of columns, column): layers see the first rows and columns,
    and write the column of the tensor, (1,) int64 on the buffers' device, so that a recorded forward works for other
    columns too. For attention ``by_lengths`` columns come before heads in memory, and decode steps see all of them.
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

    def hold(self, n_rows: int, start: int) -> None:
        """Hold ``n_rows`` rows, the longest from ``start`` on; without rows the window ends at column 0."""
        self.n_rows = n_rows
        self.start = start
        if n_rows == 0:
            self.end = 0

    def shift(self, columns: int) -> None:
        """Place the rows ``columns`` further to the right, or with negative ``columns`` to the left."""
        self.start += columns
        self.end += columns

    def advance(self) -> None:
        """Add the column that the last decode step wrote."""
        self.end += 1

    def show(self, rows: slice, columns: slice, new: slice) -> None:
        """Let the next forward see ``rows`` and ``columns``, and write the columns ``new``."""
        self.rows = rows
        self.columns = columns
        self.new = new

    def resize(self, n_rows: int, n_columns: int) -> None:
        """Make further buffers of ``n_rows`` rows and ``n_columns`` columns."""
        self.shape = n_rows, n_columns

    def use_mask(self) -> None:
        """Let further decode steps take a mask, not attention by lengths."""
        self.by_lengths = False

    @contextmanager
    def fixed_to(self, n_rows: int, n_columns: int, column: Tensor) -> Iterator[None]:
        """Context in which layers see the first rows and columns and write ``column``, as ``fixed`` says."""
        self.fixed = n_rows, n_columns, column
        try:
            yield
        finally:
            self.fixed = None

    def buffer(self, tensor: Tensor) -> Tensor:
        """Return a copy (rows, heads, columns, width) of the window's shape, with zeros in the new room.

        Masked values must be finite, since 0 x NaN is NaN.
        """
        n_rows, n_columns = self.shape
        heads = tensor.shape[1]
        width = tensor.shape[3]
        if self.by_lengths:
            buffer = tensor.new_zeros((n_rows, n_columns, heads, width)).transpose(1, 2)
        else:
            buffer = tensor.new_zeros((n_rows, heads, n_columns, width))

        rows = tensor[:n_rows]
        if len(rows) > 0:
            buffer[: len(rows), :, : rows.shape[2]] = rows
        return buffer


class Layer(DynamicLayer):
    """One layer of the cache, with the interface of transformers' attention layers."""

    keys: Any
    values: Any

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns; return all columns that the forward sees, (rows, heads, columns, width) each."""
        if self.window.fixed is not None:
            n_rows, n_columns, column = self.window.fixed
            self.keys[:n_rows].index_copy_(2, column, key_states)
            self.values[:n_rows].index_copy_(2, column, value_states)
            return self.keys[:n_rows, :, :n_columns], self.values[:n_rows, :, :n_columns]

        if not self.is_initialized:
            self.keys = self.window.buffer(key_states[:0])
            self.values = self.window.buffer(value_states[:0])
            self.is_initialized = True

        rows = self.window.rows
        columns = self.window.columns
        new = self.window.new
        self.keys[rows, :, new] = key_states
        self.values[rows, :, new] = value_states
        return self.keys[rows, :, columns], self.values[rows, :, columns]

    def fit_window(self) -> None:
        """Copy keys and values into buffers of the window's shape, if there are any yet."""
        if self.is_initialized:
            self.keys = self.window.buffer(self.keys)
            self.values = self.window.buffer(self.values)

    def get_seq_length(self) -> int:
        """Number of columns before the new ones; for a fixed shape, before the last."""
        window = self.window
        if window.fixed is not None:
            return window.fixed[1] - 1
        return window.new.start - window.columns.start
