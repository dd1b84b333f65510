"""Groups are sampled as a synchronous run samples them, and scored."""

import asyncio
import dataclasses
import json
import threading

import pytest

from openppo.datasets import BatchSampler, shuffled
from openppo.experience.estimators import ESTIMATORS
from openppo.orchestrator.groups import ATTEMPTS, GroupPlayer
from openppo.orchestrator.schedule import Start
from openppo.rollout.kept import as_json, from_json
from openppo.rollout.seeds import sample_seed
from openppo.types import Ending, Episode, FinishReason, Prompt, Score, SingleProcess, Trajectory
from tests.unit.orchestrator.conftest import PROMPTS


class Scorer:
    """The reward is the number of the prompt; ``batches`` are what it was given at a time."""

    collective = False

    def __init__(self):
        self.batches, self.gate, self.threads = [], threading.Event(), set()
        self.gate.set()

    def score(self, trajectories):
        self.threads.add(threading.get_ident())
        self.batches.append(sorted({t.group for t in trajectories}))
        assert self.gate.wait(10)
        return [Score({"reward": float(t.prompt.index)}) for t in trajectories]


def played(player, *numbers):
    async def work():
        return await asyncio.gather(*(player.play(Start(number, number)) for number in numbers))

    return player.sampler.driver.drive(work())


def test_groups_take_prompts_in_the_order_of_the_option(plan, tmp_path):
    (tmp_path / "order.py").write_text("def back(prompts, episode):\n    return range(7, -1, -1)\n")
    for option, rows in (("given", range(8)), (f"{tmp_path}/order.py:back", range(7, -1, -1))):
        ordered = dataclasses.replace(plan, prompt_order=option)
        assert [ordered.prompt(number).index for number in range(16)] == [*rows, *rows]


def test_prompts_and_seeds_are_those_of_a_synchronous_run(plan, sampler):
    batches = BatchSampler(8, 4, shuffled(8, seed=42)).batches
    order = [i for epoch in (0, 1) for batch in batches(epoch) for i in batch]
    assert [plan.prompt(number).index for number in range(16)] == order
    played(GroupPlayer({"": plan}, sampler, None), 5)
    assert [(group, seed) for group, seed, _ in sampler.asked] == [
        (5, sample_seed(42, 15 + i)) for i in range(3)
    ]
    assert {env for *_, env in sampler.asked} == {sample_seed(42, 5) % 2**31}, (
        "one environment for a group"
    )


def test_failed_samples_are_replaced_with_other_seeds(plan, sampler):
    first = {sample_seed(42, 3 * 2 + i) for i in range(3)}
    sampler.failing = lambda group, seed: seed in first
    (outcome,) = played(GroupPlayer({"": plan}, sampler, None), 2)
    assert len(outcome.trajectories) == 3
    assert len({seed for _, seed, _ in sampler.asked}) == 6
    assert outcome.metrics.reduced(SingleProcess())["sampled"] == 3


def test_a_group_goes_on_with_two_survivors_and_fails_with_one(plan, sampler):
    lost = sample_seed(42, 0)
    seeds = {lost, *(sample_seed(lost, attempt) for attempt in range(1, ATTEMPTS))}
    sampler.failing = lambda group, seed: group == 1 or seed in seeds
    two, none = played(GroupPlayer({"": plan}, sampler, None), 0, 1)
    assert len(two.trajectories) == 2
    assert none.trajectories is None
    assert none.error.startswith("no answer to prompt")
    assert sum(group == 1 for group, *_ in sampler.asked) == 3 * ATTEMPTS


def test_groups_that_wait_are_scored_together_on_one_thread(plan, sampler):
    scorer = Scorer()
    player = GroupPlayer({"": plan}, sampler, scorer)
    scorer.gate.clear()
    sampler.wait = lambda group: 0.0 if group == 0 else 0.05

    async def work():
        groups = [asyncio.ensure_future(player.play(Start(number, number))) for number in range(4)]
        await asyncio.sleep(0.3)
        scorer.gate.set()
        return await asyncio.gather(*groups)

    outcomes = sampler.driver.drive(work())
    assert scorer.batches == [[0], [1, 2, 3]]
    for outcome in outcomes:
        assert [t.scores for t in outcome.trajectories] == [
            {"reward": float(plan.prompt(outcome.number).index)}
        ] * 3


def test_what_a_source_of_rewards_raises_ends_the_play(plan, sampler):
    class Broken(Scorer):
        def score(self, trajectories):
            raise ValueError("--reward_fn: broken")

    with pytest.raises(ValueError, match="--reward_fn: broken"):
        played(GroupPlayer({"": plan}, sampler, Broken()), 0)


def test_groups_of_one_reward_are_filtered_if_asked_for(plan, sampler):
    plan = dataclasses.replace(plan, most_in_vain=8)
    (outcome,) = played(GroupPlayer({"": plan}, sampler, Scorer()), 0)
    assert outcome.trajectories == []


def test_a_group_on_which_the_reward_function_fails_is_not_only_filtered(plan, sampler):
    class Failing(Scorer):
        def score(self, trajectories):
            return [Score({"reward": 0.0}, failed=True, error="KeyError('x')")] * len(trajectories)

    (outcome,) = played(GroupPlayer({"": plan}, sampler, Failing()), 0)
    assert len(outcome.trajectories) == 3, "the step tells whether all samples fail"
    (outcome,) = played(
        GroupPlayer({"": dataclasses.replace(plan, most_in_vain=8)}, sampler, Failing()), 0
    )
    assert (outcome.trajectories, outcome.error) == (None, "KeyError('x')")


def test_remax_gets_a_scored_greedy_response(plan, sampler):
    plan = dataclasses.replace(plan, n_samples=1, estimator=ESTIMATORS["remax"])
    (outcome,) = played(GroupPlayer({"": plan}, sampler, Scorer()), 4)
    (sample,) = outcome.trajectories
    (greedy,) = sample.greedy
    assert greedy.scores == sample.scores == {"reward": float(plan.prompt(4).index)}


def test_json_of_a_group_gives_it_back():
    prompt = dataclasses.replace(
        PROMPTS[3], row={"bytes": b"no JSON"}, messages=[{"role": "user", "content": "x"}]
    )
    episode = Episode(
        [{"role": "user", "content": "x"}],
        Ending.MAX_TURNS,
        2,
        output="end",
        tool_rewards={"a": [0.5]},
    )
    greedy = Trajectory(
        [3, 2], [False, True], [0.0, 0.0], [-1, 4], FinishReason.STOP, prompt, 7, scores={"r": 1.0}
    )
    parts = [
        Trajectory(
            [9, 1, 5],
            [False, True, True],
            [0.0, -0.1 / 3, -1e-9],
            [-1, 4, 5],
            FinishReason.LENGTH,
            dataclasses.replace(prompt, token_ids=[9]),
            7,
            fraction=fraction,
            scores={"r": 0.1},
            extras={"n": 2.5},
            notes={"pred": "72"},
            token_rewards=[0.0, 0.25, 0.5],
            step_ends=[False, False, True],
            greedy=(greedy,),
            episode=episode,
            trained_mask=[False, False, True],
            stop=("c",),
            reward_error="lost",
        )
        for fraction in (0.25, 0.75)
    ]
    again = from_json(json.loads(json.dumps(as_json(parts))), prompt)
    assert again == parts
    assert again[0].episode is again[1].episode
    assert again[0].greedy[0] is again[1].greedy[0]
    assert isinstance(again[0].prompt, Prompt)
    older = as_json(parts)
    del older["episodes"][0]["tool_rewards"]
    for row in older["rows"]:
        row["share"] = row.pop("fraction")
    from_older = from_json(older, prompt)
    assert from_older[0].episode.tool_rewards == {}, "of a checkpoint from before"
    assert [segment.fraction for segment in from_older] == [0.25, 0.75]
