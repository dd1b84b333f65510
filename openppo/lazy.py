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
    source = Path(str(module.__file__)).read_bytes()
    homes: dict[str, str] = {}  # modules by public name
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: str(node.module) for alias in node.names if alias.asname}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        vars(module)[name] = value
        return value

    def list_names() -> list[str]:
        return sorted(vars(module) | homes)

    return load, list_names, sorted(homes)
