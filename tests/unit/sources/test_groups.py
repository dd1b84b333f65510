"""The corridor: groups of synchronous and asynchronous runs and of evaluations, and their scores."""

import asyncio
import dataclasses
import json
import threading

import pytest

from openppo.datasets import BatchSampler, shuffled
from openppo.media import MediaItem
from openppo.rollout.kept import as_json, from_json, is_kept_whole
from openppo.rollout.seeds import sample_seed
from openppo.sources.groups import GroupPlayer
from openppo.sources.held_out import held_out_group
from openppo.sources.outcomes import OutcomePlayer
from openppo.sources.schedule import Start
from openppo.types import (
    Ending,
    Episode,
    FinishReason,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    SingleProcess,
)
from tests.playing import Plays
from tests.samples import one_segment
from tests.unit.agents.conftest import ScriptedEngine, make_chat_tokenizer
from tests.unit.sources.conftest import PROMPTS, task_of


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


@pytest.fixture(scope="session")
def chat_tokenizer():
    return make_chat_tokenizer()


def outcomes_of(task, stub, scorer=None):
    player = GroupPlayer({"": stub}, stub.driver)
    return OutcomePlayer({"": task}, player, parts=None, scorer=scorer)


def played(outcomes, *numbers):
    async def work():
        return await asyncio.gather(*(outcomes.play(Start(number, number)) for number in numbers))

    return outcomes.player.driver.drive(work())


def played_groups(task, stub, *numbers, **fields):
    """Groups of a synchronous run, with other ``fields`` of their input."""
    groups = [task.group(PROMPTS[number], number, number) for number in numbers]
    groups = [dataclasses.replace(group, **fields) for group in groups]
    player = GroupPlayer({"": stub}, stub.driver)
    return stub.driver.drive(player.play(groups))


def test_groups_take_prompts_in_the_order_of_the_option(tmp_path):
    (tmp_path / "order.py").write_text("def back(prompts, episode):\n    return range(7, -1, -1)\n")
    for option, rows in (("given", range(8)), (f"{tmp_path}/order.py:back", range(7, -1, -1))):
        ordered = task_of(prompt_order=option)
        assert [ordered.prompt(number).index for number in range(16)] == [*rows, *rows]


def test_prompts_and_seeds_are_those_of_a_synchronous_run(task, stub):
    batches = BatchSampler(8, 4, shuffled(8, seed=42)).batches
    order = [i for epoch in (0, 1) for batch in batches(epoch) for i in batch]
    assert [task.prompt(number).index for number in range(16)] == order
    played(outcomes_of(task, stub), 5)
    expected = [(5, sample_seed(42, 15 + i)) for i in range(3)]
    assert [(group, seed) for group, seed, _ in stub.asked] == expected
    assert {env for *_, env in stub.asked} == {sample_seed(42, 5) % 2**31}, (
        "one environment for a group"
    )
    stub.asked.clear()
    played_groups(task, stub, 5)
    assert [(group, seed) for group, seed, _ in stub.asked] == expected


def test_named_tasks_have_seeds_of_their_own(task):
    prompt = PROMPTS[0]
    seeds = [
        dataclasses.replace(task, name=name).group(prompt, 0, 0).seeds for name in ("", "a", "b")
    ]
    assert seeds[0] == [sample_seed(42, i) for i in range(3)]
    assert len({seed for group in seeds for seed in group}) == 9


def test_failed_samples_are_replaced_with_other_seeds(task, stub):
    first = {sample_seed(42, 3 * 2 + i) for i in range(3)}
    stub.failing = lambda group, seed: seed in first
    (outcome,) = played(outcomes_of(task, stub), 2)
    assert len(outcome.samples) == 3
    assert len({seed for _, seed, _ in stub.asked}) == 6
    measured = outcome.metrics.reduced(SingleProcess())
    assert measured["agent/agent_error"] == 1, "of the attempts that had an episode"


@pytest.mark.parametrize(("retries", "attempts"), [(0, 1), (2, 3)])
def test_asynchronous_runs_try_as_often_as_the_task_says(task, stub, retries, attempts):
    stub.failing = lambda group, seed: True
    (outcome,) = played(outcomes_of(dataclasses.replace(task, retries=retries), stub), 0)
    assert outcome.samples is None
    assert len(stub.asked) == 3 * attempts


def test_synchronous_runs_and_evaluations_try_once(task, stub):
    """A retry of an evaluation would inflate pass@k."""
    stub.failing = lambda group, seed: True
    assert task.group(PROMPTS[0], 0, 0).attempts == 1
    held_out = held_out_group(PROMPTS[0], 0, task.params, n_samples=3, seed=42)
    (group,) = stub.driver.drive(GroupPlayer({"": stub}, stub.driver).play([held_out]))
    assert len(stub.asked) == len(group.members) == len(group.failures) == 3
    assert group.samples == []


def test_a_group_continues_with_two_survivors_and_fails_with_one(task, stub):
    lost = sample_seed(42, 0)
    seeds = {lost, *(sample_seed(lost, attempt) for attempt in (1, 2))}
    stub.failing = lambda group, seed: group == 1 or seed in seeds
    two, none = played(outcomes_of(task, stub), 0, 1)
    assert len(two.samples) == 2
    assert none.samples is None
    assert none.error.startswith("agent_error: no answer to prompt")
    assert sum(group == 1 for group, *_ in stub.asked) == 3 * 3


def test_groups_that_wait_are_scored_together_on_one_thread(task, stub):
    scorer = Scorer()
    outcomes = outcomes_of(task, stub, scorer)
    scorer.gate.clear()
    stub.wait = lambda group: 0.0 if group == 0 else 0.05

    async def work():
        groups = [
            asyncio.ensure_future(outcomes.play(Start(number, number))) for number in range(4)
        ]
        await asyncio.sleep(0.3)
        scorer.gate.set()
        return await asyncio.gather(*groups)

    scored = stub.driver.drive(work())
    assert scorer.batches == [[0], [1, 2, 3]]
    for outcome in scored:
        assert [sample.scores for sample in outcome.samples] == [
            {"reward": float(task.prompt(outcome.number).index)}
        ] * 3


def test_an_error_of_a_reward_source_ends_the_play(task, stub):
    class Broken(Scorer):
        def score(self, samples):
            raise ValueError("--reward_fn: broken")

    with pytest.raises(ValueError, match="--reward_fn: broken"):
        played(outcomes_of(task, stub, Broken()), 0)


def test_dynamic_sampling_drops_groups_of_one_reward(stub):
    (outcome,) = played(outcomes_of(task_of(dynamic_sampling=True), stub, Scorer()), 0)
    assert outcome.samples == []


def test_trainers_that_score_drop_groups_themselves(stub):
    outcomes = outcomes_of(task_of(dynamic_sampling=True), stub)
    (outcome,) = played(dataclasses.replace(outcomes, trainers_score=True), 0)
    assert len(outcome.samples) == 3, "they have no rewards yet, and so equal ones"


def test_a_group_on_which_the_reward_function_fails_is_not_only_filtered(task, stub):
    class Failing(Scorer):
        def score(self, samples):
            return [Score({"reward": 0.0}, failed=True, error="KeyError('x')")] * len(samples)

    (outcome,) = played(outcomes_of(task, stub, Failing()), 0)
    assert len(outcome.samples) == 3, "the step tells whether all samples fail"
    (outcome,) = played(outcomes_of(task_of(dynamic_sampling=True), stub, Failing()), 0)
    assert (outcome.samples, outcome.error) == (None, "KeyError('x')")


REMAX = {"advantage_estimator": "remax", "n_samples_per_prompt": 1}


def test_remax_gets_a_scored_greedy_response(stub):
    task = task_of(**REMAX)
    (outcome,) = played(outcomes_of(task, stub, Scorer()), 4)
    (sample,) = outcome.samples
    assert sample.greedy.scores == sample.scores == {"reward": float(task.prompt(4).index)}


def test_greedy_samples_of_a_batch_come_after_all_others(stub):
    groups = played_groups(task_of(**REMAX), stub, 0, 1, 2)
    assert stub.temperatures == [1.0] * 3 + [0.0] * 3
    assert all(group.samples[0].greedy is group.greedy for group in groups)


def test_a_group_without_its_baseline_has_failed(stub):
    stub.failing = lambda group, seed: group == 1 and stub.temperatures[-1] == 0.0
    good, lost = played_groups(task_of(**REMAX), stub, 0, 1)
    assert good.error is None
    assert lost.samples == []
    assert lost.error == "agent_error: no answer to prompt 1"
    assert len(lost.failures) == 1


def test_groups_of_one_batch_enter_the_engine_as_its_own_order_says(chat_tokenizer):
    engine = ScriptedEngine(chat_tokenizer, lambda text: "ab")
    engine.order = lambda prompts: sorted(
        range(len(prompts)), key=lambda i: -len(prompts[i].token_ids)
    )
    plays = Plays.responses(engine)
    prompts = [Prompt("x", [5] * n) for n in (1, 3, 2)]
    samples = plays.sample(prompts, SamplingParams(4), n_samples=2, seed=7, first_group=20)
    plays.close()
    assert [sample.group for sample in samples] == [20, 20, 21, 21, 22, 22]
    assert [seed for _, seed, _ in engine.submitted] == [
        sample_seed(7, number) for number in (42, 43, 44, 45, 40, 41)
    ]


def test_a_refused_prompt_is_a_failed_sample(chat_tokenizer):
    class Refusing(ScriptedEngine):
        def submit(self, prompt, *arguments, **options):
            if not prompt.token_ids:
                raise ValueError("a prompt needs at least one token")
            return super().submit(prompt, *arguments, **options)

    plays = Plays.responses(Refusing(chat_tokenizer, lambda text: "ab"))
    failed = []
    prompts = [Prompt("", []), Prompt("x", [5])]
    (sample,) = plays.sample(prompts, SamplingParams(4), note_failed=failed.append)
    plays.close()
    assert sample.group == 1
    (stand_in,) = failed
    assert stand_in.episode.failure == "agent_error: a prompt needs at least one token"


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
