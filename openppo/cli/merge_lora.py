"""Write the full weights of a model that was trained with LoRA."""

from functools import partial

from openppo.cli.options import Runnable, run_command
from openppo.config import MergeLoRAConfig


def _build(config: MergeLoRAConfig) -> Runnable:
    from openppo.models.merge_lora import LoRAMerge  # heavy: after parsing

    return LoRAMerge(config.merge)


main = partial(run_command, MergeLoRAConfig, _build)

if __name__ == "__main__":
    main()
