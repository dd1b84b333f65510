"""Print the size of the package beside that at the commit where the work under way started. It bounds nothing.

python -m tests.rules.totals [COMMIT]
"""

import io
import os
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
START = "12e90e709a035c36ef3d50c91fc7ebeefc657fbd"
"""The commit before issue 48: the last one before the package was unpacked."""
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
OPTIONS = """
import re
from pathlib import Path
import openppo.config
from openppo.__main__ import commands
from openppo.config import TrainPPOConfig
from openppo.config.fields import declared_options, rules_of
names = set()
for command in commands():
    text = (Path("openppo/cli") / f"{command}.py").read_text("utf-8")
    config = re.findall(r"^from openppo.config import (\\w+)", text, re.MULTILINE)[0]
    names |= set(declared_options(vars(openppo.config)[config]))
of_ppo = declared_options(TrainPPOConfig).values()
flags = [option for option in of_ppo if not getattr(rules_of(option), "of_files", False)]
print(len(names), len(flags))
"""
"""Prints the number of options of all commands, and of those of train_ppo that are flags."""


def totals(folder: Path) -> dict[str, int | None]:
    """Sizes of the package in a folder; ``None`` for the options if its commands do not tell them in this way."""
    texts = [file.read_text("utf-8") for file in sorted((folder / "openppo").rglob("*.py"))]
    codes = [code(text) for text in texts]
    options, flags = n_options(folder)
    return {
        "tokens": sum(n_tokens for n_tokens, _ in codes),
        "code lines": sum(n_lines for _, n_lines in codes),
        "lines": sum(text.count("\n") for text in texts),
        "files": len(texts),
        "options": options,
        "flags of train_ppo": flags,
    }


def code(text: str) -> tuple[int, int]:
    """Tokens and lines of a file without comments, docstrings and blank lines."""
    statements: list[list[tokenize.TokenInfo]] = [[]]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            statements.append([])
        elif token.type not in LAYOUT and token.type != tokenize.COMMENT:
            statements[-1].append(token)
    tokens = [token for several in statements if not is_text(several) for token in several]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(tokens), len(lines)


def is_text(statement: list[tokenize.TokenInfo]) -> bool:
    """Whether a statement is a docstring, or one of the strings below names that say what these are."""
    return len(statement) == 1 and statement[0].type == tokenize.STRING


def n_options(folder: Path) -> tuple[int | None, int | None]:
    """How many options all commands have together, each name once, and how many flags train_ppo has."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", OPTIONS]
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if answer.returncode != 0:
        return None, None
    options, flags = map(int, answer.stdout.split())
    return options, flags


def totals_at(commit: str) -> dict[str, int | None]:
    """Sizes of the package at a commit. Raises ``ValueError`` if this clone does not have it."""
    archive = subprocess.run(["git", "archive", commit, "openppo"], cwd=REPO, capture_output=True)
    if archive.returncode != 0:
        raise ValueError(archive.stderr.decode("utf-8", "replace").strip().splitlines()[0])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return totals(Path(folder))


def table(now: dict[str, int | None], before: dict[str, int | None] | None, commit: str) -> str:
    """One line a size, with what it was."""
    head = f"{'openppo/':<20}{'now':>10}"
    if before is not None:
        head += f"{f'at {commit[:8]}':>14}{'change':>10}"
    rows = [head]
    for name, size in now.items():
        row = f"{name:<20}{shown(size):>10}"
        if before is not None:
            row += f"{shown(before[name]):>14}{change(size, before[name]):>10}"
        rows.append(row)
    return "\n".join(rows)


def shown(size: int | None) -> str:
    """A size for people."""
    return "unknown" if size is None else f"{size:,}"


def change(now: int | None, before: int | None) -> str:
    """By how much a size has changed."""
    return "" if now is None or not before else f"{now / before - 1:+.1%}"


def main() -> None:
    """Print both columns, or today's alone with the reason."""
    commit = sys.argv[1] if len(sys.argv) > 1 else START
    before = None
    try:
        before = totals_at(commit)
    except (OSError, ValueError) as error:
        print(f"totals at {commit[:8]} are not shown: {error}")
    print(table(totals(REPO), before, commit))


if __name__ == "__main__":
    main()
