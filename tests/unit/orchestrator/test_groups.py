"""Groups are sampled as a synchronous run samples them, and scored."""

import asyncio
import dataclasses
import json
import threading

import pytest

from openppo.datasets import BatchSampler, shuffled
from openppo.experience.estimators import ESTIMATORS
from openppo.media import MediaItem
from openppo.orchestrator.groups import ATTEMPTS, GroupPlayer
from openppo.orchestrator.schedule import Start
from openppo.rollout.kept import as_json, from_json, is_kept_whole
from openppo.rollout.seeds import sample_seed
from openppo.types import (
    Ending,
    Episode,
    FinishReason,
    Prompt,
    Sample,
    Score,
    Segment,
    SingleProcess,
)
from tests.samples import one_segment
from tests.unit.orchestrator.conftest import PROMPTS


class Scorer:
    """The reward is the number of the prompt; ``batches`` are what it was given at a time."""

    collective = False

    def __init__(self):
        self.batches, self.gate, self.threads = [], threading.Event(), set()
        self.gate.set()

    def score(self, samples):
        self.threads.add(threading.get_ident())
        self.batches.append(sorted({sample.group for sample in samples}))
        assert self.gate.wait(10)
        return [Score({"reward": float(sample.prompt.index)}) for sample in samples]


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
    assert len(outcome.samples) == 3
    assert len({seed for _, seed, _ in sampler.asked}) == 6
    assert outcome.metrics.reduced(SingleProcess())["sampled"] == 3


def test_a_group_goes_on_with_two_survivors_and_fails_with_one(plan, sampler):
    lost = sample_seed(42, 0)
    seeds = {lost, *(sample_seed(lost, attempt) for attempt in range(1, ATTEMPTS))}
    sampler.failing = lambda group, seed: group == 1 or seed in seeds
    two, none = played(GroupPlayer({"": plan}, sampler, None), 0, 1)
    assert len(two.samples) == 2
    assert none.samples is None
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
        assert [sample.scores for sample in outcome.samples] == [
            {"reward": float(plan.prompt(outcome.number).index)}
        ] * 3


def test_what_a_source_of_rewards_raises_ends_the_play(plan, sampler):
    class Broken(Scorer):
        def score(self, samples):
            raise ValueError("--reward_fn: broken")

    with pytest.raises(ValueError, match="--reward_fn: broken"):
        played(GroupPlayer({"": plan}, sampler, Broken()), 0)


def test_groups_of_one_reward_are_filtered_if_asked_for(plan, sampler):
    plan = dataclasses.replace(plan, most_in_vain=8)
    (outcome,) = played(GroupPlayer({"": plan}, sampler, Scorer()), 0)
    assert outcome.samples == []


def test_a_group_on_which_the_reward_function_fails_is_not_only_filtered(plan, sampler):
    class Failing(Scorer):
        def score(self, samples):
            return [Score({"reward": 0.0}, failed=True, error="KeyError('x')")] * len(samples)

    (outcome,) = played(GroupPlayer({"": plan}, sampler, Failing()), 0)
    assert len(outcome.samples) == 3, "the step tells whether all samples fail"
    (outcome,) = played(
        GroupPlayer({"": dataclasses.replace(plan, most_in_vain=8)}, sampler, Failing()), 0
    )
    assert (outcome.samples, outcome.error) == (None, "KeyError('x')")


def test_remax_gets_a_scored_greedy_response(plan, sampler):
    plan = dataclasses.replace(plan, n_samples=1, estimator=ESTIMATORS["remax"])
    (outcome,) = played(GroupPlayer({"": plan}, sampler, Scorer()), 4)
    (sample,) = outcome.samples
    assert sample.greedy.scores == sample.scores == {"reward": float(plan.prompt(4).index)}


def segment(n_actions, **fields):
    """A segment after the prompt 9, each of its actions sampled by a later policy than the one before."""
    n = 1 + n_actions
    return Segment(
        token_ids=[9, *range(1, n)],
        action_mask=[False] + [True] * n_actions,
        log_probs=[0.0, -1e-9, *(-place / 3 for place in range(2, n))],
        versions=[-1, *range(4, 4 + n_actions)],
        n_prompt=1,
        finish_reason=FinishReason.LENGTH,
        **fields,
    )


def test_json_of_a_group_gives_it_back():
    image = MediaItem({}, token_id=9, n_tokens=1, key=5)
    prompt = dataclasses.replace(
        PROMPTS[3],
        row={"bytes": b"no JSON"},
        messages=[{"role": "user", "content": "x"}],
        media=(image,),
    )
    episode = Episode(
        [{"role": "user", "content": "x"}],
        Ending.MAX_TURNS,
        2,
        error="late",
        output="end",
        tool_rewards={"a": [0.5]},
    )
    greedy = one_segment(
        [3, 2],
        [False, True],
        [0.0, 0.0],
        versions=[-1, 4],
        finish_reason=FinishReason.STOP,
        prompt=prompt,
        group=7,
        scores={"r": 1.0},
        stop=("c",),
    )
    first = segment(1, media=prompt.media, trained_mask=[False, False])
    last = segment(
        3,
        media=prompt.media,
        token_rewards=[0.0, 0.25, 0.0, 0.5],
        step_ends=[False, True, False, True],
        trained_mask=[False, False, True, True],
    )
    several = Sample(
        prompt,
        group=7,
        segments=[first, last],
        scores={"r": 0.1},
        weight=0.5,
        episode=episode,
        greedy=greedy,
        extras={"n": 2.5},
        notes={"pred": "72"},
        stop=("c", "d"),
        reward_error="lost",
    )
    single = Sample(prompt, group=7, segments=[segment(2, media=prompt.media)], greedy=greedy)
    group = [several, single]
    assert is_kept_whole(group, prompt)
    assert not is_kept_whole(group, PROMPTS[3]), "other images than those of the prompt"
    again = from_json(json.loads(json.dumps(as_json(group))), prompt)
    assert again == group
    for sample in again:
        assert sample.greedy is again[0].greedy, "one object for the whole group"
        assert isinstance(sample.stop, tuple) and isinstance(sample.prompt, Prompt)
    assert again[0].fractions == [0.25, 0.75]
    assert isinstance(again[0].episode.ending, Ending)
    assert isinstance(again[0].last.finish_reason, FinishReason)
    assert again[0].last.trained_mask == [False, False, True, True]

    without = [dataclasses.replace(sample, greedy=None) for sample in group]
    assert from_json(json.loads(json.dumps(as_json(without))), prompt) == without


def test_json_holds_every_field_of_a_sample_but_its_prompt_and_images():
    """A field that is added later is kept, or stands here."""
    sample = as_json([Sample(PROMPTS[0], group=7, segments=[segment(1)])])["samples"][0]
    names = {field.name for field in dataclasses.fields(Sample)}
    assert names - sample.keys() == {"prompt", "greedy"}, "once for a group"
    names = {field.name for field in dataclasses.fields(Segment)}
    assert names - sample["segments"][0].keys() == {"media"}, "those of the prompt"
