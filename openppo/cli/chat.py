"""Talk with a trained model in the terminal, or continue texts with a model that knows no chat."""

from functools import partial

import tyro

from openppo.cli.options import run_command
from openppo.config import ChatConfig

main = partial(
    run_command,
    ChatConfig,
    "openppo.jobs.chat:ChatJob",
    tyro.conf.PositionalRequiredArgs,
)

if __name__ == "__main__":
    main()
