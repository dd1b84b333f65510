"""Names of other libraries on a command line: unknown flags are answered, aliases of values become ours."""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openppo.config.foreign import VALUES, VERL_SECTIONS, answer_by_meaning, our_value, reading_of

_OVERRIDE = re.compile(rf"[+~]*((?:{'|'.join(sorted(VERL_SECTIONS))})\.[\w.]+)=.*", flags=re.DOTALL)
"""A word such as trainer.nnodes=1, with which hydra changes the configuration of verl."""


def remedy_for(name: str, known: Iterable[str], dashes: str = "") -> str:
    """Say what an unknown name means here, else which known one is spelled like it."""
    answer = answer_by_meaning(name, set(known))
    if answer is not None:
        return answer
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {dashes}{near[0]}?" if near else "see --help all for every option."


def first_key(name: Any, value: Any) -> str:
    """Return the dotted name of the first value in sections of a YAML file."""
    while isinstance(value, dict) and value:
        key = next(iter(value))
        name = f"{name}.{key}"
        value = value[key]
    return str(name)


def refuse_overrides(words: Iterable[str], known: Mapping[str, dataclasses.Field]) -> None:
    """Raise ``ValueError`` for a word such as ``trainer.nnodes=1`` that is no value of a flag."""
    n_values = 0.0  # that the last flag may still take
    for word in words:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            n_values = 0 if equals else _n_values(flag, known)
            continue

        match = _OVERRIDE.fullmatch(word)
        if match is not None and n_values < 1:
            raise ValueError(f"{word}: {remedy_for(match[1], known, '--')}")
        n_values -= 1


def _n_values(flag: str, known: Mapping[str, dataclasses.Field]) -> float:
    """Return the largest number of values of a flag."""
    declared = known.get(flag.removeprefix("--").replace("-", "_"))
    kind = "bool" if declared is None else str(declared.type)
    if kind.startswith("tuple"):
        return math.inf
    return 0 if kind == "bool" else 1


def with_our_values(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace aliases of values by ours; return the words, and a notice about each alias that counts."""
    replaced: list[str] = []
    notices: dict[str, str] = {}
    option = ""  # whose value comes next
    for word in words:
        name = option
        start, value = "", word
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            option = "" if equals else name
            start = f"{flag}="
            if not equals:
                replaced.append(word)
                continue
        else:
            option = ""

        ours = our_value(name, value)
        if name in VALUES:
            notices.pop(name, None)  # the last value of a flag counts
        if ours != value:
            notices[name] = reading_of(name, value)
        replaced.append(f"{start}{ours}")
    return replaced, list(notices.values())
