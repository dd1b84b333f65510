"""Sizes protect the reader. Lower a maximum when the largest has shrunk; only an issue may raise one."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "openppo"

MAXIMA = {
    "file lines": 400,
    "function lines": 60,
    "class lines": 310,
    "parameters": 8,  # without self and cls
    "files in a folder": 16,  # without __init__.py
}
NAMES_THAT_SAY_NOTHING = {"utils", "common", "helpers", "base"}

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of parameters that a caller can pass by name or place."""
    arguments = function.args
    named = [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def too_large(root: Path) -> list[str]:
    """Everything under ``root`` that is larger than its maximum."""
    sizes: list[tuple[str, str, int]] = []
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
        files = [path for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"]
        sizes.append(("files in a folder", str(folder), len(files)))
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        sizes.append(("file lines", str(file), len(text.splitlines())))
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (*Function, ast.ClassDef)):
                continue
            where = f"{file}:{node.lineno} {node.name}"
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, ast.ClassDef):
                sizes.append(("class lines", where, lines))
            else:
                sizes += [("function lines", where, lines), ("parameters", where, parameters(node))]
    return [f"{where}: {size} {kind}, at most {MAXIMA[kind]}" for kind, where, size in sizes if size > MAXIMA[kind]]


def empty_names(root: Path) -> list[str]:
    """Modules and packages whose name does not say what is in them."""
    return [
        str(path)
        for path in sorted(root.rglob("*"))
        if path.stem in NAMES_THAT_SAY_NOTHING and (path.is_dir() or path.suffix == ".py")
    ]


def test_nothing_is_larger_than_its_maximum() -> None:
    assert too_large(PACKAGE) == []


def test_names_say_what_is_inside() -> None:
    assert empty_names(PACKAGE) == []


def test_the_checker_catches_each_kind_of_too_large(tmp_path: Path) -> None:
    body = "    x = 1\n"
    (tmp_path / "long_file.py").write_text("x = 1\n" * 401)
    (tmp_path / "long_function.py").write_text("def f():\n" + body * 60)
    (tmp_path / "long_class.py").write_text("class A:\n" + body * 310)
    (tmp_path / "parameters.py").write_text("class A:\n    def f(self, a, b, /, c, d, e, f, *, g, h, i): ...\n")
    (tmp_path / "models").mkdir()
    for index in range(17):
        (tmp_path / "models" / f"m{index}.py").write_text("")
    found = too_large(tmp_path)
    assert sorted(line.split(" ", 1)[1].split(",")[0].removeprefix("f: ").removeprefix("A: ") for line in found) == [
        "17 files in a folder",
        "311 class lines",
        "401 file lines",
        "61 function lines",
        "9 parameters",
    ]


def test_the_checker_accepts_exactly_the_maximum(tmp_path: Path) -> None:
    (tmp_path / "long_file.py").write_text("x = 1\n" * 400)
    (tmp_path / "at_most.py").write_text("def f():\n" + "    x = 1\n" * 59)
    (tmp_path / "parameters.py").write_text("class A:\n    def f(self, a, b, c, d, e, f, g, h): ...\n")
    (tmp_path / "models").mkdir()
    for name in ["__init__", *(f"m{index}" for index in range(16))]:
        (tmp_path / "models" / f"{name}.py").write_text("")
    assert too_large(tmp_path) == []


def test_the_checker_catches_names_that_say_nothing(tmp_path: Path) -> None:
    for name in NAMES_THAT_SAY_NOTHING:
        (tmp_path / f"{name}.py").write_text("")
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "database.py").write_text("")
    assert len(empty_names(tmp_path)) == 8
