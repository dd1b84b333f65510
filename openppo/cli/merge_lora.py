"""Write the full weights of a model that was trained with LoRA."""

from openppo.cli.options import Runnable, run_command
from openppo.config import MergeLoRAConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.merge_lora``."""
    run_command(MergeLoRAConfig, _build)


def _build(config: MergeLoRAConfig) -> Runnable:  # heavy imports after parsing
    from openppo.models.merge_lora import LoRAMerge

    return LoRAMerge(config.merge)


if __name__ == "__main__":
    main()
