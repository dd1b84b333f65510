"""Tensors that ranks share, on disk by name and place: any number of ranks can read what any other number wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """Elements ``start`` to ``start + values.numel()`` of a flattened tensor, of which other ranks hold the rest.

    ``values`` (n,) is the memory that its owner works with: writing into it changes the owner.
    """

    start: int
    values: Tensor


def write_fragments(file: Path, fragments: Mapping[str, Fragment]) -> None:
    """One safetensors file with all fragments; a key is the tensor's name and the fragment's start."""
    save_file({f"{name}@{f.start}": f.values.detach().cpu() for name, f in fragments.items()}, file)


class FragmentReader:
    """Reads any part of a tensor from the files that hold fragments of it. A context manager."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._stack = ExitStack()
        self._places: dict[str, list[tuple[int, int, Any, str]]] = {}
        for file in sorted(files):
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                name, _, start = key.rpartition("@")
                (length,) = opened.get_slice(key).get_shape()
                self._places.setdefault(name, []).append((int(start), int(start) + length, opened, key))

    def __enter__(self) -> FragmentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> set[str]:
        """Names of all tensors, whole or partial."""
        return set(self._places)

    def size(self, name: str) -> int:
        """Elements of a tensor, up to the last that the files hold."""
        return max(end for _, end, _, _ in self._places[name])

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
                f"{int(missing.sum())} of {end - start} elements of {name} are not in the checkpoint. If its ranks ran "
                "on several hosts without a shared folder, put the files of all hosts into one folder."
            )
