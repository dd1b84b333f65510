"""Evaluate a language model on held-out prompts: mean rewards and pass@k, in all and for each data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from openppo.cli.options import Runnable, run_command
from openppo.config import EvaluateConfig

if TYPE_CHECKING:
    from openppo.trainer.evaluation.generation import EvaluateJob


def main() -> None:
    """Entry point of ``python -m openppo.cli.evaluate``."""
    run_command(EvaluateConfig, _build)


def _build(config: EvaluateConfig) -> Runnable:  # heavy imports after parsing
    from openppo.trainer.evaluation.generation import EvaluateJob

    return _Printing(EvaluateJob(config))


class _Printing:
    """Runs the job and prints its table on rank 0."""

    def __init__(self, job: EvaluateJob) -> None:
        self.job = job

    def fit(self) -> None:
        metrics = self.job.evaluate().metrics
        if self.job.strategy.is_main:
            print(table(metrics, self.job.sources))

    def close(self) -> None:
        self.job.close()


def table(metrics: Mapping[str, float], sources: Sequence[str]) -> str:
    """One line for each metric, one column for all prompts and, if there are several, for each of their ``sources``.

    ``sources`` has the short name of each prompt's source; ``metrics`` are named as ``Evaluator`` names them.
    """
    columns = {"all": (len(sources), "eval_")}
    if len(set(sources)) > 1:
        columns |= {source: (sources.count(source), f"eval/{source}/") for source in sorted(set(sources))}
    names = [name.removeprefix("eval_") for name in metrics if name.startswith("eval_")]
    first = max(map(len, [*names, "prompts"]))
    widths = {column: max(len(column), 10) for column in columns}
    lines = [
        f"{'':<{first}}" + "".join(f"  {column:>{widths[column]}}" for column in columns),
        f"{'prompts':<{first}}" + "".join(f"  {count:>{widths[c]}}" for c, (count, _) in columns.items()),
    ]
    for name in names:
        cells = [(widths[c], metrics.get(prefix + name)) for c, (_, prefix) in columns.items()]
        numbers = [f"  {'-' if value is None else f'{value:.4f}':>{width}}" for width, value in cells]
        lines.append(f"{name:<{first}}{''.join(numbers)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
