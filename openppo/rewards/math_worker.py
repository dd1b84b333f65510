"""A process that compares mathematical answers: JSON lines [label, readings] in; out true if one of the readings
equals the label, false, or null.

It is one because math-verify bounds its time by signals, which reach main threads only, and because what signals
cannot interrupt must be killed. null: the label is no mathematical expression. math-verify is an optional package.
"""

from __future__ import annotations

import json
import logging
import resource
import sys

from openppo.rewards.line_process import READY

_SECONDS = 2
_MEMORY_BYTES = 4 * 2**30


def main() -> None:
    """Say ``READY``, then answer until stdin is closed."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it logs each answer that takes too long
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stdout.write(READY)
    sys.stdout.flush()
    for line in sys.stdin:
        label, readings = json.loads(line)
        gold, same = parse(label, parsing_timeout=_SECONDS), None
        if gold:
            read = (parse(reading, parsing_timeout=_SECONDS) for reading in readings)
            same = any(verify(gold, answer, timeout_seconds=_SECONDS) for answer in read)
        sys.stdout.write(json.dumps(same) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
