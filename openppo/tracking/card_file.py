"""Model cards on disk: README.md of a model's folder, which never replaces what a person wrote."""

import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

from openppo import logger
from openppo.tracking.output_files import replacing

CARD = "README.md"
_MARK = "<!-- OpenPPO wrote this card and replaces it, unless it is edited: {} -->\n"
_MARKED = re.compile(re.escape(_MARK).replace(r"\{\}", "([0-9a-f]{16})"))
_OF_PEFT = ("library_name: peft", "# Model Card for Model ID")
"""Texts of the card that peft writes by itself, with nothing filled in."""


def write_card(folder: Path, header: dict[str, Any], text: str) -> None:
    """Write the card of the model in ``folder``: ``header`` as YAML, then Markdown.

    A README.md stays that is neither an unedited card of ours nor the empty one of peft; that is logged.
    """
    file = folder / CARD
    if file.exists() and not is_replaceable(file):
        logger.info("%s is not a card that OpenPPO wrote: it stays as it is", file)
        return
    front = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    start = f"---\n{front}---\n"
    mark = _MARK.format(_digest(start + text))
    with replacing(file) as new:
        new.write_text(start + mark + text, encoding="utf-8")


def is_replaceable(file: Path) -> bool:
    """True for a card of ours that nobody has edited, and for peft's empty card."""
    text = file.read_text(encoding="utf-8", errors="replace")
    match = _MARKED.search(text)
    if match is not None:
        return _digest(text[: match.start()] + text[match.end() :]) == match[1]
    return all(part in text for part in _OF_PEFT)


def card_header(folder: Path) -> dict[str, Any]:
    """Return the YAML header of the README.md in ``folder``; empty without one that can be read."""
    file = folder / CARD
    if not file.is_file():
        return {}
    match = re.match(
        r"---\n(.*?)^---$", file.read_text("utf-8", errors="replace"), re.DOTALL | re.MULTILINE
    )
    try:
        header = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return header if isinstance(header, dict) else {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
