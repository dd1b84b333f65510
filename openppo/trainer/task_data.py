"""Data of all tasks of a run."""

from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.rollout.tasks import TaskMaker
from openppo.trainer.data import PPOData, load_ppo_data
from openppo.trainer.objects import NOTHING, OwnObjects
from openppo.types import Comm


def load_tasks_data(
    tasks: TaskMaker,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    comm: Comm,
    own: OwnObjects = NOTHING,
) -> PPOData:
    """What all tasks of a run read, as ``load_ppo_data``. ``ValueError`` names the task."""
    loaded = []
    for number, task in enumerate(tasks.tasks):
        config = task.config
        if number > 0:  # documents are the run's
            config = replace(config, data=replace(config.data, pretrain_data=None))
        with task.named():
            loaded.append(
                load_ppo_data(config, tokenizer, actor_config, comm=comm, agent=task.maker, own=own)
            )
    if not tasks.are_named:
        return loaded[0]
    named = list(zip(tasks.tasks, loaded, strict=True))
    return PPOData(
        [replace(prompt, task=task.name) for task, data in named for prompt in data.prompts],
        [replace(prompt, task=task.name) for task, data in named for prompt in data.held_out],
        loaded[0].documents,
        fingerprints={
            f"{flag} of task {task.name}": value
            for task, data in named
            for flag, value in data.fingerprints.items()
        },
        longest=max(data.longest for data in loaded),
    )
