"""A process that compares mathematical answers: JSON lines [label, response] in, true, false or null out.

It is one because math-verify bounds its time by signals, which reach main threads only, and because what signals
cannot interrupt must be killed. null: the label is no mathematical expression. math-verify is an optional package.
"""

from __future__ import annotations

import json
import logging
import resource
import sys

READY = "ready\n"
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
        label, response = json.loads(line)
        gold = parse(label, parsing_timeout=_SECONDS)
        same = verify(gold, parse(response, parsing_timeout=_SECONDS), timeout_seconds=_SECONDS) if gold else None
        sys.stdout.write(json.dumps(same) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
