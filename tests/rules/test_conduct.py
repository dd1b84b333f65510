"""Errors are not swallowed, only commands print, what is public says what it is, and a constant has one value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


def assigned_twice(root: Path) -> list[str]:
    """Constants of modules whose value is overwritten, as a merge does that keeps the lines of both sides."""
    found = []
    for path, tree in trees(root):
        known: set[str] = set()
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            inside = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            names = [name.id for name in inside if isinstance(name.ctx, ast.Store)]  # not TABLE["key"] = 1
            found += [f"{path}:{node.lineno} {name}" for name in names if name.isupper() and name in known]
            known.update(names)
    return found


def test_no_error_is_caught_without_being_named() -> None:
    assert catch_alls(PACKAGE) == []


def test_only_commands_and_tracking_print() -> None:
    assert prints(PACKAGE) == []


def test_public_functions_and_classes_have_docstrings() -> None:
    assert undocumented(PACKAGE) == []


@pytest.mark.parametrize("folder", ["openppo", "tests", "benchmarks"])
def test_constants_are_assigned_once(folder: str) -> None:
    assert assigned_twice(REPO / folder) == []


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


def test_the_checker_catches_constants_that_are_assigned_twice(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "CASES = [1]\nFIRST, _SECOND = 1, 2\nCASES = [2]\n_SECOND: int = 3\nONCE: int\nONCE = 1\n"
        "CASES += [3]\nname = 1\nname = 2\ndef f():\n    CASES = 1\n    CASES = 2\n"
    )
    (tmp_path / "b.py").write_text("FIRST = 1\nTABLE = {}\nTABLE['a'] = 1\nTABLE['b'] = 2\n")
    assert assigned_twice(tmp_path) == ["a.py:3 CASES", "a.py:4 _SECOND"]
