"""Train a reward model on preference pairs."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import TrainRMConfig

main = partial(run_command, TrainRMConfig, "openppo.build.supervised:build_supervised_trainer")

if __name__ == "__main__":
    main()
