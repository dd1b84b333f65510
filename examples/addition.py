"""Sums of two-digit numbers, a task that a small chat model is bad at and learns in minutes.

    python examples/addition.py make --out DIR
    python examples/addition.py table --heldout DIR/heldout.jsonl --before FILE NAME=FILE ...

``make`` writes DIR/train.jsonl and DIR/heldout.jsonl, which share no question. ``reward_fn`` is the reward of training.
``table`` compares files of ``openppo generate`` with the responses of the untouched and of trained models.
"""

import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path

N_HELDOUT = 200
N_SHOWN = 3
NUMBERS = range(10, 100)


def reward_fn(response: str, label: str) -> float:
    """Return 1 if the last number of the response is the sum, else 0."""
    return float(re.findall(r"\d+", response)[-1:] == [label])


def make(out: Path) -> None:
    """Write train.jsonl and heldout.jsonl."""
    rows = []
    for a in NUMBERS:
        for b in NUMBERS:
            question = f"What is {a} + {b}? Answer with the number only."
            rows.append({"input": question, "label": str(a + b)})
    random.Random(0).shuffle(rows)

    out.mkdir(parents=True, exist_ok=True)
    parts = {"heldout": rows[:N_HELDOUT], "train": rows[N_HELDOUT:]}
    for name, part in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half of the 95 % interval of a mean, by the normal approximation."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, 1.96 * math.sqrt(variance / len(values))


def table(heldout: Path, before: Path, trained: dict[str, Path]) -> str:
    """Compare the right answers of trained models with those of the untouched model, question by question."""
    questions = _rows(heldout)
    labels = [row["label"] for row in questions]
    responses = {"before training": _responses(before)}
    responses |= {name: _responses(file) for name, file in trained.items()}
    scores = {name: _scores(answers, labels) for name, answers in responses.items()}
    untouched = scores["before training"]

    lines = [f"{len(labels)} held-out sums, greedy", ""]
    lines.append(f"{'':<24}{'right, %':>16}{'gain, points':>18}")
    for name, of_model in scores.items():
        line = f"{name:<24}{_percent(of_model):>16}"
        if name in trained:
            gains = [new - old for new, old in zip(of_model, untouched, strict=True)]
            line += f"{_percent(gains, sign='+'):>18}"
        lines.append(line)
    lines.append("")
    lines.append("+- half of the 95 % interval over questions; the gain is of the same questions")

    for i, question in enumerate(questions[:N_SHOWN]):
        lines += ["", question["input"]]
        for name, answers in responses.items():
            verdict = "right" if scores[name][i] else "wrong"
            lines.append(f"    {name:<20}{verdict}   {' '.join(answers[i].split())}")
    return "\n".join(lines)


def _responses(file: Path) -> list[str]:
    return [row["response"] for row in _rows(file)]


def _scores(responses: Sequence[str], labels: Sequence[str]) -> list[float]:
    return [reward_fn(response, label) for response, label in zip(responses, labels, strict=True)]


def _percent(values: Sequence[float], sign: str = "") -> str:
    mean, half = interval(values)
    return f"{100 * mean:{sign}.1f} +- {100 * half:.1f}"


def _rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Parse the command line; make the data or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("table")
    comparing.add_argument("--heldout", type=Path, required=True)
    comparing.add_argument("--before", type=Path, required=True)
    comparing.add_argument("trained", nargs="+", metavar="NAME=FILE")
    arguments = parser.parse_args()

    if arguments.command == "make":
        make(arguments.out)
        return
    trained = {}
    for pair in arguments.trained:
        name, _, file = pair.partition("=")
        trained[name] = Path(file)
    print(table(arguments.heldout, arguments.before, trained))


if __name__ == "__main__":
    main()
