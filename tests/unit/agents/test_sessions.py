"""Episodes over recorded token ids: turns, branches, segments, rewards, endings."""

import asyncio
import re
import sys
from typing import Any

import pytest

from openppo.agents import EpisodeEnded, Turn
from openppo.tracking import Metrics
from openppo.types import (
    Completion,
    Ending,
    FinishReason,
    Prompt,
    SamplingParams,
    SingleProcess,
    segments_of,
)

ENDINGS = {ending.value for ending in Ending}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "", "parameters": {"type": "object"}},
    }
]


def play(
    sampler: Any, n_prompts: int = 1, n_samples: int = 1, max_new_tokens: int = 64, **options: Any
) -> Any:
    """Samples and metrics of one rollout."""
    metrics = Metrics()
    prompts = [Prompt(f"task {i}", [5, 6], row={"number": i}) for i in range(n_prompts)]
    sampled = sampler.sample(
        prompts, SamplingParams(max_new_tokens), n_samples, 1, 0, metrics, **options
    )
    return sampled, metrics.reduced(SingleProcess())


def ending_of(metrics: dict[str, float]) -> str:
    """The ending that all episodes had."""
    shares = {name.removeprefix("agent/"): value for name, value in metrics.items()}
    [ending] = [name for name in ENDINGS if shares[name] == 1]
    assert sum(shares[name] for name in ENDINGS) == 1
    return ending


def follow_up(messages: list, turn: Any, text: str) -> list:
    return [*messages, turn.message, {"role": "user", "content": text}]


async def three_turns(task: Any, session: Any) -> float:
    messages = list(task.messages)
    for i in range(3):
        messages = follow_up(messages, await session.chat(messages), f"more {i}")
    return 1.0


def test_each_turn_continues_recorded_ids(make_sampler, chat_tokenizer):
    sampler = make_sampler(three_turns, lambda prompt: "<think>hm</think>yes")
    sampler.engine.use_version(7)
    [sample], metrics = play(sampler)
    [segment] = sample.segments
    journal = sampler.engine.journal
    assert segment.versions == [7 if sampled else -1 for sampled in segment.action_mask]
    assert [segment.token_ids[start:stop] for start, stop in segment.spans] == [
        ids for _, ids in journal
    ]
    assert segment.token_ids == journal[-1][0] + journal[-1][1]
    assert segment.prompt_ids == journal[0][0]
    assert (metrics["agent/bridged_turns"], metrics["agent/rerendered_turns"]) == (2, 0)
    rendered = chat_tokenizer.apply_chat_template(sample.episode.messages, tokenize=False)
    assert (
        rendered.count("<think>"),
        chat_tokenizer.decode(segment.token_ids).count("<think>"),
    ) == (0, 3)


def test_a_turn_resumes_what_is_kept_of_the_one_before(make_sampler):
    sampler = make_sampler(three_turns, lambda prompt: "yes")
    play(sampler)
    assert [handle for *_, handle in sampler.engine.submitted] == [None, 0, 1]


def test_each_turn_has_its_own_repeatable_seed(make_sampler):
    samplers = [make_sampler(three_turns, lambda prompt: "yes") for _ in range(2)]
    for sampler in samplers:
        play(sampler, 2, 2)
    first, second = ([seed for _, seed, _ in sampler.engine.submitted] for sampler in samplers)
    assert first == second and len(set(first)) == 12


def test_an_answer_after_the_end_is_no_turn(make_sampler):
    async def end(task: Any, session: Any) -> float:
        answer = asyncio.ensure_future(session.chat(task.messages))
        await asyncio.sleep(0)
        session.close(Ending.COMPLETED)
        with pytest.raises(EpisodeEnded):
            await answer
        ended.append(len(session.turns))
        return 1.0

    ended: list[int] = []
    sampler = make_sampler(end, lambda prompt: "yes")
    assert (play(sampler)[0], ended, len(sampler.engine.journal)) == ([], [0], 1)


def test_a_lower_limit_of_a_request_bounds_its_least_tokens_too(make_sampler):
    async def short(task: Any, session: Any) -> float:
        await session.chat(task.messages, max_tokens=2, stop=["!"])
        return 1.0

    sampler, metrics = make_sampler(short, lambda prompt: "yes"), Metrics()
    sampler.sample(
        [Prompt("task", [5])],
        SamplingParams(9, min_new_tokens=4, stop=("?",)),
        1,
        1,
        0,
        metrics,
    )
    [(params, *_)] = sampler.engine.submitted
    assert params == SamplingParams(2, min_new_tokens=2, stop=("?", "!"))


@pytest.mark.parametrize("n", [0, -1, 2.5])
def test_a_request_of_no_whole_number_of_tokens_ends_its_episode_alone(make_sampler, n):
    async def ask(task: Any, session: Any) -> float:
        await session.chat(task.messages, max_tokens=n if task["number"] else 4, stop="yes")
        return 1.0

    sampler = make_sampler(ask, lambda prompt: "yes")
    sampled, metrics = play(sampler, 2)
    assert metrics["agent/agent_error"] == metrics["agent/completed"] == 0.5
    assert [params.stop for params, *_ in sampler.engine.submitted] == [("yes",)] and len(
        sampled
    ) == 1


def test_an_episode_whose_turns_nobody_received_is_an_error(make_sampler):
    async def ask(task: Any, session: Any) -> float:
        (await session.chat(task.messages)).exclude_from_training()
        return 1.0

    sampler = make_sampler(ask, lambda prompt: "yes")
    assert play(sampler)[0] == []
    [failed], metrics = play(sampler, evaluation=True)
    assert (ending_of(metrics), failed.scores) == ("agent_error", {"reward": 0.0})


def test_an_episode_may_have_thousands_of_turns():
    turns: list[Turn] = []
    for number in range(3000):
        parent = turns[-1] if turns else None
        turns.append(
            Turn(number, [], [], [], Completion([1], [0.0], [0], FinishReason.STOP), "", [], parent)
        )
    assert turns[-1].path == turns


def test_history_as_the_template_has_it_makes_segments(make_sampler):
    sampler = make_sampler(three_turns, lambda prompt: "<think>hm</think>yes", history="template")
    [sample], metrics = play(sampler)
    journal = sampler.engine.journal
    assert (len(sample.segments), metrics["agent/rerendered_turns"]) == (3, 2)
    for segment, (prompt, ids) in zip(sample.segments, journal, strict=True):
        assert (segment.prompt_ids, segment.response_ids) == (prompt, ids)
        assert segment.token_ids == prompt + ids
    [same], metrics = play(make_sampler(three_turns, lambda prompt: "yes", history="template"))
    # Nothing was cut: the rendering is the record.
    assert (len(same.segments), metrics["agent/rerendered_turns"]) == (1, 0)


@pytest.mark.parametrize("n_branches", [1, 2, 5])
def test_branches_are_segments_of_one_sample(make_sampler, n_branches):
    async def branch_out(task: Any, session: Any) -> float:
        first = await session.chat(task.messages)
        texts = [f"branch {i}" for i in range(n_branches)]
        await asyncio.gather(
            *(session.chat(follow_up(task.messages, first, text)) for text in texts)
        )
        return 1.0

    sampler = make_sampler(branch_out, lambda prompt: "yes" if "branch" in prompt else "well")
    [sample], _ = play(sampler)
    assert len(sample.segments) == n_branches
    assert sample.scores == {"reward": 1.0}
    n_actions = [sum(segment.action_mask) for segment in sample.segments]
    assert sample.fractions == pytest.approx([n / sum(n_actions) for n in n_actions])
    # The shared turn is trained on once.
    assert [len(segment.spans) for segment in sample.segments] == [2] + [1] * (n_branches - 1)
    journal = sampler.engine.journal
    assert sum(n_actions) == sum(len(ids) for _, ids in journal)


def test_what_a_limit_ends_before_its_reward_has_reward_0(make_sampler):
    sampler = make_sampler(three_turns, lambda prompt: "yes", max_turns=2)
    [sample], metrics = play(sampler)
    [segment] = sample.segments
    assert ending_of(metrics) == "max_turns"
    assert (sample.scores, len(segment.spans)) == ({"reward": 0.0}, 2)


def test_a_turn_reward_lies_on_its_last_action(make_sampler):
    async def reward_turns(task: Any, session: Any) -> dict[str, float]:
        first = await session.chat(task.messages)
        second = await session.chat(follow_up(task.messages, first, "more"))
        session.reward(0.25, first)
        session.reward(2.0, second)
        return {"whole": 3.0}

    [sample], _ = play(make_sampler(reward_turns, lambda prompt: "yes"))
    [segment] = sample.segments
    expected = [0.0] * len(segment.token_ids)
    for (_, stop), reward in zip(segment.spans, (0.25, 2.0), strict=True):
        expected[stop - 1] = reward
    assert (segment.token_rewards, sample.scores) == (expected, {"whole": 3.0})
    assert sample.total_reward({}) == 5.25


@pytest.mark.parametrize(
    ("rewards", "error"),
    [
        ({f"r{i}": 1.0 for i in range(65)}, "an episode has at most 64 named rewards"),
        ({"r" * 101: 1.0}, "with names of at most 100 letters"),
        ({"r": 3.5e38}, "the reward 3.5e\\+38 is no finite number of at most 3.4e\\+38"),
        ({"r": 10**400}, "is no finite number"),
    ],
    ids=["many", "long", "large", "whole"],
)
def test_rewards_that_metrics_cannot_hold_fail_the_episode(make_sampler, rewards, error):
    async def solve(task: Any, session: Any) -> dict[str, float]:
        await session.chat(task.messages)
        return rewards

    failed: list[Any] = []
    make_sampler(solve, lambda prompt: "yes").sample(
        [Prompt("x", [5])], SamplingParams(8), note_failed=failed.append
    )
    assert re.search(error, failed[0].episode.error)


def test_a_turn_rewarded_with_zero_has_a_reward(make_sampler):
    async def reward_turn(task: Any, session: Any) -> None:
        session.reward(0.0, await session.chat(task.messages))

    [sample], _ = play(make_sampler(reward_turn, lambda prompt: "yes"))
    [segment] = sample.segments
    assert segment.token_rewards == [0.0] * len(segment.token_ids)
    assert segment.step_ends is not None and sum(segment.step_ends) == 1


@pytest.mark.parametrize("options", [{"max_turns": 2}, {"episode_max_len": 120}])
def test_an_answer_before_a_limit_is_not_cut(make_sampler, options):
    [sample], _ = play(make_sampler(ask_forever, lambda prompt: "yes", **options))
    assert sample.episode.ending.is_limit
    [segment] = sample.segments
    assert segment.finish_reason is FinishReason.STOP and not sample.truncated


def test_other_tools_or_an_edited_answer_begin_a_segment(make_sampler):
    async def edit(task: Any, session: Any) -> float:
        first = await session.chat(task.messages, TOOLS)
        await session.chat(follow_up(task.messages, first, "more"))
        edited = first.message | {"content": "no"}
        await session.chat([*task.messages, edited, {"role": "user", "content": "more"}], TOOLS)
        await session.chat(follow_up(task.messages, first, "more"), TOOLS)
        return 1.0

    [sample], metrics = play(make_sampler(edit, lambda prompt: "yes"))
    assert (metrics["agent/rerendered_turns"], metrics["agent/bridged_turns"]) == (2, 1)
    assert len(sample.segments) == 3


def test_an_answer_that_the_template_refuses_is_continued_and_reported(
    make_sampler, chat_tokenizer, monkeypatch
):
    """As of Llama 3.1, whose template takes one call in a message."""
    refusing = (
        "{% for m in messages if m.tool_calls and m.tool_calls|length > 1 %}"
        + "{{ raise_exception('one!') }}{% endfor %}"
    )
    monkeypatch.setattr(chat_tokenizer, "chat_template", refusing + chat_tokenizer.chat_template)
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'

    async def act(task: Any, session: Any) -> float:
        turn = await session.chat(task.messages, TOOLS)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in turn.tool_calls
        ]
        await session.chat([*task.messages, turn.message, *results], TOOLS)
        return 1.0

    options = {"tool_parser": "hermes", "check_rendering": "warn"}
    [sample], metrics = play(
        make_sampler(act, lambda prompt: call * 2, **options), max_new_tokens=200
    )
    assert metrics["agent/bridged_turns"] == 1 and metrics["agent/rerender_mismatch"] == 1
    assert len(sample.segments) == 1
    assert "one!" in sample.episode.error and ending_of(metrics) == "completed"


def test_a_cut_answer_is_closed_as_context(make_sampler, chat_tokenizer):
    sampler = make_sampler(three_turns, lambda prompt: "a long answer")
    [sample], metrics = play(sampler, max_new_tokens=4)
    [segment] = sample.segments
    eos = chat_tokenizer.eos_token_id
    assert metrics["agent/bridged_turns"] == 2 and segment.finish_reason is FinishReason.LENGTH
    ends = [(segment.token_ids[stop], segment.action_mask[stop]) for _, stop in segment.spans[:-1]]
    assert ends == [(eos, False)] * 2


@pytest.mark.parametrize(
    ("mode", "ending"), [("off", "completed"), ("warn", "completed"), ("strict", "agent_error")]
)
def test_rendering_is_checked_at_the_end(make_sampler, caplog, mode, ending):
    sampler = make_sampler(three_turns, lambda prompt: "<think>hm</think>yes", check_rendering=mode)
    samples, metrics = play(sampler)
    assert ending_of(metrics) == ending
    assert metrics.get("agent/rerender_mismatch") == (None if mode == "off" else 1)
    if mode == "warn":
        assert "<think>" in samples[0].episode.error and samples[0].episode.error in caplog.text


async def ask_forever(task: Any, session: Any) -> None:
    messages = list(task.messages)
    while True:
        messages = follow_up(messages, await session.chat(messages), "more")


def raising(error: BaseException) -> Any:
    async def act(task: Any, session: Any) -> float:
        await session.chat(task.messages)
        raise error

    return act


async def hang(task: Any, session: Any) -> None:
    await session.chat(task.messages)
    await asyncio.Event().wait()


async def never_ask(task: Any, session: Any) -> float:
    return 1.0


async def no_reward(task: Any, session: Any) -> None:
    await session.chat(task.messages)


@pytest.mark.parametrize(
    ("agent", "ending", "options"),
    [
        (three_turns, "completed", {}),
        (ask_forever, "max_turns", {"max_turns": 2}),
        (ask_forever, "episode_length", {"episode_max_len": 120}),
        (raising(RuntimeError("broken")), "agent_error", {}),
        (raising(SystemExit(3)), "agent_error", {}),
        (raising(EpisodeEnded(Ending.ENV_TRUNCATED)), "env_truncated", {}),
        (hang, "timeout", {"agent_timeout": 0.05}),
        (never_ask, "agent_error", {}),
        (no_reward, "agent_error", {}),
    ],
)
def test_an_episode_ends_once_and_as_what_it_was(make_sampler, agent, ending, options):
    samples, metrics = play(make_sampler(agent, lambda prompt: "yes", **options), n_prompts=3)
    assert ending_of(metrics) == ending
    groups = [0, 1, 2] if Ending(ending).is_trained else []
    assert [sample.group for sample in samples] == groups
    assert len(segments_of(samples)) == len(groups)
    assert {sample.total_reward({}) for sample in samples} <= {0.0, 1.0}


def test_failed_episodes_leave_their_group_and_count_in_evaluations(make_sampler):
    seen: list[int] = []

    async def fail_some(task: Any, session: Any) -> float:
        seen.append(task["number"])
        fails = (
            seen.count(task["number"]) <= task["number"]
        )  # the first of row 1, the first two of row 2
        await session.chat(task.messages)
        if fails:
            raise RuntimeError("broken")
        return 1.0

    sampler = make_sampler(fail_some, lambda prompt: "yes")
    samples, metrics = play(sampler, n_prompts=3, n_samples=3)
    # Of group 2 one is left, which teaches nothing.
    assert [sample.group for sample in samples] == [0, 0, 0, 1, 1]
    assert len(segments_of(samples)) == 5
    assert metrics["agent/agent_error"] == pytest.approx(3 / 9)
    seen.clear()
    evaluated, _ = play(sampler, n_prompts=3, n_samples=3, evaluation=True)
    assert [sample.total_reward({}) for sample in evaluated] == [1, 1, 1, 0, 1, 1, 0, 0, 1]
    assert len(segments_of(evaluated)) == 9


def test_a_cancelled_request_frees_its_row_and_leaves_no_turn(make_sampler):
    async def give_up(task: Any, session: Any) -> float:
        request = asyncio.ensure_future(session.chat(task.messages))
        await asyncio.sleep(0.02)
        request.cancel()
        await asyncio.wait([request])
        turn = await session.chat([{"role": "user", "content": "short"}])
        assert session.turns == [turn]
        return 1.0

    sampler = make_sampler(give_up, lambda prompt: "yes" if "short" in prompt else "y" * 10**6)
    [sample], metrics = play(sampler, max_new_tokens=10**6)
    assert len(sample.segments) == 1 and metrics["agent/completed"] == 1
    assert len(sampler.engine.journal) == 1 and not sampler.engine.busy


def test_samples_of_a_row_share_only_the_environment_seed(make_sampler):
    async def tell(task: Any, session: Any) -> float:
        seeds.append((task["number"], task.env_seed, task.seed))
        await session.chat(task.messages)
        return 1.0

    seeds: list[tuple[int, int, int]] = []
    sampler = make_sampler(tell, lambda prompt: "yes")
    play(sampler, n_prompts=2, n_samples=3)
    assert len({(row, env) for row, env, _ in seeds}) == len({env for _, env, _ in seeds}) == 2
    assert len({seed for *_, seed in seeds}) == 6 and max(env for _, env, _ in seeds) < sys.maxsize
    first, seeds = seeds, []
    play(sampler, n_prompts=2, n_samples=3)
    assert sorted(seeds) == sorted(first)
