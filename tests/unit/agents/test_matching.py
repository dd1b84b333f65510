"""The recorded turn is found whatever a client made of its message, and no other."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from openppo.agents.renderer import fingerprints
from tests.unit.agents.test_sessions import play

PROPERTIES = {"q": {"type": "string"}, "n": {"type": "number"}}
SCHEMA = {"type": "object", "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "", "parameters": SCHEMA}}
]
CALL = '<tool_call>{"name": "find", "arguments": {"q": "a b", "n": 2.0}}</tool_call>'
Message = dict[str, Any]
Echo = Callable[[Message], Message]


def with_arguments(message: Message, arguments: Any) -> Message:
    [call] = message["tool_calls"]
    return {
        **message,
        "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}],
    }


def without(message: Message, *names: str) -> Message:
    return {name: value for name, value in message.items() if name not in names}


ECHOES: dict[str, Echo] = {
    "as it was": lambda message: message,
    "openai": lambda message: {
        **message,
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
    },
    "langchain": lambda message: {
        **without(message, "reasoning_content"),
        "content": None,
        "name": None,
    },
    "litellm": lambda message: {
        **without(message, "content"),
        "provider_specific_fields": {"token_ids": [1]},
    },
    "no reasoning": lambda message: without(message, "reasoning_content"),
    "empty content": lambda message: {**message, "content": ""},
    "no parts": lambda message: {**message, "content": []},
    "an empty part": lambda message: {**message, "content": [{"type": "text", "text": ""}]},
    "other spaces": lambda message: with_arguments(message, '{"q":"a b","n":2.0}'),
    "other order": lambda message: with_arguments(message, '{"n": 2.0, "q": "a b"}'),
    "escapes": lambda message: with_arguments(message, '{"q": "\\u0061 b", "n": 2.0}'),
    "an object": lambda message: with_arguments(message, {"q": "a b", "n": 2.0}),
    "an index": lambda message: {
        **message,
        "tool_calls": [{"index": 0, **message["tool_calls"][0]}],
    },
}
EDITS: dict[str, Echo] = {
    "text": lambda message: {**message, "content": "I look."},
    "an argument": lambda message: with_arguments(message, '{"q": "a c", "n": 2.0}'),
    "a space in it": lambda message: with_arguments(message, '{"q": "a  b", "n": 2.0}'),
    "another argument": lambda message: with_arguments(message, '{"q": "a b", "n": 2.0, "m": 1}'),
    "no calls": lambda message: without(message, "tool_calls"),
    "two calls": lambda message: {**message, "tool_calls": message["tool_calls"] * 2},
    "role": lambda message: {**message, "role": "user"},
}


def bridged_turns(
    make_sampler: Any, echo: Echo, opening: Echo = lambda message: message
) -> tuple[float, float]:
    """Turns of an agent that were bridged and rendered anew, where its client sends ``echo`` of the first answer."""

    async def act(task: Any, session: Any) -> float:
        system = {"role": "system", "content": "Be short."}
        first = await session.chat([system, *task.messages], TOOLS)
        assert first.tool_calls and first.message["reasoning_content"] == "hm"
        result = {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "4"}
        await session.chat([opening(system), *task.messages, echo(first.message), result], TOOLS)
        return 1.0

    _, metrics = play(
        make_sampler(act, lambda prompt: f"<think>hm</think>{CALL}", tool_parser="hermes"),
        1,
        1,
        200,
    )
    return metrics["agent/bridged_turns"], metrics["agent/rerendered_turns"]


@pytest.mark.parametrize("name", ECHOES)
def test_an_echo_of_any_client_is_recognized(make_sampler, name):
    assert bridged_turns(make_sampler, ECHOES[name]) == (1, 0)


def test_parts_are_as_good_as_a_text(make_sampler):
    parts: Echo = lambda message: {**message, "content": [{"type": "text", "text": "Be short."}]}  # noqa: E731
    assert bridged_turns(make_sampler, ECHOES["openai"], opening=parts) == (1, 0)


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_answer_is_not_taken_for_the_recorded_one(make_sampler, name):
    assert bridged_turns(make_sampler, EDITS[name]) == (0, 1)


def test_another_system_text_is_another_conversation(make_sampler):
    edit: Echo = lambda message: {**message, "content": "Be long."}  # noqa: E731
    assert bridged_turns(make_sampler, ECHOES["openai"], opening=edit) == (0, 1)


def test_ids_tell_equal_answers_apart(make_sampler):
    """Two branches that said the same are continued each in its own tokens."""

    async def act(task: Any, session: Any) -> float:
        turns = [await session.chat(task.messages, TOOLS) for _ in range(2)]
        for turn in turns:
            result = {"role": "tool", "tool_call_id": turn.tool_calls[0]["id"], "content": "4"}
            next_turn = await session.chat([*task.messages, turn.message, result], TOOLS)
            assert next_turn.parent is turn
        return 1.0

    [*_], metrics = play(make_sampler(act, lambda prompt: CALL, tool_parser="hermes"), 1, 1, 200)
    assert (metrics["agent/bridged_turns"], metrics["agent/completed"]) == (2, 1)


@pytest.mark.parametrize(
    "arguments", ['{"a": 1e999}', '{"a": NaN}', "{", "[" * 100_000, "", "null", None, 3, ["x"]]
)
def test_any_arguments_have_a_hash(arguments):
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert len(set(fingerprints([{"role": "assistant", "tool_calls": [call]}], []))) == 2


def test_the_order_of_a_schemas_keys_does_not_count():
    other = json.loads(json.dumps(TOOLS[0], sort_keys=True))
    assert fingerprints([], TOOLS) == fingerprints([], [other]) != fingerprints([], [])
