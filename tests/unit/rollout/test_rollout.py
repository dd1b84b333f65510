"""From prompts to trajectories: groups, seeds that know nothing of ranks, and every field."""

from collections.abc import Sequence

import pytest

from openppo.rollout.engine_sampler import make_trajectory, sample_trajectories
from openppo.rollout.scores import write_scores
from openppo.rollout.seeds import sample_seed
from openppo.types import Completion, FinishReason, Prompt, SamplingParams, Score, Trajectory

PARAMS = SamplingParams(max_new_tokens=6)
PROMPTS = [
    Prompt(f"text {i}", [3 + i] * (1 + i % 3), label=i, row={"input": f"text {i}"})
    for i in range(6)
]


class RecordingEngine:
    """Answers each prompt with its first token and remembers what it was asked."""

    def __init__(self, version=0):
        self.version = version
        self.prompts: list[Sequence[int]] = []
        self.seeds: list[int] = []

    def generate(self, prompts, params, seeds):
        """One token for each prompt."""
        assert params == PARAMS
        self.prompts += [prompt.token_ids for prompt in prompts]
        self.seeds += seeds
        return [
            Completion([prompt.token_ids[0]], [-0.5], [self.version], FinishReason.LENGTH)
            for prompt in prompts
        ]


def sampled(prompts, n_samples, seed=0, first_group=0, version=0):
    """Trajectories, and the engine."""
    engine = RecordingEngine(version)
    return sample_trajectories(engine, prompts, PARAMS, n_samples, seed, first_group), engine


def test_samples_of_a_prompt_are_beside_each_other_and_share_its_group_but_no_list():
    trajectories, engine = sampled(PROMPTS[:3], 2, first_group=10)
    assert [t.group for t in trajectories] == [10, 10, 11, 11, 12, 12]
    assert [t.prompt.text for t in trajectories] == [
        "text 0",
        "text 0",
        "text 1",
        "text 1",
        "text 2",
        "text 2",
    ]
    assert engine.prompts == [[3], [3], [4, 4], [4, 4], [5, 5, 5], [5, 5, 5]]
    trajectories[0].token_ids.append(99)
    trajectories[0].scores["reward"] = 1.0
    assert (PROMPTS[0].token_ids, trajectories[1].token_ids, trajectories[1].scores) == (
        [3],
        [3, 3],
        {},
    )
    assert sampled([], 3)[0] == []


def test_all_samples_of_a_run_and_of_neighbouring_runs_have_seeds_of_their_own():
    seeds = [seed for group in range(0, 600, 6) for seed in sampled(PROMPTS, 4, 42, group)[1].seeds]
    seeds += [sample_seed(seed, number) for seed in (41, 43) for number in range(2400)]
    assert len(set(seeds)) == len(seeds) == 3 * 2400
    assert all(0 <= seed < 2**63 for seed in seeds), "what torch.Generator.manual_seed takes"


@pytest.mark.parametrize("n_samples", [1, 3])
def test_seeds_do_not_depend_on_how_prompts_are_dealt_out(n_samples):
    whole = sampled(PROMPTS, n_samples, 7, 20)[1].seeds
    for size in (1, 2, 3):
        parts = [
            sampled(PROMPTS[i : i + size], n_samples, 7, 20 + i)[1]
            for i in range(0, len(PROMPTS), size)
        ]
        assert [seed for part in parts for seed in part.seeds] == whole


def test_a_trajectory_says_of_each_token_where_it_came_from():
    prompt = Prompt("ab", [11, 12], label="x", row={"input": "ab"})
    completion = Completion([13, 14, 1], [-0.1, -0.2, -0.3], [9, 9, 10], FinishReason.STOP)
    mask, log_probs, versions = (
        [False] * 2 + [True] * 3,
        [0.0, 0.0, -0.1, -0.2, -0.3],
        [-1, -1, 9, 9, 10],
    )
    tokens = [11, 12, 13, 14, 1], mask, log_probs, versions
    trajectory = make_trajectory(prompt, completion, group=4)
    assert trajectory == Trajectory(
        *tokens, FinishReason.STOP, prompt, group=4, weight=1.0, scores={}
    )
    assert trajectory.response_ids == [13, 14, 1]
    assert sampled(PROMPTS[:1], 1, version=6)[0][0].versions == [-1, 6]


def test_scores_add_up_by_name_and_those_of_tokens_by_place():
    [[sample], _] = sampled(PROMPTS[:1], 1)
    write_scores([sample], [Score({"math": 1.0})])
    write_scores([sample], [Score(token_rewards=[0.0, 0.25])])
    assert sample.total_reward({"math": 2.0}) == 2.25
    write_scores([sample], [Score(token_rewards=[1.0, 0.0], step_ends=[False, True])])
    assert (sample.token_rewards, sample.step_ends, sample.step_rewards) == (
        [0.0, 0.0],
        [False, True],
        [0.0],
    )
