"""Train a process reward model on solutions whose steps are judged one by one."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import TrainPRMConfig

main = partial(run_command, TrainPRMConfig, "openppo.build.supervised:build_supervised_trainer")

if __name__ == "__main__":
    main()
