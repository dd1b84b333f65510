"""First phase: checks of options, objects and models that read no data and no weights."""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.build.checks.models import check_models
from openppo.build.checks.options import check_options
from openppo.build.checks.own_algorithm import try_own_algorithm
from openppo.build.objects import OwnObjects
from openppo.config import TrainPPOConfig
from openppo.config.fields import require
from openppo.rollout.players import Players
from openppo.sources.task import Tasks
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.types import RolloutSource


@dataclass(frozen=True)
class Checked:
    """A run whose options can work, as far as that shows without data and weights.

    ``config`` names the caller's ``objects`` as given in Python, and stays as it is from here on. A run has ``tasks``,
    without prompts and scorers yet, or the ``source`` of samples of the caller.
    """

    config: TrainPPOConfig
    strategy: DeepspeedStrategy
    objects: OwnObjects
    tasks: Tasks | None
    source: RolloutSource | None
    tokenizer: PreTrainedTokenizerBase
    actor_config: PreTrainedConfig


def check_run(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    source: RolloutSource | Players | Tasks | None,
    objects: OwnObjects,
) -> Checked:
    """Check options, objects and models on all ranks; ``ValueError`` names the flag or the object at fault."""
    comm = strategy.comm
    samples = source is None or isinstance(source, Players | Tasks)
    are_tasks = isinstance(source, Tasks) and source.mixed
    config = objects.named(config, comm, samples, are_tasks=are_tasks)

    tasks: Tasks | None = None
    own_source: RolloutSource | None = None
    if source is None or isinstance(source, Players | Tasks):
        tasks = Tasks.of(config, source)
    else:
        own_source = source

    if tasks is not None and not tasks.have_agents and config.agents.form is not None:
        raise ValueError(
            f"--{config.agents.form}: pass source=agent_source(config.agents), from openppo.agents."
        )
    check_options(
        config,
        comm,
        own_source=tasks is None or are_tasks,
        own_rewards=None if tasks is None else tasks.give_rewards,
    )
    try_own_algorithm(config, comm, are_tasks=are_tasks)
    tokenizer, actor_config = check_models(config, strategy, samples, objects=objects)
    if tasks is not None:
        tasks.check(tokenizer)
    else:
        require(
            config.ppo.prompt_order == "shuffled",
            "--prompt_order: the source gives the prompts; leave it out.",
        )
    return Checked(
        config=config,
        strategy=strategy,
        objects=objects,
        tasks=tasks,
        source=own_source,
        tokenizer=tokenizer,
        actor_config=actor_config,
    )
