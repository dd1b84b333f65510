"""Process that matches JSON texts against a pattern, line by line.

It is one because nothing but killing it ends a match that backtracks for ever, during which no other thread runs.
"""

from __future__ import annotations

import json
import re
import sys

from openppo.rewards.line_process import READY


def main() -> None:
    """Answer each line with the last match, or its group."""
    pattern = re.compile(sys.argv[1])
    sys.stdout.write(READY)
    sys.stdout.flush()
    for line in sys.stdin:
        found = None
        for match in pattern.finditer(json.loads(line)):
            found = match[pattern.groups] or ""
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
