"""Openings of children's stories, as prompts for a small language model trained on TinyStories.

python examples/stories.py --out DIR      writes DIR/train.jsonl and DIR/heldout.jsonl, which share no opening
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

NAMES = ["Lily", "Tom", "Ben", "Mia", "Sam", "Anna", "Max", "Sue", "Tim", "Lucy"]
ANIMALS = ["dog", "cat", "bird", "bear", "frog", "rabbit", "fish", "duck"]
OPENINGS = [
    "Once upon a time, there was a {animal} named {name}.",
    "One day, {name} saw a {animal} in the park.",
    "{name} had a little {animal}.",
    "There was a small {animal} who liked to play with {name}.",
]
N_HELDOUT = 64


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rows = [text.format(name=n, animal=a) for text, n, a in itertools.product(OPENINGS, NAMES, ANIMALS)]
    random.Random(0).shuffle(rows)
    for name, part in (("heldout", rows[:N_HELDOUT]), ("train", rows[N_HELDOUT:])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps({"input": row}) + "\n" for row in part))


if __name__ == "__main__":
    main()
