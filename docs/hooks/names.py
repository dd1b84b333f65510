"""Tables of other libraries' names in the pages: ``python docs/hooks/names.py`` writes them anew.

A page has the table between two comments, ``names of PAGE/SECTION`` and ``end of names``; the rows are those of
``openppo.config.foreign``.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from openppo.config import TrainPPOConfig, TrainRMConfig, TrainSFTConfig
from openppo.config.fields import declared_options
from openppo.config.foreign import NAMES, VALUES, ForeignName

DOCS = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"<!-- names of (\S+) -->\n(.*?)<!-- end of names -->\n", flags=re.DOTALL)


def written(page: str) -> str:
    """The text of a page with its tables as they should be."""
    return BLOCK.sub(lambda match: _block(match[1]), page)


def _block(section: str) -> str:
    if section == "values":
        lines = ["| option | value | here |", "| --- | --- | --- |"]
        for option, aliases in VALUES.items():
            for ours in dict.fromkeys(aliases.values()):
                theirs = ", ".join(f"`{name}`" for name, value in aliases.items() if value == ours)
                lines.append(f"| `--{option}` | {theirs} | `{ours}` |")
    else:
        lines = ["| name (default) | here (default) |", "| --- | --- |"]
        lines += map(_row, NAMES[section])
    return "\n".join([f"<!-- names of {section} -->", "", *lines, "", "<!-- end of names -->", ""])


def _row(row: ForeignName) -> str:
    names = ", ".join(
        f"`{name}`" + (f" ({default})" if default else "") for name, default in row.names.items()
    )
    note = re.sub(r"(--[a-z0-9_]+)", r"`\1`", row.note)
    if row.flags == "none":
        return f"| {names} | none: {note} |"
    ours = re.sub(r"--[^,]+?(?=, | and | or |$)", lambda flag: _flag(flag[0], row), row.flags)
    return f"| {names} | {ours}{note and ': '}{note} |"


def _flag(words: str, row: ForeignName) -> str:
    """A flag with its default, where it has no value."""
    name, _, value = words.removeprefix("--").partition(" ")
    for command in (TrainPPOConfig, TrainSFTConfig, TrainRMConfig):
        declared = declared_options(command)
        if row.is_for(declared) and not value:
            return f"`{words}`{_default(declared[name].default)}"
    return f"`{words}`"


def _default(value: object) -> str:
    if value is None or value is dataclasses.MISSING or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return " (on)" if value else " (off)"
    return f" ({' '.join(map(str, value)) if isinstance(value, tuple) else value})"


def main() -> None:
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if written(text) != text:
            page.write_text(written(text), encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
