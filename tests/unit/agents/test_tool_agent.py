"""Episodes with tools: their life, what the model reads, what it earns."""

import asyncio
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from openppo.agents import AgentPlayer
from openppo.agents.tool_agent import State, ToolAgent, ToolEpisode, arguments_of
from openppo.agents.tools import BaseTool, FunctionTool, OpenAIFunctionToolSchema, ToolResponse
from openppo.config.agents import AgentConfig
from openppo.tracking import Metrics
from openppo.types import Ending, Prompt, Sample, SamplingParams, SingleProcess
from tests.unit.agents.verl_tools import JOURNAL, SCHEMA, NewGrader, OldGrader


def calls(*made: tuple[str, Any]) -> str:
    """A model's answer with calls, in Hermes' format."""
    parts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in made]
    return "\n".join(f"<tool_call>\n{part}\n</tool_call>" for part in parts)


def then(*answers: str) -> Callable[[str], str]:
    """A script of one answer after the other, the last one again and again."""
    return lambda prompt: answers[min(prompt.count("<|im_start|>assistant") - 1, len(answers) - 1)]


class Plain(BaseTool):
    """A tool named ``name`` that journals what happens to it."""

    def __init__(self, name: str = "plain", result: Any = "done") -> None:
        super().__init__({}, OpenAIFunctionToolSchema(function={"name": name}))
        self.result, self.seen = result, []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        self.seen.append("create")
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.seen.append("execute")
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.seen.append("release")


class Paying(Plain):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        self.seen.append("calc_reward")
        return 0.5


@pytest.fixture
def play(make_sampler) -> Callable[..., tuple[list[Sample], dict[str, float]]]:
    """``play(tools, script, rows=..., **options)``: samples and metrics of one episode for each row."""

    def run(
        tools: list[BaseTool], script: Callable[[str], str], **options: Any
    ) -> tuple[list[Sample], dict[str, float]]:
        rows = options.pop("rows", [{}])
        has_rewards = options.pop("has_rewards", False)
        metrics = Metrics()
        agent = ToolAgent(tools, AgentConfig(tools="tools.py", tool_parser="hermes", **options))
        sampler = make_sampler(
            agent, script, tool_parser="hermes", has_rewards=has_rewards, **options
        )
        prompts = [
            Prompt("task", [5, 6], row=row, messages=[{"role": "user", "content": "task"}])
            for row in rows
        ]
        agent.check(prompts)
        sampled = sampler.sample(prompts, SamplingParams(400), 1, 1, 0, metrics)
        assert all(len(sample.segments) == 1 for sample in sampled)
        return sampled, metrics.reduced(SingleProcess())

    return run


def results(sample: Sample) -> list[str]:
    assert sample.episode is not None
    return [message["content"] for message in sample.episode.messages if message["role"] == "tool"]


@pytest.fixture(autouse=True)
def no_journal() -> None:
    JOURNAL.clear()


def row(**tools_kwargs: Any) -> dict[str, Any]:
    return {"extra_info": {"index": 0, "need_tools_kwargs": True, "tools_kwargs": tools_kwargs}}


@pytest.mark.parametrize("form", [OldGrader, NewGrader])
def test_classes_of_verl_live_through_an_episode(play, form):
    arguments = {
        "create_kwargs": {"ground_truth": "7"},
        "execute_kwargs": {"a": 1},
        "calc_reward_kwargs": {"b": 2},
        "release_kwargs": {"c": 3},
    }
    script = then(calls(("grade", {"answer": "6"})), calls(("grade", {"answer": "7"})), "It is 7.")
    [sample], metrics = play(
        [form({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))],
        script,
        rows=[row(grade=arguments)],
    )
    inner = ("calc_reward", {})
    assert [
        ("create", "7"),
        *(("execute", "6", {"a": 1}), inner, ("execute", "7", {"a": 1}), inner),
        *(("calc_reward", {"b": 2}), ("release", {"c": 3})),
    ] == JOURNAL
    assert results(sample) == ["parsed 6, reward 0.0", "parsed 7, reward 1.0"]
    assert sample.last.step_rewards == [-0.05, 0.0, 1.0]
    assert metrics["agent/grade/tries"] == 1 and metrics["agent/completed"] == 1


def test_rewards_lie_on_the_last_action_of_their_turn(play):
    script = then(calls(("paying", {}), ("paying", {})), "end")
    [sample], _ = play([Paying("paying", ("ok", 0.25, None))], script)
    segment = sample.last
    rewards = {t: reward for t, reward in enumerate(segment.token_rewards) if reward}
    assert rewards == {
        stop - 1: reward for (_, stop), reward in zip(segment.spans, [0.5, 0.5], strict=True)
    }
    assert sample.scores == {}


class Counting(Paying):
    """Rewards its calls with the numbers they ask for, the first of them last."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await asyncio.sleep(0.2 if parameters["pay"] == 1 else 0)
        return "ok", parameters["pay"], None


COUNTED = then(
    calls(("b", {"pay": 1}), ("a", {"pay": 2}), ("b", {"pay": None})),
    calls(("b", {"pay": 3})),
    "end",
)
EARNED = {"b": [1.0, 3.0, 0.5], "a": [2.0, 0.5]}


@pytest.mark.parametrize(("option", "of_turns"), [("add", [3.0, 3.0, 1.0]), ("none", [])])
def test_rewards_of_tools_are_kept_and_added_if_asked(play, option, of_turns):
    tools = [Counting("b"), Counting("a")]
    [sample], metrics = play(tools, COUNTED, tool_rewards=option, has_rewards=True)
    assert sample.episode.tool_rewards == EARNED, "in the order of calls, then calc_reward"
    assert sample.last.step_rewards == of_turns
    assert (sample.last.token_rewards is None) == (option == "none")
    assert metrics["agent/completed"] == 1
    assert (metrics["agent/tool_rewards/b"], metrics["agent/tool_rewards/a"]) == (4.5, 2.5)


def test_a_warning_says_once_that_both_rewards_count(play, caplog):
    said = "rewards of tools (b, a) are added to those of reward functions and other sources: both count. With "
    said += "--tool_rewards none functions only see them, as tool_rewards."
    tools = [Counting("b"), Counting("a")]
    play(tools, COUNTED, has_rewards=True, rows=[{}, {}])
    assert [message for message in caplog.messages if "both count" in message] == [said]
    caplog.clear()
    play(tools, COUNTED, has_rewards=False)
    play(tools, COUNTED, has_rewards=True, tool_rewards="none")
    play([Plain()], then(calls(("plain", {})), "end"), has_rewards=True)
    assert caplog.messages == []


def test_a_reward_of_zero_is_a_reward(play):
    class Strict(Paying):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            return 0.0

    [sample], metrics = play([Strict()], then("end"))
    assert metrics["agent/completed"] == 1 and sample.total_reward({}) == 0.0


def test_tools_that_reward_nothing_leave_an_error(play):
    sampled, metrics = play([Plain()], then("end"))
    assert sampled == [] and metrics["agent/agent_error"] == 1


LIFE = "create execute calc_reward release"
ENDS = [
    (Ending.COMPLETED, {}, Paying(), LIFE),
    (Ending.MAX_TURNS, {"max_turns": 1}, Paying(), LIFE),
    (Ending.EPISODE_LENGTH, {"episode_max_len": 330}, Paying(), LIFE),
    (Ending.TIMEOUT, {"agent_timeout": 0.3}, Paying(result="hang"), "create execute release"),
]


@pytest.mark.parametrize(("ending", "options", "tool", "life"), ENDS)
def test_an_instance_is_made_once_and_released_once(play, ending, options, tool, life):
    if tool.result == "hang":

        async def execute(instance_id: str, parameters: dict[str, Any]) -> None:
            tool.seen.append("execute")
            await asyncio.sleep(60)

        tool.execute = execute
    sampled, metrics = play([tool], then(calls(("plain", {})), "end"), **options)
    assert metrics[f"agent/{ending.value}"] == 1
    assert tool.seen == life.split()
    assert len(sampled) == ending.is_trained


@pytest.mark.parametrize("method", ["create", "calc_reward", "release"])
@pytest.mark.parametrize("options", [{}, {"max_turns": 1}])
def test_what_raises_outside_of_calls_is_a_tool_error(play, method, options):
    good, bad = Paying("good"), Paying("bad")

    def fail(*arguments: Any, **named: Any) -> None:
        bad.seen.append(method)
        raise KeyError("broken")

    setattr(bad, method, fail)
    sampled, metrics = play([good, bad], then(calls(("good", {})), "end"), **options)
    assert metrics["agent/tool_error"] == 1 and sampled == []
    counts = Counter(good.seen + bad.seen)
    made = 1 if method == "create" else 2
    assert counts["create"] == 2 and counts["release"] == made
    assert counts["calc_reward"] == (0 if method == "create" else 2)


@pytest.mark.parametrize(
    ("reward", "sums"), [(float("nan"), []), ("much", []), (None, [0.5]), (0.25, [0.75])]
)
def test_a_reward_is_a_finite_number_or_none(play, reward, sums):
    class Odd(Paying):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return reward

    sampled, metrics = play([Odd(), Paying("other")], then("end"))
    assert metrics["agent/tool_error"] == (not sums)
    assert [sum(sample.last.step_rewards) for sample in sampled] == sums


FORMS = [
    ("a text", "a text"),
    ({"text": "of a dict"}, "of a dict"),
    (ToolResponse(text="of a response"), "of a response"),
    (("alone",), "alone"),
    (("with a reward", 1.0), "with a reward"),
    ((ToolResponse(text="and nothing"), None, None), "and nothing"),
    (ToolResponse(text="seen", image=["p", "q"]), "seen"),
    ("half \ud800 a pair", "half ? a pair"),
    (7, "Error: plain: 7 is no text, dict with 'text' or 'image', or ToolResponse"),
    (("text", "much"), "Error: plain: the reward 'much' is no finite number of at most 3.4e+38"),
]


@pytest.mark.parametrize(("returned", "read"), FORMS)
def test_a_result_may_have_several_forms(play, returned, read):
    [sample], metrics = play([Paying(result=returned)], then(calls(("plain", {})), "end"))
    assert results(sample) == [read]
    assert metrics["agent/tool_errors"] == read.startswith("Error")


def test_the_model_reads_what_was_wrong_with_a_call(play, caplog):
    tools = [
        Paying("bad", ZeroDivisionError("division by zero")),
        Paying("exits", SystemExit(3)),
        Paying("slow"),
        Paying("good"),
    ]

    async def sleep(instance_id: str, parameters: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    tools[2].execute = sleep
    first = calls(("bad", {}), ("exits", {}), ("slow", {}), ("missing", {}), ("good", {}))
    [sample], metrics = play(tools, then(first, "end"), tool_timeout=0.2)
    assert results(sample) == [
        "Error: bad.execute: ZeroDivisionError: division by zero",
        "Error: exits.execute: SystemExit: 3",
        "Error: slow.execute: no result within 0.2 s",
        "Error: there is no tool 'missing'; there are: bad, exits, slow, good",
        "done",
    ]
    assert metrics["agent/tool_errors"] == 4 and metrics["agent/tool_calls"] == 5
    assert (
        sum("the tool bad.execute: ZeroDivisionError" in message for message in caplog.messages)
        == 1
    )


def test_a_malformed_call_is_answered_and_none_beside_it_is_made(play):
    broken = "<tool_call>\n{'name'\n</tool_call>"
    script = then(broken, calls(("plain", {})) + broken, "end")
    [sample], metrics = play([Paying()], script)
    messages = [
        message for message in sample.episode.messages if message["role"] in ("user", "tool")
    ]
    assert [message["role"] for message in messages] == ["user"] * 3
    assert all(
        said["content"].startswith("Error: a tool call could not be read: ")
        for said in messages[1:]
    )
    assert metrics["agent/tool_errors"] == metrics["agent/malformed_calls"] == 2


def test_plain_functions_of_a_turn_run_at_the_same_time(play):
    both = threading.Barrier(3)

    def wait(instance_id: str, parameters: dict[str, Any]) -> str:
        both.wait(timeout=60)
        return "met"

    async def wait_too(instance_id: str, parameters: dict[str, Any]) -> str:
        return await asyncio.to_thread(wait, instance_id, parameters)

    plain, coroutine = Paying("plain"), Paying("coroutine")
    plain.execute, coroutine.execute = wait, wait_too
    [sample], _ = play(
        [plain, coroutine], then(calls(("plain", {}), ("coroutine", {}), ("plain", {})), "end")
    )
    assert results(sample) == ["met"] * 3


def test_a_plain_function_that_hangs_keeps_nobody_waiting(play):
    def hang(instance_id: str, parameters: dict[str, Any]) -> None:
        time.sleep(600)

    tool, before = Paying(), {*threading.enumerate()}
    tool.execute = hang
    [sample], _ = play([tool], then(calls(("plain", {})), "end"), tool_timeout=0.1)
    assert results(sample) == ["Error: plain.execute: no result within 0.1 s"]
    left = {*threading.enumerate()} - before
    assert left and all(thread.daemon for thread in left)  # so the process can end


@pytest.mark.parametrize(
    ("length", "mark"), [(20, ""), (21, " ... [cut]"), (100_000, " ... [cut]")]
)
def test_a_long_result_is_cut_with_a_mark(play, length, mark):
    [sample], _ = play(
        [Paying(result="x" * length)],
        then(calls(("plain", {})), "end"),
        max_tool_response_tokens=20,
    )
    assert results(sample) == ["x" * 20 + mark]


def test_what_create_says_follows_the_prompt(play):
    class Saying(Paying):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            return instance_id, ToolResponse(text="The board is empty.")

    [sample], _ = play([Saying()], then("end"))
    assert sample.episode.messages[0] == {
        "role": "user",
        "content": "task\n\nThe board is empty.",
    }


def offered(sampler_prompt: str) -> list[str]:
    return [
        tool["function"]["name"]
        for tool in json.loads(re.search(r"</tool_call>: (\[.*\])<", sampler_prompt)[1])
    ]


def test_a_row_offers_the_tools_that_it_names_or_all(play):
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return "end"

    tools = [Paying("a"), Paying("b")]
    null = row(a=None, b={"create_kwargs": None, "execute_kwargs": {"x": None}})
    rows = [
        {},
        {"extra_info": None},
        row(),
        {"extra_info": {"tools_kwargs": None}},
        row(a=None, b=None),
        row(a={}),
        null,
    ]
    play(tools, script, rows=rows)
    assert sorted(offered(prompt) for prompt in prompts) == [["a"], *[["a", "b"]] * 5, ["b"]]
    assert Counter(tools[0].seen) == {"create": 6, "calc_reward": 6, "release": 6}
    assert Counter(tools[1].seen) == {"create": 6, "calc_reward": 6, "release": 6}


def test_nulls_among_arguments_count_as_absent(play):
    tool = OldGrader({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    play(
        [tool],
        then("end"),
        rows=[
            row(
                grade={
                    "create_kwargs": {"ground_truth": "7", "unknown": None},
                    "release_kwargs": None,
                }
            )
        ],
    )
    assert JOURNAL == [("create", "7"), ("calc_reward", {}), ("release", {})]


def test_rows_that_lack_arguments_are_counted_once(caplog):
    agent = ToolAgent([Plain("a")], AgentConfig(tools="tools.py"))
    with caplog.at_level(logging.WARNING):
        agent.check(
            [
                Prompt("", [], row=each)
                for each in [row(), row(a=None), row(a={}), {}, {"extra_info": {"index": 1}}]
            ]
        )
    assert [m for m in caplog.messages if "tools_kwargs" in m] == [
        "2 of 5 rows need tools_kwargs and have none: they play without"
    ]


def test_arguments_of_tools_may_be_json_text():
    arguments = {"a": {"create_kwargs": {"x": 1}}}
    assert arguments_of({"extra_info": json.dumps({"tools_kwargs": arguments})}) == arguments


def test_a_row_that_names_an_unknown_tool_is_refused():
    agent = ToolAgent([Plain("a"), Plain("b")], AgentConfig(tools="tools.py"))
    with pytest.raises(
        ValueError, match=r"--tools has no tool 'c', which row 3 of rows.parquet names .* has: a, b"
    ):
        agent.check([Prompt("", [], row=row(a={}, c={}), source="rows.parquet", index=2)])


def test_a_prompt_that_ends_in_the_assistants_turn_is_refused():
    agent = ToolAgent([Plain("a")], AgentConfig(tools="tools.py"))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>"}]
    with pytest.raises(
        ValueError, match=r"^--tools: the prompt of row 3 of rows.jsonl ends in .* Remove that turn"
    ):
        agent.check(
            [
                Prompt("", [], messages=chat[:1]),
                Prompt("", [], messages=chat, source="rows.jsonl", index=2),
            ]
        )


def test_only_a_tool_with_a_reward_of_its_own_gives_rewards():
    options = AgentConfig(tools="tools.py")
    plain, paying = ToolAgent([Plain()], options), ToolAgent([Plain("a"), Paying()], options)
    assert (
        AgentPlayer(plain, options).gives_rewards,
        AgentPlayer(paying, options).gives_rewards,
    ) == (False, True)
    shown = ToolAgent([Paying()], AgentConfig(tools="tools.py", tool_rewards="none"))
    assert not AgentPlayer(shown, shown.options).gives_rewards, "they are not added"


def test_an_episode_goes_through_its_states(play, monkeypatch):
    seen: list[State] = []

    def note(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "state":
            seen.append(value)

    monkeypatch.setattr(ToolEpisode, "__setattr__", note, raising=False)
    play([Paying()], then(calls(("plain", {})), "end"))
    assert seen == [
        State.PENDING,
        State.RUNNING,
        State.TOOL_CALLING,
        State.RUNNING,
        State.COMPLETED,
    ]
    seen.clear()
    bad = Paying()
    bad.create = lambda **named: 1 / 0
    play([bad], then("end"))
    assert seen == [State.PENDING, State.FAILED]


def test_functions_of_a_file_are_called_with_what_the_model_says(play):
    def add(a: int, b: int = 2) -> int:
        """Add numbers.

        Args:
            a: A number.
            b: Another one.
        """
        return a + b

    script = then(calls(("add", {"a": 1}), ("add", {"a": 1, "b": 5}), ("add", {"c": 1})), "end")
    [sample], _ = play([FunctionTool(add), Paying()], script)
    first, second, third = results(sample)
    assert (first, second) == ("3", "6")
    assert re.fullmatch(
        r"Error: add.execute: TypeError: .*add\(\) got an unexpected keyword argument 'c'", third
    )
