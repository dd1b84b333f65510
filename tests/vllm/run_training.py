"""``run_training.py OPTIONS``: train_ppo, with every weight partitioned under ZeRO-3, however small."""

import sys
from datetime import timedelta

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.strategy import DeepspeedStrategy
from openppo.trainer import build_ppo_trainer

PARTITION_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def main() -> None:
    """The run."""
    config = parse_options(TrainPPOConfig, sys.argv[1:])
    strategy = DeepspeedStrategy(config.deepspeed, timedelta(seconds=100), PARTITION_EVERYTHING)
    trainer = build_ppo_trainer(config, strategy)
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
