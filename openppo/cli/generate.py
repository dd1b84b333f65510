"""Answer prompts with a language model: one line of JSON for each response."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import GenerateConfig

main = partial(run_command, GenerateConfig, "openppo.jobs.generate:GenerateJob")

if __name__ == "__main__":
    main()
