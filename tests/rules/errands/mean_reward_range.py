"""Check of an errand: ``--dynamic_sampling`` keeps groups whose mean reward lies in a range.

Groups 0 to 4 of two samples each earn 0, 0.25, 0.5, 0.75 and 1 on average; those from 0.2 to 0.6 are kept, in the loop
of synchronous runs and where asynchronous ones drop groups.
"""

import asyncio

from openppo.config import TrainPPOConfig, from_options
from openppo.rollout.rollout import Rollout
from openppo.sources.dynamic_sampling import UsefulSamples
from openppo.sources.groups import PlayedGroup
from openppo.sources.outcomes import OutcomePlayer
from openppo.sources.schedule import Start
from openppo.sources.task import Task
from openppo.tracking import Metrics
from openppo.types import Completion, FinishReason, Prompt, Sample, SingleProcess

MEANS = [0.0, 0.25, 0.5, 0.75, 1.0]

config = from_options(
    TrainPPOConfig,
    pretrain="none",
    reward_fn="reward.py",
    advantage_estimator="rloo",
    n_samples_per_prompt=2,
    dynamic_sampling=10,
    dynamic_sampling_range=(0.2, 0.6),
)
prompts = [Prompt(str(group), token_ids=[5, 6]) for group in range(len(MEANS))]
task = Task("", config, prompts=prompts)
completion = Completion([9], [-0.5], versions=[0], finish_reason=FinishReason.STOP)
samples = [
    Sample.of_response(prompts[group], completion, group=group).with_scores({"reward": mean})
    for group, mean in enumerate(MEANS)
    for _ in range(2)
]

useful = UsefulSamples(task, wanted=4, comm=SingleProcess())
assert useful.add(Rollout(samples, Metrics())) == 3
assert [sample.group for sample in useful.rollout(n_shown=0)] == [1, 1, 2, 2]


class Rewarding:
    """Stands for players that reward their samples."""

    async def play(self, groups):
        number = groups[0].number
        members = [sample for sample in samples if sample.group == number]
        return [PlayedGroup(number, members)]


outcomes = OutcomePlayer({"": task}, Rewarding(), parts=None, scorer=None)
kept = [
    len(asyncio.run(outcomes.play(Start(number=group, index=group))).samples)
    for group in range(len(MEANS))
]
assert kept == [0, 2, 2, 0, 0]
