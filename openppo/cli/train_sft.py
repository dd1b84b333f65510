"""Supervised fine-tuning of a causal language model."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import TrainSFTConfig

main = partial(run_command, TrainSFTConfig, "openppo.build.supervised:build_supervised_trainer")

if __name__ == "__main__":
    main()
