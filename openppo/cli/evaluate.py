"""Evaluate a language model on held-out prompts: mean rewards and pass@k, in all and for each data source."""

from functools import partial
from typing import Any

from openppo.cli.options import run_command
from openppo.config import EvaluateConfig


def build(config: EvaluateConfig) -> Any:
    """Make an evaluation of responses to prompts, or of episodes of the agent that options name."""
    from openppo.jobs.evaluate import EvaluateJob  # seconds of imports

    if config.agents.form is None:
        return EvaluateJob(config)
    from openppo.agents.build import agent_source

    return EvaluateJob(config, agent_source(config.agents))


main = partial(run_command, EvaluateConfig, "openppo.cli.evaluate:build")

if __name__ == "__main__":
    main()
