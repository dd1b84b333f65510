"""Errors are not swallowed, only commands print, and what is public says what it is."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "openppo"

CATCH_ALL = {"Exception", "BaseException"}
PRINTERS = {"cli", "tracking", "__main__.py"}


def trees(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every file under ``root``, by its path relative to it, parsed."""
    for file in sorted(root.rglob("*.py")):
        yield file.relative_to(root), ast.parse(file.read_text(encoding="utf-8"))


def catch_alls(root: Path) -> list[str]:
    """``except:``, ``except Exception`` and ``except BaseException``, alone or in a tuple; suppress likewise."""
    found = []
    for path, tree in trees(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.walk(node.type) if node.type else iter([ast.Name(id="Exception")])
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
                caught = (inner for argument in node.args for inner in ast.walk(argument))
            else:
                continue
            if any(isinstance(name, ast.Name) and name.id in CATCH_ALL for name in caught):
                found.append(f"{path}:{node.lineno}")
    return found


def prints(root: Path) -> list[str]:
    """Calls of ``print`` outside the packages that talk to people."""
    return [
        f"{path}:{node.lineno}"
        for path, tree in trees(root)
        if path.parts[0] not in PRINTERS
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def undocumented(root: Path) -> list[str]:
    """Public functions and classes of modules without a docstring; overload stubs need none."""
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in trees(root)
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if not node.name.startswith("_") and ast.get_docstring(node) is None
        if "overload" not in [ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list]
    ]


@pytest.mark.parametrize("check", [catch_alls, prints, undocumented], ids=lambda check: check.__name__)
def test_the_package_has_no(check: Callable[[Path], list[str]]) -> None:
    assert check(PACKAGE) == []
