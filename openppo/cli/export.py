"""Write the model of a training checkpoint in Hugging Face format."""

from functools import partial

import tyro

from openppo.cli.options import Runnable, run_command
from openppo.config import ExportConfig


def _build(config: ExportConfig) -> Runnable:
    from openppo.trainer.resume.export import Export  # heavy: after parsing

    return Export(config.model)


main = partial(run_command, ExportConfig, _build, tyro.conf.PositionalRequiredArgs)

if __name__ == "__main__":
    main()
