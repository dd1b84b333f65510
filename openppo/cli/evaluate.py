"""Evaluate a language model on held-out prompts: mean rewards and pass@k, in all and for each data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from openppo.cli.options import Runnable, run_command
from openppo.config import EvaluateConfig

if TYPE_CHECKING:
    from openppo.trainer.evaluation.generation import EvaluateJob


class _Printing:
    """Runs the job and prints its table on rank 0."""

    def __init__(self, job: EvaluateJob) -> None:
        self.job, self.close = job, job.close

    def fit(self) -> None:
        metrics = self.job.evaluate()
        if self.job.strategy.is_main:
            print(table(metrics, self.job.sources))


def _build(config: EvaluateConfig) -> Runnable:
    from openppo.trainer.evaluation.generation import EvaluateJob  # heavy: after parsing

    return _Printing(EvaluateJob(config))


def table(metrics: Mapping[str, float], sources: Sequence[str]) -> str:
    """One line for each metric, one column for all prompts and, if there are several, for each of their ``sources``.

    ``sources`` has the short name of each prompt's source; ``metrics`` are named as ``Grading`` names them.
    """
    several = sorted(set(sources)) if len(set(sources)) > 1 else []
    prefixes = {"all": "eval_"} | {source: f"eval/{source}/" for source in several}
    names = [name.removeprefix("eval_") for name in metrics if name.startswith("eval_")]
    counts = [str(len(sources)), *(str(sources.count(source)) for source in several)]
    rows = [["", *prefixes], ["prompts", *counts]]
    for name in names:
        values = [metrics.get(prefix + name) for prefix in prefixes.values()]
        rows.append([name, *("-" if value is None else f"{value:.4f}" for value in values)])
    first = max(len(row[0]) for row in rows)
    widths = [max(len(column), 10) for column in prefixes]
    lines = [[f"  {cell:>{width}}" for cell, width in zip(row[1:], widths, strict=True)] for row in rows]
    return "\n".join(f"{row[0]:<{first}}{''.join(line)}" for row, line in zip(rows, lines, strict=True))


main = partial(run_command, EvaluateConfig, _build)

if __name__ == "__main__":
    main()
