"""The words of ``--rollout_correction``: a method, and what changes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from openppo.config.fields import NUMBER, require

RolloutCorrection = Literal["none", "tis", "mis", "icepop"]
CorrectionLevel = Literal["token", "sequence", "geometric"]

_FLAG = "--rollout_correction"
_NUMBERS = ("low", "high", "veto")


@dataclass(frozen=True)
class Correction:
    """Weights of tokens by p_actor / p_rollout.

    ``low`` and ``high`` are the ends of the range (None: those of the method), ``level`` is the unit of the ratio, and
    sequences with a token whose ratio is below ``veto`` are left out (None: none is).
    """

    method: RolloutCorrection
    low: float | None = None
    high: float | None = None
    level: CorrectionLevel = "token"
    veto: float | None = None


def parse_correction(words: Sequence[str]) -> Correction:
    """Parse ``mis low=0.5 level=sequence``; no words are ``none``. Raises ``ValueError`` for others.

    >>> parse_correction(["tis", "high=3"])
    Correction(method='tis', low=None, high=3.0, level='token', veto=None)
    """
    method, *changes = " ".join(words).split() or ["none"]
    methods = get_args(RolloutCorrection)
    require(method in methods, f"{_FLAG} begins with {_choices(methods)}, got {method!r}.")
    if method == "none" and changes:
        raise ValueError(f"{_FLAG} none corrects nothing: leave {' '.join(changes)} out.")

    levels = get_args(CorrectionLevel)
    level: CorrectionLevel = "token"
    numbers: dict[str, float] = {}
    for word in changes:
        name, _, value = word.partition("=")
        if name == "level":
            require(value in levels, f"{_FLAG} level= takes {_choices(levels)}, got {value!r}.")
            level = cast(CorrectionLevel, value)
        else:
            is_number = name in _NUMBERS and re.fullmatch(NUMBER, value) is not None
            require(
                is_number,
                f"{_FLAG} takes low=NUMBER, high=NUMBER, veto=NUMBER and level=NAME, got {word!r}.",
            )
            numbers[name] = float(value)

    correction = Correction(cast(RolloutCorrection, method), level=level, **numbers)
    _check(correction)
    return correction


def _check(correction: Correction) -> None:
    """Raise ``ValueError`` for numbers that make no range."""
    low = correction.low
    high = correction.high
    veto = correction.veto
    require(low is None or low >= 0, f"{_FLAG} low={low} must not be negative.")
    require(high is None or high > 0, f"{_FLAG} high={high} must be positive.")
    require(veto is None or 0 < veto < 1, f"{_FLAG} veto={veto} must lie in (0, 1).")
    if low is not None and high is not None:
        require(low < high, f"{_FLAG} low={low} must be below high={high}.")
    if low is not None and correction.method == "tis":
        raise ValueError(f"{_FLAG} tis cuts above only: leave low={low} out, or use mis or icepop.")


def _choices(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
