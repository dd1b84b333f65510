"""Evaluate a language model on held-out prompts: mean rewards and pass@k, in all and for each data source."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import EvaluateConfig

main = partial(run_command, EvaluateConfig, "openppo.trainer.evaluation.generation:EvaluateJob")

if __name__ == "__main__":
    main()
