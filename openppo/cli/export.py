"""Write the model of a training checkpoint in Hugging Face format."""

import tyro

from openppo.cli.options import Runnable, run_command
from openppo.config import ExportConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.export``."""
    run_command(ExportConfig, _build, tyro.conf.PositionalRequiredArgs)


def _build(config: ExportConfig) -> Runnable:  # heavy imports after parsing
    from openppo.trainer.resume.export import Export

    return Export(config.model)


if __name__ == "__main__":
    main()
