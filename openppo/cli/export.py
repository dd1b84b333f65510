"""Write the model of a training checkpoint in Hugging Face format."""

from functools import partial

import tyro

from openppo.cli.options import run_command
from openppo.config import ExportConfig

main = partial(
    run_command,
    ExportConfig,
    "openppo.jobs.export:Export",
    tyro.conf.PositionalRequiredArgs,
)

if __name__ == "__main__":
    main()
