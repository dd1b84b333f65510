"""The command line of a config, to show to people."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from openppo.config.fields import Options, declared_options, flat_dict, rules_of

_ABSOLUTE = re.compile(r"(?<![\w.:/~])(?:/|~/)(?:[^\s/,:'\"]+/)*([^\s/,:'\"]+)")


def command_line(
    command: str,
    config: Options,
    n_ranks: int = 1,
    left_out: Collection[str] = (),
    resolved: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the shell command that has ``config``: options that are not at their defaults, nor ``left_out``.

    Options that the run has ``resolved`` have those values. A comment lists those that are lines of files.

    Secrets in addresses are masked, and absolute paths are cut to their last name, since they name a machine and its
    user.
    """
    words = ["openppo", command]
    if n_ranks > 1:
        launch = f"torchrun --standalone --nproc_per_node {n_ranks} -m"
        words = [*launch.split(), *words]

    values = flat_dict(config) | dict(resolved)
    declared_by_name = declared_options(type(config))
    lines = []
    for name in sorted(declared_by_name, key=lambda name: name != "pretrain"):
        declared = declared_by_name[name]
        if name in left_out or values[name] == declared.default:
            continue
        if rules_of(declared).of_files:
            lines.append(f"{name}: {_line(values[name])}")
        else:
            words += _flag(name, values[name])

    if not lines:
        return shlex.join(words)
    return f"{shlex.join([*words, '--config', 'FILE.yaml'])}  # with {', '.join(lines)}"


def without_folders(text: str) -> str:
    """Cut absolute paths in ``text`` to their last names.

    >>> without_folders("python /home/me/agent.py --data sums.jsonl")
    'python agent.py --data sums.jsonl'
    """
    return _ABSOLUTE.sub(r"\1", text)


def _flag(name: str, value: Any) -> list[str]:
    """Words of one option."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, tuple):
        return [f"--{name}", *map(_word, value)]
    return [f"--{name}", _word(value)]


def _line(value: Any) -> str:
    """The value of one option in a YAML file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_word, value))}]"
    return _word(value)


def _word(value: Any) -> str:
    plain = getattr(value, "value", value)  # of an enum
    return without_folders(str(plain))
