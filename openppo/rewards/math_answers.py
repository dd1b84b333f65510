"""Equality of answers as mathematics, judged in a process of its own: sympy may never end, or take all memory."""

import logging
import resource

from math_verify import parse, verify

_SECONDS = 2
_MEMORY_BYTES = 4 * 2**30


def is_equal(label: str, readings: list[str]) -> bool | None:
    """True if one of the readings equals the label; None for a label without mathematics."""
    logging.disable(logging.CRITICAL)  # math-verify logs each answer that takes too long
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    gold = parse(label, parsing_timeout=_SECONDS)
    if not gold:
        return None
    for reading in readings:
        answer = parse(reading, parsing_timeout=_SECONDS)
        if verify(gold, answer, timeout_seconds=_SECONDS):
            return True
    return False
