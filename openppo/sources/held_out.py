"""Scored samples of held-out prompts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from openppo.config import TrainPPOConfig
from openppo.datasets import shard
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.rewards import Scorer
from openppo.rollout.rollout import wait_for_scores
from openppo.rollout.sampling import sampling_params
from openppo.rollout.seeds import sample_seed
from openppo.sources.groups import GroupInput
from openppo.sources.rank_sampler import RankSampler
from openppo.sources.task import Task
from openppo.tracking import Metrics
from openppo.types import Prompt, Sample, SamplingParams, StopCheck


def held_out_group(
    prompt: Prompt,
    number: int,
    params: SamplingParams,
    n_samples: int,
    seed: int,
    eval_seed: int = 0,
) -> GroupInput:
    """Return the input of the group of a held-out prompt; ``number`` is its place among all of them.

    It has one attempt: another one would inflate pass@k.
    """
    first = number * n_samples
    return GroupInput(
        number=number,
        prompt=prompt,
        params=params,
        seeds=[sample_seed(seed, first + place) for place in range(n_samples)],
        env_seed=eval_seed + number,
    )


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts of all tasks, sampled with the weights that ``save`` writes.

    ``scorer`` scores them; if it is an evaluation's own, ``replaces_rewards`` that agents gave. ``weights_to_save``
    opens a context in which the actor has those weights.
    """

    config: TrainPPOConfig
    tasks: Sequence[Task]
    sampler: RankSampler
    stop: StopCheck
    weights_to_save: Callable[[], AbstractContextManager[None]]
    scorer: Scorer | None = None
    replaces_rewards: bool = False

    def evaluate(self) -> Sequence[Sample]:
        """Return scored samples, those of one prompt beside each other; none without prompts. Collective."""
        groups = self._groups()
        if not groups:
            return []

        comm = self.sampler.comm
        metrics = Metrics()  # those of training's episodes
        with self.weights_to_save(), self.sampler.with_weights():
            played = self.sampler.play(shard(groups, comm.rank, comm.world_size), metrics)

        samples = [sample for group in played for sample in group.members]
        if self.replaces_rewards:
            samples = [sample.with_scores({}) for sample in samples]
        rollout = begin_scoring(self.scorer, samples, self.stop, prefix="eval_")
        wait_for_scores(rollout, self.stop)
        check_rewarded(rollout, comm)
        return rollout

    def _groups(self) -> list[GroupInput]:
        """Groups of all ranks, task after task."""
        options = self.config.evaluation
        groups: list[GroupInput] = []
        for task in self.tasks:
            params = sampling_params(task.config.generation, options.eval_temperature)
            for number, prompt in enumerate(task.held_out, len(groups)):
                group = held_out_group(
                    prompt,
                    number,
                    params=params,
                    n_samples=options.eval_n_samples_per_prompt,
                    seed=self.config.deepspeed.seed,
                    eval_seed=task.config.agents.eval_seed,
                )
                groups.append(group)
        return groups
