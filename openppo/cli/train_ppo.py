"""PPO: improve a language model against a reward."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import TrainPPOConfig

main = partial(run_command, TrainPPOConfig, "openppo.trainer.build:build_ppo_trainer")

if __name__ == "__main__":
    main()
