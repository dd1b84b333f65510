"""Check of an errand: ``--advantage_estimator median`` subtracts the median of whole samples.

Three samples of one prompt earn 1, 2 and 6; the last has two segments, and one unit lies on a turn of the first.
"""

import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.tracking import Metrics
from openppo.types import (
    Completion,
    Ending,
    Episode,
    FinishReason,
    Prompt,
    Sample,
    Segment,
    SingleProcess,
)

PROMPT = Prompt("ab", token_ids=[5, 6])


def segment(token_rewards: list[float] | None = None) -> Segment:
    return Segment(
        token_ids=[5, 6, 9, 1],
        action_mask=[False, False, True, True],
        log_probs=[0.0, 0.0, -0.5, -0.5],
        versions=[-1, -1, 0, 0],
        n_prompt=2,
        finish_reason=FinishReason.STOP,
        token_rewards=token_rewards,
    )


completion = Completion([9, 1], [-0.5, -0.5], versions=[0, 0], finish_reason=FinishReason.STOP)
single = Sample.of_response(PROMPT, completion, group=0)
episode = Sample(
    PROMPT,
    group=0,
    segments=[segment(token_rewards=[0.0, 0.0, 0.0, 1.0]), segment()],
    scores={"reward": 5.0},
    episode=Episode([], Ending.COMPLETED, n_turns=2),
)
samples = [
    single.with_scores({"reward": 1.0}),
    single.with_scores({"reward": 2.0}),
    episode,
]

config = from_options(
    TrainPPOConfig,
    pretrain="none",
    reward_fn="reward.py",
    advantage_estimator="median",
    n_samples_per_prompt=3,
    init_kl_coef=0.0,
    old_log_probs="rollout",
)
maker = ExperienceMaker(
    actor=None,
    critic=None,
    reference=None,
    config=config,
    comm=SingleProcess(),
    device=torch.device("cpu"),
    pad_token_id=0,
)
rows = maker.make(samples, Metrics())
assert [row.advantages[0].tolist() for row in rows] == [
    [0.0, 0.0, -1.0, -1.0],
    [0.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 4.0, 4.0],
    [0.0, 0.0, 4.0, 4.0],
]
