"""The gateway over raw HTTP: each answer is what OpenAI's documentation says, each turn what the engine sampled."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from openppo.agents.gateway import server
from openppo.agents.gateway.server import Gateway
from openppo.agents.renderer import Renderer
from openppo.agents.session import Session, SessionSetup
from openppo.config.agents import AgentConfig
from openppo.rollout.driver import EngineDriver
from openppo.types import Ending, EpisodeInput, Prompt, SamplingParams
from tests.unit.agents.conftest import ScriptedEngine

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}, "strict": True},
}
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]


class World:
    """A gateway and its client in the loop of a driver, whose engine steps in the test's thread."""

    def __init__(self, tokenizer: Any, script: Callable[[str], str]) -> None:
        self.tokenizer, self.engine = tokenizer, ScriptedEngine(tokenizer, script)
        self.driver = EngineDriver(self.engine)

    def session(self, longest: int = 4000, **options: Any) -> Session:
        renderer = Renderer(self.tokenizer, "hermes", [self.tokenizer.eos_token_id])
        params = SamplingParams(options.pop("max_new_tokens", 200), temperature=0.7)
        setup = SessionSetup(
            renderer, self.driver.generate, params, AgentConfig(**options), longest=longest
        )
        return Session(setup, EpisodeInput(Prompt("p", [1]), seed=3))

    def run(self, play: Callable[["Client"], Awaitable[Any]]) -> Any:
        """The result of ``play`` with a client of a gateway that ends with it."""

        async def work() -> Any:
            gateway = Gateway()
            await gateway.start()
            async with aiohttp.ClientSession() as http:
                try:
                    return await play(Client(gateway, http, self))
                finally:
                    await gateway.stop()

        return self.driver.drive(work())


class Client:
    """Requests of one episode."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession, world: World) -> None:
        self.gateway, self.http, self.world = gateway, http, world
        self.session = world.session()
        self.key = gateway.open(self.session)

    async def post(self, end: str, body: Any, **headers: str) -> Any:
        """JSON of the answer, or the events of a stream; an error as (status, message)."""
        async with self.http.post(
            f"{self.gateway.base_url(self.key)}/{end}", json=body, headers=headers
        ) as got:
            text = await got.text()
            if got.status != 200:
                assert got.headers["x-should-retry"] == "false"
                return got.status, json.loads(text)["error"]["message"]
            if got.content_type == "text/event-stream":
                return [
                    line.removeprefix("data: ")
                    for line in text.split("\n")
                    if line.startswith("data: ")
                ]
            return json.loads(text)

    async def chat(self, messages: list[Any] = HELLO, **more: Any) -> Any:
        return await self.post("chat/completions", {"model": "any", "messages": messages, **more})


@pytest.fixture
def world(chat_tokenizer: Any) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(script: Callable[[str], str] = lambda prompt: "well met") -> World:
        made.append(World(chat_tokenizer, script))
        return made[-1]

    yield make
    for each in made:
        each.driver.close()


def test_a_completion_is_the_sampled_turn(world):
    here = world(lambda prompt: "<think>hm</think>" + ("5" if "tool_response" in prompt else CALL))

    async def play(client: Client) -> Any:
        called = await client.chat(tools=[TOOL], n=2, logprobs=True, top_logprobs=3)
        assert len(called["choices"]) == 2
        message = called["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        return called, await client.chat([*HELLO, message, result], tools=[TOOL]), client.session

    called, answered, session = here.run(play)
    choice = called["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("add", {"a": 1})
    assert choice["message"]["reasoning_content"] == "hm"
    prompt, sampled = here.engine.journal[0]
    assert called["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 2 * len(sampled),
        "total_tokens": len(prompt) + 2 * len(sampled),
    }
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == f"<think>hm</think>{CALL}<|im_end|>"
    assert {token["logprob"] for token in tokens} == {-0.5}
    assert not any(token["top_logprobs"] for token in tokens)
    assert (
        answered["choices"][0]["message"]["content"] == "5"
        and answered["choices"][0]["finish_reason"] == "stop"
    )
    assert session.counts["bridged_turns"] == 1
    assert [
        (turn.prompt_ids, turn.completion.token_ids) for turn in session.turns
    ] == here.engine.journal


def test_a_stream_has_the_completion_in_pieces(world):
    here = world(lambda prompt: "<think>so so</think>I add  1" + CALL)
    asked = {
        "tools": [TOOL],
        "stream": True,
        "logprobs": True,
        "n": 2,
        "stream_options": {"include_usage": True},
    }

    async def play(client: Client) -> Any:
        return await client.chat(**asked), client.session

    (*chunks, done), session = here.run(play)
    assert done == "[DONE]"
    *chunks, last = map(json.loads, chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == sum(
        len(turn.completion.token_ids) for turn in session.turns
    )
    assert all(chunk["usage"] is None for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    for index in (0, 1):
        said, end = [
            chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index
        ]
        delta = said["delta"]
        assert (delta["role"], delta["content"], delta["reasoning_content"]) == (
            "assistant",
            "I add  1",
            "so so",
        )
        [call] = delta["tool_calls"]
        assert call["index"] == 0 and call["function"]["name"] == "add" and call["id"]
        assert (
            end["delta"] == {}
            and end["finish_reason"] == "tool_calls"
            and end["logprobs"]["content"]
        )
        assert said["finish_reason"] is None


def test_a_stream_has_no_usage_unless_it_is_asked_for(world):
    async def play(client: Client) -> Any:
        return await client.chat(stream=True)

    assert all("usage" not in json.loads(chunk) for chunk in world().run(play)[:-1])


RESPONSE_EVENTS = """
created in_progress
output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done output_item.done
output_item.added content_part.added output_text.delta output_text.done content_part.done output_item.done
output_item.added function_call_arguments.delta function_call_arguments.done output_item.done
completed
""".split()


def test_a_response_has_the_whole_sequence_of_events(world):
    here = world(lambda prompt: "<think>hm</think>I add" + CALL)
    flat = {"type": "function", "strict": True, **TOOL["function"]}

    async def play(client: Client) -> Any:
        body = {
            "model": "any",
            "input": "hello",
            "instructions": "be short",
            "tools": [flat],
            "stream": True,
        }
        return await client.post("responses", body)

    events = list(map(json.loads, here.run(play)))
    assert [event["type"].removeprefix("response.") for event in events] == RESPONSE_EVENTS
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert (
        events[0]["response"]["id"] == final["id"]
        and events[0]["response"]["status"] == "in_progress"
    )
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert (
        "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == "I add"
    )
    assert "be short" in here.tokenizer.decode(here.engine.journal[0][0])


@pytest.mark.parametrize("stateful", [False, True])
def test_items_of_a_response_continue_its_tokens(world, stateful):
    here = world(
        lambda prompt: "<think>hm</think>" + ("5" if "tool_response" in prompt else f"I add{CALL}")
    )

    async def play(client: Client) -> Any:
        body = {"tools": [TOOL], "instructions": "be short"}
        start = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
        called = await client.post("responses", {**body, "input": start})
        result = {
            "type": "function_call_output",
            "call_id": called["output"][-1]["call_id"],
            "output": "3",
        }
        if stateful:
            more = {"input": [result], "previous_response_id": called["id"]}
        else:
            more = {"input": [*start, *called["output"], result]}
        return await client.post("responses", {**body, **more}), client.session

    answered, session = here.run(play)
    [_, message] = answered["output"]
    assert message["content"][0]["text"] == "5" and answered["status"] == "completed"
    assert session.counts["bridged_turns"] == 1 and session.counts["rerendered_turns"] == 0
    assert (
        session.turns[1].prompt_ids[: len(session.turns[0].token_ids)] == session.turns[0].token_ids
    )
    whole = session.setup.renderer.render(session.turns[1].messages[:-1], session.turns[1].tools)
    assert whole != session.turns[1].prompt_ids, "rendering anew would have cut the thoughts"


def test_a_limit_ends_a_turn_as_length(world):
    async def play(client: Client) -> Any:
        chat = await client.chat(max_completion_tokens=3, max_tokens=50)
        response = await client.post("responses", {"input": "hello", "max_output_tokens": 3})
        return chat, response, await client.chat(max_tokens=10_000)

    chat, response, whole = world(lambda prompt: "a" * 300).run(play)
    assert (
        chat["choices"][0]["finish_reason"] == "length" and chat["usage"]["completion_tokens"] == 3
    )
    assert (
        response["status"] == "incomplete" and response["output"][0]["content"][0]["text"] == "aaa"
    )
    assert whole["usage"]["completion_tokens"] == 200, "the run's limit"


def test_text_ends_before_a_stop_that_the_turn_has(world):
    async def play(client: Client) -> Any:
        return await client.chat(stop=["Obs:", "zz"]), client.session

    got, session = world(lambda prompt: "do it Obs: it is done").run(play)
    assert (
        got["choices"][0]["message"]["content"] == "do it"
        and got["choices"][0]["finish_reason"] == "stop"
    )
    assert session.setup.renderer.decode(session.turns[0].completion.token_ids) == "do it Obs:"


def in_parts(kind: str, **more: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, **more}]}]


def calling(function: Any) -> list[Any]:
    return [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]},
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "schema"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"logprobs": True, "top_logprobs": 21}, "between 0 and 20"),
        ({"messages": in_parts("image_url", image_url={"url": "x"})}, "no image: send a data URL"),
        (
            {"messages": in_parts("image_url", image_url={"url": "data:image/png;base64,AA"})},
            "reads none here",
        ),
        ({"messages": in_parts("input_audio", input_audio={})}, "texts and images, and not"),
        ({"messages": [{"role": "user", "content": "half \ud800"}]}, "surrogate"),
        ({"messages": [{"role": "robot"}]}, "robot"),
        ({"messages": []}, "at least one"),
        ({"messages": None}, "OpenAI's form"),
        ({"messages": [{"role": "user", "content": 5}]}, "5 stands where a text is needed"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": ["x"]}]},
            "OpenAI's form",
        ),
        ({"messages": calling({"arguments": "{}"})}, "name"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "function_call": {"name": "f", "arguments": "{}"},
                    }
                ]
            },
            "function_call is obsolete; use tool_calls",
        ),
        (
            {"messages": calling({"name": None, "arguments": "{}"})},
            "None stands where a text is needed",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": [1]}},
                    }
                ]
            },
            "properties",
        ),
        ({"tools": 5}, "a list is needed"),
        ({"stream": True, "stream_options": 5}, "stream_options 5"),
        ({"n": 129}, "between 1 and 128"),
        ({"stop": [1]}, "stop [1]"),
        ({"stop": 1}, "stop 1"),
        ({"tools": [{"type": "web_search"}]}, "no function"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"n": 1.5}, "n 1.5"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_what_cannot_be_done_is_refused_without_a_turn(world, body, said):
    here = world()

    async def play(client: Client) -> Any:
        return await client.chat(**{"messages": HELLO, **body}), client.session.turns

    (status, message), turns = here.run(play)
    assert status == 400 and said in message and not turns and not here.engine.journal


def test_a_response_of_another_form_is_refused_without_a_turn(world):
    here = world()
    bodies = [
        {},
        {"input": []},
        {"input": 5},
        {"input": ["x"]},
        {"input": "x", "include": 5},
        [1],
        None,
    ]
    bodies += [
        {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
        {"input": "x", "tools": [5]},
    ]

    async def play(client: Client) -> Any:
        return [await client.post("responses", body) for body in bodies]

    assert [status for status, _ in here.run(play)] == [400] * len(
        bodies
    ) and not here.engine.journal


def test_what_clients_send_by_themselves_is_accepted(world, caplog):
    advisory = {
        "seed": 1,
        "user": "u",
        "metadata": {},
        "parallel_tool_calls": False,
        "tool_choice": "required",
    }
    neutral = {
        "presence_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "stop": None,
        "n": None,
    }

    async def play(client: Client) -> Any:
        for _ in range(2):
            await client.chat(
                **advisory, **neutral, tools=[TOOL], temperature=0, top_p=1.0, top_k=None
            )
        for off in (0, -1):  # as transformers and vLLM write it
            await client.chat(top_k=off)
        await client.chat(temperature=0.7)
        return client.session

    session = world().run(play)
    assert session.counts["sampling_overridden"] == 2 and len(session.turns) == 5
    assert "strict" not in json.dumps(session.turns[0].tools)
    assert [record.message.split(" have ")[1].split(",")[0] for record in caplog.records] == [
        "temperature"
    ]


def test_keys_are_those_of_open_episodes(world):
    async def play(client: Client) -> Any:
        root, body = f"{client.gateway.address}/v1", {"messages": HELLO}
        bearers = {}
        for key in (client.key, "sk-other", ""):
            async with client.http.post(
                f"{root}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as got:
                bearers[key] = got.status
        client.gateway.close(client.key)
        return bearers, client.key, await client.chat()

    bearers, key, closed = world().run(play)
    assert bearers == {key: 200, "sk-other": 401, "": 401}
    assert closed[0] == 401


def test_models_are_listed_to_those_with_a_key(world):
    async def play(client: Client) -> Any:
        async with client.http.get(f"{client.gateway.base_url(client.key)}/models") as got:
            listed = await got.json()
        async with client.http.get(f"{client.gateway.base_url('sk-other')}/models") as got:
            return listed, got.status

    listed, status = world().run(play)
    assert [model["object"] for model in listed["data"]] == ["model"] and status == 401


def test_an_ended_episode_answers_no_more(world):
    here = world()

    async def play(client: Client) -> Any:
        client.session = here.session(max_turns=1)
        client.key = client.gateway.open(client.session)
        await client.chat()
        return await client.chat(), await client.chat(stream=True)

    for status, message in here.run(play):
        assert status == 400 and "max_turns" in message


def test_an_over_long_prompt_ends_the_episode(world):
    async def play(client: Client) -> Any:
        return await client.chat([{"role": "user", "content": "x" * 5000}]), client.session.ending

    (status, message), ending = world().run(play)
    assert status == 400 and "episode_length" in message and ending is Ending.EPISODE_LENGTH


def test_a_client_that_reads_no_answer_is_hung_up_on(world, monkeypatch):
    monkeypatch.setattr(server, "_SECONDS_TO_SEND", 0.1)
    body = json.dumps({"messages": HELLO, "model": "m" * 12_000_000}).encode()  # in the answer, too

    async def play(client: Client) -> Any:
        host, port = client.gateway.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /s/{client.key}/v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        while not client.session.turns:
            await asyncio.sleep(0.01)
        (answer,) = client.gateway._clients[client.key].answers.values()
        while answer.waiting:
            await asyncio.sleep(0.01)
        assert len(await reader.read()) < len(body)
        writer.close()
        return client.session

    (turn,) = world().run(play).turns
    assert not turn.trained


def test_rewards_are_posted_beside_the_address(world):
    async def play(client: Client) -> Any:
        turn = (await client.chat())["id"]
        await client.post("reward", {"reward": 0.5})
        await client.post("reward", {"reward": 1})
        await client.post("reward", {"reward": -2.0, "turn": turn})
        bad = (None, "1", [1], {"a": float("nan")}, 10**400)
        refused = [await client.post("reward", {"reward": reward}) for reward in bad]
        refused += [
            await client.post("reward", body) for body in ([1], 5, {"reward": 1, "turn": 5})
        ]
        refused.append(await client.post("reward", {"reward": 1, "turn": "chatcmpl-0"}))
        done = await client.post("complete", {"reward": {"style": 0.25}})
        assert await client.post("complete", {}) == done, "it may be said twice"
        return refused, await client.chat(), client.session

    refused, after, session = world().run(play)
    assert [status for status, _ in refused] == [400] * 8 + [404]
    assert after[0] == 400 and "completed" in after[1]
    assert session.rewards == {"reward": 1.0, "style": 0.25} and session.ending is Ending.COMPLETED
    assert session.turns[0].reward == -2.0


def endless(world: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> World:
    """Its turns would take a minute."""
    here = world(lambda prompt: "a" * 60_000)
    step = here.engine.step
    monkeypatch.setattr(here.engine, "step", lambda: (time.sleep(0.001), step()))
    return here


RETRY = {"x-stainless-retry-count": "1"}


def test_a_retry_joins_the_request_under_way(world):
    here = world()

    async def play(client: Client) -> Any:
        body = {"messages": HELLO}
        posts = (client.post("chat/completions", body, **headers) for headers in ({}, RETRY))
        return await asyncio.gather(*posts), client.session

    (first, again), session = here.run(play)
    assert first == again and len(session.turns) == 1 and len(here.engine.journal) == 1
    assert session.counts["retries"] == 1


def test_a_retry_is_answered_from_the_record(world):
    here = world()

    async def play(client: Client) -> Any:
        body = {"messages": HELLO}
        first = await client.post("chat/completions", body)
        again = await client.post("chat/completions", body, **RETRY)
        return first, again, await client.post("chat/completions", body), client.session

    first, again, anew, session = here.run(play)
    assert first == again and anew["id"] != first["id"]
    assert len(session.turns) == 2 and len(here.engine.journal) == 2


def test_a_turn_that_nobody_received_is_not_trained_on(world, monkeypatch):
    send = server._send

    async def lose(endpoint: Any, request: Any, answer: Any, renderer: Any) -> Any:
        await asyncio.wait([answer.work])
        raise ConnectionResetError

    async def play(client: Client) -> Any:
        body = {"messages": HELLO}
        monkeypatch.setattr(server, "_send", lose)
        async with client.http.post(
            f"{client.gateway.base_url(client.key)}/chat/completions", json=body
        ) as got:
            assert not await got.read()
        lost = [turn.trained for turn in client.session.turns]
        monkeypatch.setattr(server, "_send", send)
        await client.post("chat/completions", body, **RETRY)
        return lost, [turn.trained for turn in client.session.turns]

    assert world().run(play) == ([False], [True])


def test_a_client_that_hangs_up_frees_its_row(world, monkeypatch):
    here = endless(world, monkeypatch)

    async def play(client: Client) -> Any:
        client.session = here.session(longest=10**6, max_new_tokens=10**5)
        client.key = client.gateway.open(client.session)
        for stream in (False, True):
            asked = asyncio.ensure_future(client.chat(stream=stream, n=2))
            while len(here.engine.running) < 2:
                await asyncio.sleep(0.001)
            asked.cancel()
            while here.engine.running:
                await asyncio.sleep(0.001)
        return client.session

    session = here.run(play)
    assert not session.turns and not here.engine.journal, "no row ran to its end"


def test_of_several_choices_none_is_trained_on_unless_all_are_received(world, monkeypatch):
    here = endless(world, monkeypatch)
    lengths = iter([1, 60_000])
    here.engine.script = lambda prompt: "a" * next(lengths)

    async def play(client: Client) -> Any:
        client.session = here.session(longest=10**6, max_new_tokens=10**5)
        client.key = client.gateway.open(client.session)
        asked = asyncio.ensure_future(client.chat(n=2))
        while not client.session.turns:
            await asyncio.sleep(0.001)
        asked.cancel()
        while here.engine.running:
            await asyncio.sleep(0.001)
        return client.session.turns

    [turn] = here.run(play)
    assert not turn.trained


def test_requests_that_arrive_together_are_read_in_turn(world, monkeypatch):
    here, passes, begun = world(), [0], []

    async def chat(self: Session, *args: Any, **limits: Any) -> Any:
        begun.append(passes[0])
        return await Session.chat(self, *args, **limits)

    async def play(client: Client) -> None:
        async def count() -> None:
            while True:
                passes[0] += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(client.session, "chat", chat.__get__(client.session))
        counter = asyncio.ensure_future(count())
        await asyncio.gather(*(client.chat() for _ in range(50)))
        counter.cancel()

    here.run(play)
    assert len(set(begun)) == 50, "no two in the same pass of the loop"


def test_health_is_answered_while_the_engine_steps(world, monkeypatch):
    here, gate = world(), threading.Event()
    step, inside = here.engine.step, threading.Event()
    opened: list[bool] = []

    def blocked() -> None:
        inside.set()
        opened.append(gate.wait(30))
        step()

    monkeypatch.setattr(here.engine, "step", blocked)

    async def play(client: Client) -> Any:
        asked = asyncio.ensure_future(client.chat())
        while not inside.is_set():
            await asyncio.sleep(0.001)
        async with client.http.get(f"{client.gateway.address}/healthz") as got:
            status = got.status
        gate.set()
        await asked
        return status

    assert here.run(play) == 200 and opened[0], "the step ended after the answer"


def test_what_is_under_way_ends_with_its_key(world, monkeypatch):
    here = endless(world, monkeypatch)

    async def play(client: Client) -> Any:
        client.session = here.session(longest=10**6, max_new_tokens=10**5)
        client.key = client.gateway.open(client.session)
        asked = asyncio.ensure_future(client.chat())
        while not here.engine.running:
            await asyncio.sleep(0.001)
        client.gateway.close(client.key)
        return await asked, client.session

    (status, message), session = here.run(play)
    assert status == 400 and "ended" in message and not session.turns and not here.engine.running


def test_errors_have_openais_form(world):
    async def play(client: Client) -> Any:
        errors = []
        url = client.gateway.base_url(client.key)
        for end, data in (
            ("chat/completions", b"{"),
            ("chat/completions", b"[]"),
            ("embeddings", b"{}"),
        ):
            async with client.http.post(f"{url}/{end}", data=data) as got:
                errors.append((got.status, set((await got.json())["error"])))
        return errors

    fields = {"message", "type", "param", "code"}
    assert world().run(play) == [(400, fields), (400, fields), (404, fields)]


def test_a_port_in_use_is_said_with_the_remedy():
    async def play() -> None:
        taken = Gateway()
        await taken.start()
        with pytest.raises(ValueError, match=r"^--port \d+: cannot listen there .* Choose another"):
            Gateway(port=int(taken.address.rpartition(":")[2]))
        await taken.stop()

    asyncio.run(play())
