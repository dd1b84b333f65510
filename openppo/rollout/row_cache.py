"""Keys and values of rows that are decoded together, in buffers that are written in place.

Rows come and go: all of them end at the same column, and each begins where its prompt does. So a decode step writes
one column, and a row that enters is copied in as it is.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

SLACK_COLUMNS = 64
"""Beyond the longest row: so many decode steps pass before rows are moved back to the first column."""


@dataclass
class _Window:
    """What all layers share: ``n_rows`` rows lie in columns ``start`` to ``end``, the last not included.

    With ``fixed`` layers see the first rows and columns of the buffers, so many, and write where the tensor says: (1,)
    int64 on the buffers' device, so that a forward that is recorded works for other columns too.
    """

    n_rows: int = 0
    start: int = 0
    end: int = 0
    fixed: tuple[int, int, Tensor] | None = None


class _Layer(DynamicLayer):
    """The part of a cache that transformers' attention layers see; ``RowCache`` makes the buffers."""

    keys: Any
    values: Any

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self.window = window

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one column; returns all columns of all rows, (rows, heads, columns, width) each."""
        if self.window.fixed is not None:
            rows, columns, column = self.window.fixed
            self.keys[:rows].index_copy_(2, column, key_states)
            self.values[:rows].index_copy_(2, column, value_states)
            return self.keys[:rows, :, :columns], self.values[:rows, :, :columns]
        n, start, end = self.window.n_rows, self.window.start, self.window.end
        self.keys[:n, :, end : end + 1] = key_states
        self.values[:n, :, end : end + 1] = value_states
        return self.keys[:n, :, start : end + 1], self.values[:n, :, start : end + 1]

    def get_seq_length(self) -> int:
        """Columns before the one that is being written; of a fixed shape, before the last."""
        fixed = self.window.fixed
        return self.window.end - self.window.start if fixed is None else fixed[1] - 1


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

    ``shape`` are the rows and columns there is room for, ``starts`` the first column of each row.
    """

    layers: list[Any]

    def __init__(self, n_layers: int) -> None:
        self.window = _Window()
        super().__init__(layers=[_Layer(self.window) for _ in range(n_layers)])
        self.shape = (0, 0)
        self.starts: list[int] = []

    def reserve(self, max_rows: int, max_length: int) -> bool:
        """Make room for so many rows of so many tokens; what is there stays. Returns whether that took new buffers."""
        rows, columns = self.shape
        if max_rows <= rows and max_length < columns:
            return False
        self.shape = (max(max_rows, rows), max(max_length + SLACK_COLUMNS, columns))
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = self._larger(layer.keys), self._larger(layer.values)
        return True

    def enter(self, prompts: DynamicCache, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Add rows: copies of ``rows`` of ``prompts``, of which the last ``lengths`` tokens are real."""
        window, first, n_new = self.window, self.window.n_rows, len(rows)
        layers: list[Any] = prompts.layers
        width = layers[0].keys.shape[2]
        if width > window.end:
            self._move(width - window.end)
        indices = torch.tensor(rows, device=layers[0].keys.device)
        for mine, theirs in zip(self.layers, layers, strict=True):
            if not mine.is_initialized:
                mine.keys, mine.values = self._larger(theirs.keys[:0]), self._larger(theirs.values[:0])
                mine.is_initialized = True
            for kept, new in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                kept[first : first + n_new, :, window.end - width : window.end] = new[indices]
        self.starts += [window.end - length for length in lengths]
        window.n_rows += n_new
        window.start = min(self.starts)

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
        self.window.n_rows = n_left
        if n_left == 0:
            self.window.end = 0
        self.window.start = min(self.starts, default=0)
        return moves

    def next_column(self) -> tuple[Tensor, Tensor]:
        """For a forward over each row's next token: bool mask (rows, columns so far + 1) and position ids (rows, 1)."""
        self.make_room()
        window, device = self.window, self.layers[0].keys.device
        starts = torch.tensor(self.starts, device=device)[:, None]
        return torch.arange(window.start, window.end + 1, device=device) >= starts, window.end - starts

    def make_room(self) -> None:
        """Have a free column at ``window.end``."""
        if self.window.end == self.shape[1]:
            self._move(-self.window.start)
        assert self.window.end < self.shape[1], "a row is longer than was reserved"

    def _larger(self, tensor: Tensor) -> Tensor:
        """A copy (rows, heads, columns, width) with room for all rows and columns, and zeros there.

        Zeros, since what is masked must be finite: 0 x NaN is NaN.
        """
        rows, heads, columns, width = tensor.shape
        larger = tensor.new_zeros((self.shape[0], heads, self.shape[1], width))
        if rows > 0:
            larger[:rows, :, :columns] = tensor
        return larger

    def _move(self, columns: int) -> None:
        """Shift all rows to the right, or with negative ``columns`` to the left."""
        window = self.window
        old, new = slice(window.start, window.end), slice(window.start + columns, window.end + columns)
        for layer in self.layers if window.n_rows > 0 else ():
            for buffer in (layer.keys, layer.values):
                buffer[: window.n_rows, :, new] = buffer[: window.n_rows, :, old].clone()
        window.start, window.end = new.start, new.stop
        self.starts = [start + columns for start in self.starts]
