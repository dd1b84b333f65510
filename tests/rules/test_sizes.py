"""Sizes protect the reader: nothing is larger than its limit in ``limits.py``."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.rules import limits

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "openppo"
NAMES_THAT_SAY_NOTHING = {"utils", "common", "helpers", "base"}
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Size = tuple[str, str, int]


def python_lines(root: Path) -> int:
    """Lines of all Python files under ``root``."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in root.rglob("*.py"))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters that a caller can pass by name or place."""
    arguments = function.args
    named = [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def attributes(node: ast.ClassDef) -> int:
    """Number of names that the methods of a class give to ``self``."""
    inner = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return len({n.attr for n in inner if ast.unparse(n.value) == "self"})


def sizes() -> Iterator[Size]:
    """The name of its limit, the place and the size of everything in the package."""
    for folder in [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
        files = [path for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"]
        yield "FILES_IN_A_FOLDER", str(folder), len(files)
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        yield "FILE_LINES", str(file), len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (*Function, ast.ClassDef)):
                where = f"{file}:{node.lineno} {node.name}"
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield "CLASS_LINES" if isinstance(node, ast.ClassDef) else "FUNCTION_LINES", where, lines
                if isinstance(node, ast.ClassDef):
                    yield "ATTRIBUTES", where, attributes(node)
                else:
                    yield "PARAMETERS", where, parameters(node)


def test_nothing_in_the_package_exceeds_its_limit():
    assert [f"{where}: {size} {limit}" for limit, where, size in sizes() if size > getattr(limits, limit)] == []


def test_package_and_tests_stay_within_their_totals():
    assert python_lines(PACKAGE) <= limits.PACKAGE_LINES
    assert len(list(PACKAGE.rglob("*.py"))) <= limits.PACKAGE_FILES
    assert python_lines(PACKAGE / "orchestrator") <= limits.ORCHESTRATOR_LINES
    assert python_lines(PACKAGE / "agents") <= limits.AGENTS_LINES
    assert python_lines(REPO / "tests") <= limits.TEST_LINES


def test_names_say_what_is_inside():
    paths = [path for path in PACKAGE.rglob("*") if path.is_dir() or path.suffix == ".py"]
    assert [path for path in paths if path.stem in NAMES_THAT_SAY_NOTHING] == []
