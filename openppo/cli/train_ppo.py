"""PPO: improve a language model against a reward."""

from functools import partial
from typing import Any

from openppo.cli.options import run_command
from openppo.config import TrainPPOConfig


def build(config: TrainPPOConfig) -> Any:
    """Make the job of this rank: on responses to prompts, or on episodes of agents that options name."""
    from openppo.build.rank import build_rank  # seconds of imports

    if config.orchestrator.tasks is not None:
        from openppo.sources.task_file import task_source

        return build_rank(config, task_source(config))
    if config.agents.form is None:
        return build_rank(config)
    from openppo.agents.build import agent_source

    return build_rank(config, agent_source(config.agents))


main = partial(run_command, TrainPPOConfig, "openppo.cli.train_ppo:build")

if __name__ == "__main__":
    main()
