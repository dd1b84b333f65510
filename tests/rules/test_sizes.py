"""Sizes protect the reader: nothing is larger than its limit in ``limits.py``."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules import limits
from tests.rules.test_options import COMMAND_CONFIGS, config_classes

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


def sizes(root: Path) -> Iterator[Size]:
    """The name of its limit, the place and the size of everything under ``root``."""
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
        files = [path for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"]
        yield "FILES_IN_A_FOLDER", str(folder), len(files)
    for file in sorted(root.rglob("*.py")):
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


def too_large(root: Path) -> list[str]:
    """Everything under ``root`` that is larger than its limit."""
    return [
        f"{where}: {size}, {limit} is {most}"
        for limit, where, size in sizes(root)
        if size > (most := getattr(limits, limit))
    ]


def empty_names(root: Path) -> list[str]:
    """Modules and packages whose name does not say what is in them."""
    return [
        str(path)
        for path in sorted(root.rglob("*"))
        if path.stem in NAMES_THAT_SAY_NOTHING and (path.is_dir() or path.suffix == ".py")
    ]


def test_nothing_in_the_package_exceeds_its_limit() -> None:
    assert too_large(PACKAGE) == []


def test_package_and_tests_stay_within_their_totals() -> None:
    assert python_lines(PACKAGE) <= limits.PACKAGE_LINES
    assert len(list(PACKAGE.rglob("*.py"))) <= limits.PACKAGE_FILES
    assert python_lines(REPO / "tests") <= limits.TEST_LINES


def test_no_command_has_more_options_than_the_limit() -> None:
    classes = config_classes(REPO)
    options = {name: sum(len(classes[group]) for group in classes[name].values()) for name in COMMAND_CONFIGS.values()}
    assert {name: n for name, n in options.items() if n > limits.OPTIONS} == {}


def test_names_say_what_is_inside() -> None:
    assert empty_names(PACKAGE) == []


@pytest.mark.parametrize("more", [0, 1])
def test_the_checker_accepts_exactly_the_limit(tmp_path: Path, more: int) -> None:
    def repeated(line: str, limit: int) -> str:
        return "".join(line.format(i) for i in range(limit + more))

    names = ", ".join(f"p{i}" for i in range(limits.PARAMETERS + more))
    texts = {
        "FILE_LINES": repeated("x = 1\n", limits.FILE_LINES),
        "FUNCTION_LINES": "def f():\n" + repeated("    x = 1\n", limits.FUNCTION_LINES - 1),
        "CLASS_LINES": "class A:\n" + repeated("    x = 1\n", limits.CLASS_LINES - 1),
        "PARAMETERS": f"class A:\n    def f(self, {names}): ...\n",
        "ATTRIBUTES": "class A:\n    def f(self):\n" + repeated("        self.a{} = 1\n", limits.ATTRIBUTES),
        "__init__": "",
    }
    (tmp_path / "models").mkdir()
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    for i in range(limits.FILES_IN_A_FOLDER + more):
        (tmp_path / "models" / f"m{i}.py").write_text("")
    found = {line.split(", ")[1].split(" is")[0] for line in too_large(tmp_path)}
    assert found == ({*texts, "FILES_IN_A_FOLDER"} - {"__init__"} if more else set())


def test_the_checker_catches_names_that_say_nothing(tmp_path: Path) -> None:
    for name in NAMES_THAT_SAY_NOTHING:
        (tmp_path / f"{name}.py").write_text("")
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "database.py").write_text("")
    assert len(empty_names(tmp_path)) == 8
