"""Docstrings whose first line does not say at once what is there.

python -m tests.rules.docstrings               print every such docstring in openppo/ with its line
python -m tests.rules.docstrings openppo/cli   of these folders and files only
"""

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
FIRST_WORDS = ("What", "Whether", "Of", "Where", "That")
"""Words that no docstring begins with: they announce a clause, and the noun or verb comes late or never."""
MOST_WORDS = 20
"""Words of a first line, which ends with the first line break."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)


class Docstring(NamedTuple):
    """A docstring with the line on which it stands."""

    line: int
    text: str


def docstrings(source: str) -> Iterator[Docstring]:
    """Yield the docstrings of the module, its classes and functions, and those below assignments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and node.body:
            yield from text_alone(node.body[0])
        for block in blocks(node):
            for statement, following in pairwise(block):
                if isinstance(statement, ASSIGNMENTS):
                    yield from text_alone(following)


def text_alone(statement: ast.stmt) -> Iterator[Docstring]:
    """Yield the text of a statement that is nothing but a text."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            yield Docstring(statement.lineno, inspect.cleandoc(text))


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a node: its body, ``else`` and ``finally``."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value


def fault(text: str) -> str:
    """Say what is wrong with the first line of a docstring; empty if nothing is."""
    line = text.partition("\n")[0]
    first = re.match(r"\w*", line)
    if first and first[0] in FIRST_WORDS:
        return f"begins with {first[0]}; begin with a verb, or with the noun that is there"
    n = len(line.split())
    if n > MOST_WORDS:
        return f"{n} words in the first line, more than {MOST_WORDS}; end it after its main thought"
    return ""


def faults(source: str, file: str) -> list[str]:
    """List the faulty docstrings of a file, each as ``file:line: fault``."""
    texts = sorted(docstrings(source))
    return [f"{file}:{line}: {fault(text)}" for line, text in texts if fault(text)]


def package_faults() -> list[str]:
    """List the faulty docstrings in ``openppo/``."""
    files = sorted((REPO / "openppo").rglob("*.py"))
    places = []
    for file in files:
        places += faults(file.read_text("utf-8"), file.relative_to(REPO).as_posix())
    return places


def main() -> None:
    """Print the faulty docstrings and their number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=["openppo/"], help="beginnings of file names")
    starts = tuple(parser.parse_args().paths)

    places = [place for place in package_faults() if place.startswith(starts)]
    print("\n".join([*places, f"{len(places)} docstrings"]))


if __name__ == "__main__":
    main()
