"""Data of all tasks of a run."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.rollout.tasks import TaskPlayers
from openppo.trainer.data import PPOData, load_ppo_data
from openppo.trainer.objects import NOTHING, OwnObjects
from openppo.types import Comm


def load_tasks_data(
    tasks: TaskPlayers,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    comm: Comm,
    objects: OwnObjects = NOTHING,
) -> PPOData:
    """Load the data of all tasks of a run; ``ValueError`` names the task."""
    data_by_task = []
    for number, task in enumerate(tasks.tasks):
        config = task.config
        if number > 0:  # the documents of all are loaded with the first task
            config = replace(config, data=replace(config.data, pretrain_data=None))
        with task.named():
            data = load_ppo_data(
                config, tokenizer, actor_config, comm=comm, agent=task.players, objects=objects
            )
        data_by_task.append(data)

    if not tasks.are_named:
        return data_by_task[0]
    return _joined([task.name for task in tasks.tasks], data_by_task)


def _joined(names: Sequence[str], data_by_task: Sequence[PPOData]) -> PPOData:
    """Join the data of tasks with these ``names``, which prompts and fingerprints then carry."""
    prompts = []
    held_out = []
    fingerprints = {}
    for name, data in zip(names, data_by_task, strict=True):
        prompts += [replace(prompt, task=name) for prompt in data.prompts]
        held_out += [replace(prompt, task=name) for prompt in data.held_out]
        for flag, fingerprint in data.fingerprints.items():
            fingerprints[f"{flag} of task {name}"] = fingerprint
    return PPOData(
        prompts,
        held_out,
        data_by_task[0].documents,
        fingerprints=fingerprints,
        longest=max(data.longest for data in data_by_task),
    )
