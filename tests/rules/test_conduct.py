"""Errors are not swallowed, only commands print, and what is public says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "openppo"

CATCH_ALL = {"Exception", "BaseException"}
PRINTERS = {"cli", "tracking"}


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


def test_no_error_is_caught_without_being_named() -> None:
    assert catch_alls(PACKAGE) == []


def test_only_commands_and_tracking_print() -> None:
    assert prints(PACKAGE) == []


def test_public_functions_and_classes_have_docstrings() -> None:
    assert undocumented(PACKAGE) == []


def test_the_checker_catches_catch_alls(tmp_path: Path) -> None:
    handlers = ["except:", "except Exception:", "except (OSError, Exception) as error:", "except BaseException:"]
    for index, handler in enumerate(handlers):
        (tmp_path / f"caught{index}.py").write_text(f"try:\n    pass\n{handler}\n    pass\n")
    (tmp_path / "suppressed.py").write_text("import contextlib\nwith contextlib.suppress(Exception):\n    pass\n")
    (tmp_path / "fine.py").write_text("try:\n    pass\nexcept (OSError, KeyError):\n    raise Exception\n")
    assert len(catch_alls(tmp_path)) == 5


def test_the_checker_catches_prints(tmp_path: Path) -> None:
    for package in ("cli", "tracking", "models"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("def f():\n    print(1)\n")
    assert prints(tmp_path) == ["models/a.py:2"]


def test_the_checker_catches_missing_docstrings(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n    pass\ndef f():\n    pass\nasync def g():\n    pass\n"
        "def _private():\n    pass\ndef documented():\n    'It is.'\n@overload\ndef h(): ...\n"
    )
    assert undocumented(tmp_path) == ["a.py:1 A", "a.py:3 f", "a.py:5 g"]
