"""Answer prompts with a language model: one line of JSON for each response."""

from openppo.cli.options import Runnable, run_command
from openppo.config import GenerateConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.generate``."""
    run_command(GenerateConfig, _build)


def _build(config: GenerateConfig) -> Runnable:  # heavy imports after parsing
    from openppo.trainer.evaluation.generation import GenerateJob

    return GenerateJob(config)


if __name__ == "__main__":
    main()
