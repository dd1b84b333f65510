"""Supervised fine-tuning of a causal language model."""

from openppo.cli.options import Runnable, run_command
from openppo.config import TrainSFTConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.train_sft``."""
    run_command(TrainSFTConfig, _build)


def _build(config: TrainSFTConfig) -> Runnable:  # heavy imports after parsing
    from openppo.trainer.supervised.build import build_sft_trainer

    return build_sft_trainer(config)


if __name__ == "__main__":
    main()
