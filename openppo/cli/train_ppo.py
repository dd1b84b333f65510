"""PPO: improve a language model against a reward."""

from openppo.cli.options import Runnable, run_command
from openppo.config import TrainPPOConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.train_ppo``."""
    run_command(TrainPPOConfig, _build)


def _build(config: TrainPPOConfig) -> Runnable:  # heavy imports after parsing
    from openppo.trainer.build import build_ppo_trainer

    return build_ppo_trainer(config)


if __name__ == "__main__":
    main()
