"""A search stub over a small text: copy it, and put your own index where ``PASSAGES`` is.

    python -m openppo.cli.train_ppo --tools examples/tools/search.py ...

``OPENPPO_SEARCH_FILE`` names another text, of passages with an empty line between them.
"""

import os
import re
from collections import Counter
from pathlib import Path

from openppo.agents.tools import tool

FILE = Path(os.environ.get("OPENPPO_SEARCH_FILE", Path(__file__).with_name("passages.txt")))
PASSAGES = [
    passage.strip()
    for passage in re.split(r"\n\s*\n", FILE.read_text(encoding="utf-8"))
    if passage.strip()
]


@tool
def search(query: str, n: int = 3) -> str:
    """Search a collection of passages and return the best of them.

    Args:
        query: A few words.
        n: How many passages, at most 10.
    """
    wanted = words(query)
    shares = [
        (sum((wanted & words(passage)).values()), -i, passage) for i, passage in enumerate(PASSAGES)
    ]
    found = [
        passage for share, _, passage in sorted(shares, reverse=True)[: min(n, 10)] if share > 0
    ]
    return (
        "\n\n".join(f"[{i}] {passage}" for i, passage in enumerate(found, start=1))
        or "Nothing was found."
    )


def words(text: str) -> Counter[str]:
    """The words of a text, each once."""
    return Counter(set(re.findall(r"\w+", text.lower())))
