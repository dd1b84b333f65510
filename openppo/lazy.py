"""Public names of a package that load on first use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` from the package's ``if TYPE_CHECKING:`` block.

    The block says once, for readers, type checkers and this function, which name is in which module.
    """
    module = sys.modules[package]
    blocks = [node.body for node in ast.parse(Path(str(module.__file__)).read_bytes()).body if isinstance(node, ast.If)]
    imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
    homes = {alias.asname or alias.name: (node.module, alias.name) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes[name]
        value = vars(module)[name] = getattr(import_module(str(home)), original)
        return value

    return load, lambda: sorted(vars(module) | homes), sorted(homes)
