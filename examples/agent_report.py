"""The table at the end of examples/scripts/agent.sh: what training changed, from the logs of its two runs.

    python examples/agent_report.py --run DIR

Evaluations are of episodes sampled at temperature 1, as in training. An interval is Wilson's, of 95 %.
"""

import argparse
import json
from math import sqrt
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]
AGENTS = {"program": "sums, by a program with a tool", "game": "a game that is a tool"}
SHOWN = {"user": "user", "assistant": "model", "tool": "tool"}


def rows(file: Path) -> list[Row]:
    """Read JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def interval(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share of ``n`` episodes."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def in_percent(share: float, n: int) -> str:
    """Write a share with its interval."""
    low, high = interval(share, n)
    return f"{100 * share:5.1f} ({100 * low:.0f} to {100 * high:.0f})"


def said(message: Row) -> str:
    """Return the text of a message, or the calls in it."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message["content"] or " ".join(f"{call['name']}({call['arguments']})" for call in calls)


def count_episodes(logs: Path) -> int:
    """Return the number of episodes in an evaluation."""
    config = yaml.safe_load((logs / "config.yaml").read_text())
    n = len(rows(Path(config["eval_data"])))
    return min(n, config["max_samples"] or n) * int(config["eval_n_samples_per_prompt"])


def last_episode(logs: Path) -> list[Row]:
    """Return the messages of an episode of the last evaluation."""
    evaluated = [row for row in rows(logs / "samples.jsonl") if row.get("evaluation")]
    last: list[Row] = evaluated[-1]["messages"]
    return last


def main() -> None:
    """Print the table and keep it as report.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of agent.sh")
    run = parser.parse_args().run

    report = {}
    print(f"\n{'right, % (95 % interval)':<34}{'episodes':>8}{'before':>20}{'after':>20}")
    for name, title in AGENTS.items():
        logs = run / name / "logs"
        evaluations = [row for row in rows(logs / "metrics.jsonl") if "eval_pass@1" in row]
        n = count_episodes(logs)
        before = evaluations[0]["eval_pass@1"]
        after = evaluations[-1]["eval_pass@1"]
        report[name] = {
            "episodes": n,
            "before": {"share": before, "interval": interval(before, n)},
            "after": {"share": after, "interval": interval(after, n)},
        }
        print(f"{title:<34}{n:>8}{in_percent(before, n):>20}{in_percent(after, n):>20}")

    for name, title in AGENTS.items():
        print(f"\n{title}, after training:")
        for message in last_episode(run / name / "logs"):
            if message["role"] in SHOWN:
                print(f"  {SHOWN[message['role']]:<7}{said(message)}")

    print(f"\nmodel   {run}/model   (what both agents began with)")
    for name, title in AGENTS.items():
        print(f"report  {run / name}/logs/report.html   ({title}; open it in a browser)")
    (run / "report.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
