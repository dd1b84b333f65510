"""Supervised fine-tuning of a causal language model."""

from __future__ import annotations

from openppo.cli.options import Runnable, greet, run_command
from openppo.config import TrainSFTConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.train_sft``."""
    run_command(TrainSFTConfig, _build)


def _build(config: TrainSFTConfig) -> Runnable:  # heavy imports after parsing
    greet("train_sft")
    from openppo.trainer.startup import quiet_libraries
    from openppo.trainer.supervised.build import build_sft_trainer

    quiet_libraries()
    return build_sft_trainer(config)


if __name__ == "__main__":
    main()
