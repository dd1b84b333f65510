"""The gateway over raw HTTP: each answer is what OpenAI's documentation says, each turn what the engine sampled."""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from openppo.agents.driver import EngineDriver
from openppo.agents.gateway.server import Gateway
from openppo.agents.parsers import PARSERS, Parsed, ToolCall
from openppo.agents.renderer import Renderer
from openppo.agents.session import Session, SessionSetup, Task
from openppo.config.agents import AgentConfig
from openppo.types import Prompt, SamplingParams
from tests.unit.agents.conftest import ScriptedEngine

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]


class World:
    """A gateway and its client in the loop of a driver, whose engine steps in the test's thread."""

    def __init__(self, tokenizer: Any, script: Callable[[str], str]) -> None:
        self.tokenizer, self.engine = tokenizer, ScriptedEngine(tokenizer, script)
        self.driver = EngineDriver(self.engine)

    def session(self, **options: Any) -> Session:
        renderer = Renderer(self.tokenizer, "hermes", [self.tokenizer.eos_token_id])
        params = SamplingParams(options.pop("max_new_tokens", 200), temperature=0.7)
        setup = SessionSetup(renderer, self.driver.generate, params, AgentConfig(**options), longest=4000)
        return Session(setup, Task(Prompt("p", [1]), seed=3))

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
        async with self.http.post(f"{self.gateway.base_url(self.key)}/{end}", json=body, headers=headers) as got:
            text = await got.text()
            if got.status != 200:
                assert got.headers["x-should-retry"] == "false"
                return got.status, json.loads(text)["error"]["message"]
            if got.content_type == "text/event-stream":
                return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
            return json.loads(text)

    async def chat(self, messages: list[Any] = HELLO, **more: Any) -> Any:
        return await self.post("chat/completions", {"model": "any", "messages": messages, **more})


@pytest.fixture(autouse=True)
def _hermes(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str, tools: Any) -> Parsed:
        before, mark, call = text.partition("<tool_call>")
        if not mark:
            return Parsed(text, [])
        read = json.loads(call.partition("</tool_call>")[0])
        return Parsed(before, [ToolCall(read["name"], read["arguments"])])

    monkeypatch.setitem(PARSERS, "hermes", parse)


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
    assert all(len(token["top_logprobs"]) == 1 for token in tokens)
    assert answered["choices"][0]["message"]["content"] == "5" and answered["choices"][0]["finish_reason"] == "stop"
    assert session.counts["bridged_turns"] == 1
    assert [(turn.prompt_ids, turn.completion.token_ids) for turn in session.turns] == here.engine.journal
