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


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters that a caller can pass by name or place."""
    arguments = function.args
    named = [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def sizes() -> Iterator[Size]:
    """The name of its limit, the place and the size of everything in the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        yield "FILE_LINES", str(file), len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (*Function, ast.ClassDef)):
                where = f"{file}:{node.lineno} {node.name}"
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield (
                    "CLASS_LINES" if isinstance(node, ast.ClassDef) else "FUNCTION_LINES",
                    where,
                    lines,
                )
                if not isinstance(node, ast.ClassDef):
                    yield "PARAMETERS", where, parameters(node)


def test_nothing_in_the_package_exceeds_its_limit():
    assert [
        f"{where}: {size} {limit}"
        for limit, where, size in sizes()
        if size > getattr(limits, limit)
    ] == []


def test_names_say_what_is_inside():
    paths = [path for path in PACKAGE.rglob("*") if path.is_dir() or path.suffix == ".py"]
    assert [path for path in paths if path.stem in NAMES_THAT_SAY_NOTHING] == []
