"""Environments: gymnasium's five values over recorded token ids."""

import asyncio
import threading
from typing import Any, ClassVar

import pytest

from openppo.agents.environment import UNREADABLE, EnvironmentAgent
from openppo.config.agents import AgentConfig
from openppo.rollout.seeds import sample_seed
from openppo.tracking import Metrics
from openppo.types import Ending, Prompt, Sample, SamplingParams, SingleProcess
from tests.playing import Plays


class Count:
    """Ends at three; each step pays what was said, and observes it."""

    made: ClassVar[list["Count"]] = []

    def __init__(self) -> None:
        self.closed, self.seen, self.threads = 0, [], set()
        Count.made.append(self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict]:
        self.seed, self.options, self.n = seed, options, 0
        self.threads.add(threading.get_ident())
        return "say 3", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.n += 1
        self.seen.append(action)
        self.threads.add(threading.get_ident())
        return f"you said {action}", float(action), self.n == 3, False, {}

    def close(self) -> None:
        self.closed += 1


class Parsed(Count):
    def parse(self, text: str) -> int | None:
        return int(text) if text.isdigit() else None


class Patient(Count):
    """The same in coroutines."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict]:
        return super().reset(seed=seed, options=options)

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return super().step(action)

    async def close(self) -> None:
        super().close()


@pytest.fixture(autouse=True)
def no_environments() -> None:
    Count.made.clear()


def sampler_of(make_sampler: Any, make: Any, script: Any, **options: Any) -> Plays:
    return make_sampler(EnvironmentAgent(make, AgentConfig(**options)), script, **options)


def play(
    sampler: Plays, n_seeds: int = 1, n: int = 1, **options: Any
) -> tuple[list[Sample], dict[str, float]]:
    metrics = Metrics()
    prompts = [Prompt("", [], row=options.pop("row", {}), index=i) for i in range(n_seeds)]
    sampled = sampler.sample(
        prompts,
        SamplingParams(64),
        n,
        seed=options.pop("seed", 7),
        first_group=options.pop("first", 0),
        metrics=metrics,
        **options,
    )
    assert all(len(sample.segments) == 1 for sample in sampled)
    return sampled, metrics.reduced(SingleProcess())


def turn_rewards(sample: Sample) -> list[float]:
    """Of each turn, that of the whole on the last action."""
    segment = sample.last
    rewards = list(segment.token_rewards or [0.0] * len(segment.token_ids))
    rewards[segment.spans[-1][1] - 1] += sample.total_score({})
    assert all(
        reward == 0
        for t, reward in enumerate(rewards)
        if t + 1 not in {stop for _, stop in segment.spans}
    )
    return [rewards[stop - 1] for _, stop in segment.spans]


@pytest.mark.parametrize("kind", [Count, Patient])
def test_rewards_of_steps_lie_on_the_last_action_of_their_turn(make_sampler, kind):
    said = iter("123")
    [sample], metrics = play(sampler_of(make_sampler, kind, lambda prompt: next(said)))
    assert turn_rewards(sample) == [1, 2, 3]
    assert sample.episode.ending is Ending.COMPLETED and metrics["agent/bridged_turns"] == 2
    assert [message["content"] for message in sample.episode.messages] == [
        *("say 3", "1", "you said 1", "2", "you said 2", "3")
    ]
    assert sample.episode.output == "you said 3"
    assert [environment.closed for environment in Count.made] == [1]


def test_a_reward_at_the_end_alone_is_that_of_the_whole(make_sampler):
    said = iter("003")
    [sample], _ = play(sampler_of(make_sampler, Count, lambda prompt: next(said)))
    assert sample.scores == {"reward": 3} and sample.last.token_rewards is None


def test_an_episode_without_reward_has_reward_zero(make_sampler):
    [sample], metrics = play(sampler_of(make_sampler, Count, lambda prompt: "0"))
    assert sample.scores == {"reward": 0} and metrics["agent/completed"] == 1


def test_an_unreadable_action_costs_the_penalty_and_is_no_step(make_sampler):
    said = iter(["1", "one", "1", "1"])
    sampler = sampler_of(make_sampler, Parsed, lambda prompt: next(said), format_penalty=0.25)
    [sample], metrics = play(sampler)
    assert turn_rewards(sample) == [1, -0.25, 1, 1]
    assert Count.made[0].seen == [1, 1, 1] and metrics["agent/unreadable_actions"] == 1
    assert sample.episode.messages[4] == {"role": "user", "content": UNREADABLE}


def test_without_a_parser_the_whole_text_is_the_action(make_sampler):
    play(sampler_of(make_sampler, Count, lambda prompt: " 1"))
    assert Count.made[0].seen == ["1"] * 3


def test_an_environment_that_truncates_ends_the_episode_so(make_sampler):
    class Short(Count):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            return "over", 2.0, False, True, {}

    [sample], metrics = play(sampler_of(make_sampler, Short, lambda prompt: "go"))
    assert sample.episode.ending is Ending.ENV_TRUNCATED and metrics["agent/env_truncated"] == 1
    assert turn_rewards(sample) == [2] and sample.episode.ending.is_trained


def test_observations_may_be_chat_messages(make_sampler):
    class Chatty(Count):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list, dict]:
            super().reset(seed=seed)
            return [{"role": "system", "content": "count"}, {"role": "user", "content": "go"}], {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            return [{"role": "user", "content": "on"}], *super().step(action)[1:]

    [sample], _ = play(sampler_of(make_sampler, Chatty, lambda prompt: "1"))
    assert [message["role"] for message in sample.episode.messages[:4]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_samples_of_a_group_play_the_same_seed_of_the_run(make_sampler):
    sampler = sampler_of(make_sampler, Count, lambda prompt: "1")
    play(sampler, n_seeds=2, n=3, first=4)
    seeds = [environment.seed for environment in Count.made]
    assert sorted(seeds) == sorted([sample_seed(7, group) % 2**31 for group in (4, 5)] * 3)
    Count.made.clear()
    play(sampler, n_seeds=2, n=3, first=4)  # as a resumed run does
    assert sorted(environment.seed for environment in Count.made) == sorted(seeds)


def test_evaluations_play_their_own_seeds(make_sampler):
    play(
        sampler_of(make_sampler, Count, lambda prompt: "1", environment="e.py:E", eval_seed=50),
        3,
        evaluation=True,
    )
    assert sorted(environment.seed for environment in Count.made) == [50, 51, 52]


@pytest.mark.parametrize("row", [{"size": 4}, {}])
def test_a_row_becomes_the_options_of_reset(make_sampler, row):
    play(sampler_of(make_sampler, Count, lambda prompt: "1"), row=row)
    assert Count.made[0].options == (row or None)


def test_each_environment_stays_on_one_thread_of_its_own(make_sampler):
    play(sampler_of(make_sampler, Count, lambda prompt: "1"), 4, 2)
    assert all(len(environment.threads) == 1 for environment in Count.made)
    assert len(set.union(*(environment.threads for environment in Count.made))) == 8


def test_one_that_hangs_times_out_and_stops_no_other(make_sampler):
    release = threading.Event()

    class Hangs(Count):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            if self is Count.made[0]:
                release.wait()
            return super().step(action)

    sampler = sampler_of(make_sampler, Hangs, lambda prompt: "1", agent_timeout=0.3)
    sampled, metrics = play(sampler, 1, 4)
    release.set()
    assert (
        len(sampled) == 3
        and metrics["agent/timeout"] == 0.25
        and metrics["agent/completed"] == 0.75
    )


def test_one_that_raises_ends_its_episode_and_is_closed(make_sampler):
    class Breaks(Count):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            raise OSError("the game has crashed")

    sampled, metrics = play(sampler_of(make_sampler, Breaks, lambda prompt: "1"), 2)
    assert sampled == [] and metrics["agent/agent_error"] == 1
    assert [environment.closed for environment in Count.made] == [1, 1]


def test_many_environments_run_at_the_same_time(make_sampler):
    together = threading.Barrier(16)

    class Waits(Count):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            together.wait(timeout=60)  # a broken barrier fails the episode
            return super().step(action)

    _, metrics = play(sampler_of(make_sampler, Waits, lambda prompt: "1"), 16)
    assert metrics["agent/completed"] == 1


def test_an_environment_in_a_step_when_its_time_is_up_is_closed_after_it(make_sampler):
    goes_on, closed = threading.Event(), threading.Event()

    class Slow(Count):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            goes_on.wait(60)
            return super().step(action)

        def close(self) -> None:
            closed.set()

    sampled, metrics = play(sampler_of(make_sampler, Slow, lambda prompt: "1", agent_timeout=0.2))
    assert (sampled, metrics["agent/timeout"], closed.is_set()) == ([], 1, False)
    goes_on.set()
    assert closed.wait(60)


class FourValues(Count):
    def step(self, action: Any) -> Any:
        return "", 0.0, False, {}


class OldReset(Count):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "observation"


class NoSeed(Count):
    def reset(self) -> Any:  # type: ignore[override]
        return "observation", {}


class Numbers(Count):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 3, {}


class NoStep:
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "", {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FourValues, "step returned .*, not five values. Write\n    def reset"),
        (OldReset, "reset returned 'observation', not two values"),
        (NoSeed, "unexpected keyword argument 'seed'"),
        (Numbers, "a model cannot read the observation 3: return a text"),
        (NoStep, "has no attribute 'step'"),
        (Count, "(?s)ValueError when tried .*add 'def parse"),
    ],
)
def test_an_object_without_gymnasiums_form_is_refused_before_loading(kind, message):
    with pytest.raises(ValueError, match=message):
        EnvironmentAgent(kind, AgentConfig()).check([Prompt("", [])])
    assert [environment.closed for environment in Count.made] == [1] * len(Count.made)


@pytest.mark.parametrize("kind", [Parsed, Patient])
def test_what_has_its_form_is_tried_and_closed(kind):
    agent = EnvironmentAgent(
        type("Lenient", (kind,), {"parse": lambda self, text: None}), AgentConfig()
    )
    agent.check([Prompt("", [], row={"size": 4})])
    [tried] = Count.made
    assert tried.options == {"size": 4} and tried.seen == [] and tried.closed == 1


def test_an_environment_is_tried_inside_a_running_event_loop():
    """As in a notebook."""

    async def cell() -> None:
        EnvironmentAgent(Parsed, AgentConfig()).check([Prompt("", [], row={"size": 4})])

    asyncio.run(cell())
    [tried] = Count.made
    assert tried.closed == 1
