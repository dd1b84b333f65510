"""Errors are not swallowed, only commands print, what is public says what it is, and a constant has one value."""

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


@pytest.mark.parametrize(
    ("checker", "lines", "wrong"),
    [
        (catch_alls, "try: f() | except: f() | try: f() | except (OSError, BaseException) as error: f()", [2, 4]),
        (catch_alls, "with contextlib.suppress(Exception): f() | try: f() | except OSError: raise Exception", [1]),
        (prints, "print(1)", [1]),
        (undocumented, "class A: f() | def g(): f() | async def h(): f()", [1, 2, 3]),
        (undocumented, "def _private(): f() | def documented(): 'It is.' | @overload | def i(): ...", []),
        (assigned_twice, "CASES, (FIRST, _SECOND) = [1], (1, 2) | CASES = [2] | _SECOND: int = 3", [2, 3]),
        (
            assigned_twice,
            "ONCE: int | ONCE = 1 | ONCE += 3 | name = 1 | name = 2 | T = {} | T['a'] = 1 | T['b'] = 2",
            [],
        ),
        (assigned_twice, "ONCE = 1 | def f(): ONCE = 1; ONCE = 2", []),
    ],
)
def test_a_checker_finds_what_is_wrong(
    checker: Callable[[Path], list[str]], lines: str, wrong: list[int], tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/a.py").write_text(lines.replace(" | ", "\n"))
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli/b.py").write_text("print(1)\nONCE = 1\n")
    assert [line.split()[0] for line in checker(tmp_path)] == [f"models/a.py:{number}" for number in wrong]
