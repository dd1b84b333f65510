"""Write the full weights of a model that was trained with LoRA."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import MergeLoRAConfig

main = partial(run_command, MergeLoRAConfig, "openppo.jobs.merge_lora:MergeJob")

if __name__ == "__main__":
    main()
