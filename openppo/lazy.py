"""Public names that load on first use."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` from the imports in the package's ``if TYPE_CHECKING:``."""
    module = sys.modules[package]
    imports = [
        n
        for n in ast.walk(ast.parse(Path(str(module.__file__)).read_bytes()))
        if isinstance(n, ast.ImportFrom)
    ]
    homes = {alias.name: node.module for node in imports for alias in node.names if alias.asname}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(module)[name] = getattr(import_module(str(homes[name])), name)
        return value

    return load, lambda: sorted(vars(module) | homes), sorted(homes)
