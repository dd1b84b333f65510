"""The words of a log: lines without numbers, times, paths and bars of progress."""

import re
from pathlib import Path

_NUMBER = r"(?<![A-Za-z\d])[-+]?\d+(,\d{3})*(\.\d+)*(e[-+]?\d+)?"
_BAR = re.compile(r"\d+%\||\dit/s|s/it|\?it/s")
_UNITS = re.compile(r"N (KiB|MiB|GiB)\b")
_DURATION = re.compile(r"N h N min\b|N min N s\b|N (min|s|ms)\b")
_LIBRARY = re.compile(
    r"\[\d{4}-\d\d-\d\d |\[rank\d+\]:? ?\[W|\[?W\d{4} |\[Gloo\]|(See .*)?nanobind| - (leaked|\.\.\.) "
)
"""Lines of deepspeed, torch, gloo and triton, which depend on how a process is started and on what is installed."""
_TEMPORARY = re.compile(r"(\.adapters)_\w+")
_CHECK = re.compile(r"\[openppo\] self-check( of step N|: what the first step)")
_CHECK_ENDS = re.compile(r"\[openppo\] self-check: masks|(?!\[openppo\])")
_TOKEN = re.compile(r"^(\[openppo\] +)N '.*$")
_WRAPPED = re.compile(r"(\[openppo\]|) {9,}")
_EXAMPLE = re.compile(r"such as '[^']*'")
_CONTENT = re.compile(r"^(\[openppo\]|) +(prompt|response|label|reply) .*$")


def log_words(output: str, folder: Path, package: Path) -> dict[str, list[str]]:
    """Lines of an output in two lists: ``words``, and those of the ``self-check``, which shows samples."""
    lists: dict[str, list[str]] = {"words": [], "self-check": []}
    in_check = False
    for raw in joined(output):
        line = placeholders(raw.replace(str(folder), "<folder>").replace(str(package), "<package>"))
        if in_check and _CHECK_ENDS.match(line):
            in_check = False
        in_check = in_check or bool(_CHECK.match(line))
        lists["self-check" if in_check else "words"].append(line)
    return lists


def joined(output: str) -> list[str]:
    """Lines that people read; what was wrapped at another width of a number is one line."""
    lines: list[str] = []
    in_content = False
    for line in re.split(r"[\r\n]+", output):
        if not line.strip() or _BAR.search(line) or _LIBRARY.match(line):
            continue
        in_content = bool(_CONTENT.match(line) or (in_content and _WRAPPED.match(line)))
        if in_content and not _CONTENT.match(line):
            continue
        if lines and re.match(r" +\| ", line):
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def placeholders(line: str) -> str:
    """The line with N for a number; what a sample says is left out, too."""
    line = re.sub(r"(?<![\w.<>])/[\w./+-]+", "<path>", line)
    line = re.sub(r"  +", " ", _TEMPORARY.sub(r"\1_", line)).rstrip()
    line = re.sub(_NUMBER, "N", line)
    line = _UNITS.sub("N bytes", line)
    line = _DURATION.sub("N s", line)
    line = _EXAMPLE.sub("such as '...'", line)
    line = _TOKEN.sub(r"\1N token", line)
    return _CONTENT.sub(r"\1 \2", line)
