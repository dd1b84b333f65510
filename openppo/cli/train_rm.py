"""Train a reward model on preference pairs."""

from openppo.cli.options import Runnable, run_command
from openppo.config import TrainRMConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.train_rm``."""
    run_command(TrainRMConfig, _build)


def _build(config: TrainRMConfig) -> Runnable:  # heavy imports after parsing
    from openppo.trainer.supervised.build import build_rm_trainer

    return build_rm_trainer(config)


if __name__ == "__main__":
    main()
