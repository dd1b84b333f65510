"""Train a process reward model on solutions whose steps are judged one by one."""

from openppo.cli.options import Runnable, run_command
from openppo.config import TrainPRMConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.train_prm``."""
    run_command(TrainPRMConfig, _build)


def _build(config: TrainPRMConfig) -> Runnable:  # heavy imports after parsing
    from openppo.trainer.supervised.build import build_prm_trainer

    return build_prm_trainer(config)


if __name__ == "__main__":
    main()
