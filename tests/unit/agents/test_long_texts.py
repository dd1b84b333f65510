"""Long texts stop nobody: they are tokenized beside the event loop, or not at all if they cannot fit."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from openppo.agents import renderer as rendering
from openppo.agents import tool_agent
from openppo.agents.gateway import server
from openppo.agents.gateway.server import Gateway
from openppo.agents.openrlhf import OpenRLHFAgent
from openppo.agents.renderer import Renderer
from openppo.agents.session import EpisodeEnded, Session, SessionSetup
from openppo.agents.tool_agent import ToolAgent
from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import encode_bare
from openppo.types import Completion, Ending, EpisodeInput, FinishReason, Prompt, SamplingParams
from tests.unit.agents.conftest import CHATML

LONG = "x" * 40_000
CALL = '<tool_call>{"name": "fetch", "arguments": {}}</tool_call>'
OPENRLHF = """
from openppo.agents.openrlhf import AgentInstanceBase

class AgentInstance(AgentInstanceBase):
    async def step(self, states, **kwargs):
        done = "x" * 40_000 in states["observation_text"]
        return {"rewards": 1.0, "environment_feedback": "x" * 40_000, "done": done}
"""


class Fetch(BaseTool):
    """A tool with a long result."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return LONG


async def asks(task: EpisodeInput, session: Session) -> float:
    await session.chat([{"role": "user", "content": LONG}])
    return 1.0


async def goes_on(task: EpisodeInput, session: Session) -> float:
    turn = await session.chat([{"role": "user", "content": "hello"}])
    await session.chat([*turn.messages, {"role": "user", "content": LONG}])
    return 1.0


def fetches(place: Path) -> ToolAgent:
    schema = OpenAIFunctionToolSchema(function={"name": "fetch"})
    return ToolAgent([Fetch({}, schema)], AgentConfig(max_tool_response_tokens=50_000))


def steps(place: Path) -> OpenRLHFAgent:
    (place / "agent.py").write_text(OPENRLHF)
    return OpenRLHFAgent(str(place / "agent.py"))


CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "a prompt": (lambda place: asks, {}),
    "a message behind a turn": (lambda place: goes_on, {}),
    "history from the template": (lambda place: goes_on, {"history": "template"}),
    "a check of the rendering": (lambda place: goes_on, {"check_rendering": "warn"}),
    "a result of a tool": (fetches, {"max_tool_response_tokens": 50_000}),
    "feedback of OpenRLHF's environment": (steps, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_event_loop_answers_while_a_text_is_tokenized(
    case, make_sampler, monkeypatch, tmp_path
):
    answers: list[bool] = []

    def answered(tokenizer: Any, text: str) -> list[int]:
        if len(text) >= len(LONG):
            answer = threading.Event()
            sampler.driver.loop.call_soon_threadsafe(answer.set)
            answers.append(answer.wait(2))
        return encode_bare(tokenizer, text)

    for module in (rendering, tool_agent):
        monkeypatch.setattr(module, "encode_bare", answered)
    agent, options = CASES[case]
    script = lambda prompt: CALL if "fetch" in prompt and LONG not in prompt else "yes"  # noqa: E731
    options = {"tool_parser": "hermes", **options}
    sampler = make_sampler(agent(tmp_path), script, longest=200_000, has_rewards=True, **options)
    (sample,) = sampler.sample([Prompt("hi", [5, 6])], SamplingParams(200))
    assert sample.episode.ending is Ending.COMPLETED and len(sample.segments) == 1
    assert answers and all(answers)


@pytest.fixture(scope="module")
def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and ChatML's."""
    special = ["<|im_start|>", "<|im_end|>"]
    units = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({unit: number for number, unit in enumerate(units)}, []))
    core.add_special_tokens(special)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHATML
    )


@pytest.fixture
def session(bytes_tokenizer, monkeypatch) -> Callable[..., Session]:
    """``session(longest, context, **options)``, in which no text over 100,000 characters may be tokenized."""

    def short(tokenizer: Any, text: str) -> list[int]:
        assert len(text) < 100_000, "a long text was tokenized"
        return encode_bare(tokenizer, text)

    async def generate(*request: Any) -> Completion:
        ids = encode_bare(bytes_tokenizer, "yes<|im_end|>")
        return Completion(ids, [-0.5] * len(ids), [0] * len(ids), FinishReason.STOP)

    def make(longest: int, context: int | None = None, **options: Any) -> Session:
        renderer = Renderer(bytes_tokenizer, "hermes", [bytes_tokenizer.eos_token_id])
        setup = SessionSetup(
            renderer, generate, SamplingParams(8), AgentConfig(**options), longest, context
        )
        return Session(setup, EpisodeInput(Prompt("p", [1]), seed=3))

    monkeypatch.setattr(rendering, "encode_bare", short)
    return make


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize(
    ("limits", "ending"), [((500,), Ending.EPISODE_LENGTH), ((900, 500), Ending.CONTEXT_FULL)]
)
def test_a_text_that_cannot_fit_ends_the_episode_untokenized(session, limits, ending, history):
    async def play() -> Session:
        played = session(*limits, history=history)
        turn = await played.chat([{"role": "user", "content": "hello"}])
        with pytest.raises(EpisodeEnded, match=ending.value):
            await played.chat([*turn.messages, {"role": "user", "content": "x" * 10**6}])
        with pytest.raises(EpisodeEnded):  # nor is anything rendered once it has ended
            await played.chat([{"role": "nobody", "content": object()}])
        return played

    played = asyncio.run(play())
    assert played.ending is ending and len(played.turns) == 1


def test_a_text_that_the_template_drops_does_not_count(session):
    thoughts = {"role": "assistant", "content": f"<think>{'x' * 10**6}</think>four"}
    messages = [
        {"role": "user", "content": "2 + 2"},
        thoughts,
        {"role": "user", "content": "sure?"},
    ]
    turn = asyncio.run(session(500).chat(messages))
    assert len(turn.prompt_ids) < 100


def test_a_request_over_the_context_gets_413(session, monkeypatch):
    monkeypatch.setattr(server, "_BYTES_BESIDE", 400)

    async def answers() -> list[tuple[int, str]]:
        played, gateway = session(500), Gateway()
        await gateway.start()
        url, received = f"{gateway.base_url(gateway.open(played))}/chat/completions", []
        async with aiohttp.ClientSession() as client:
            for length in (
                100,
                35_000,
                40_000,
            ):  # of 500 tokens of 12 characters, each 6 bytes in JSON
                message = {"role": "user", "content": "x" * length}
                async with client.post(url, json={"messages": [message]}) as answer:
                    body = await answer.json()
                    received.append((answer.status, body.get("error", {}).get("message", "")))
        await gateway.stop()
        return received

    fits, ended, refused = asyncio.run(answers())
    assert fits == (200, "")
    assert ended == (400, "the episode has ended (episode_length): the model answers no more.")
    assert refused == (
        413,
        "the request has over 0.0347 MiB, and the policy reads 500 tokens: send less.",
    )


def test_images_have_room_beside_the_context(session, monkeypatch):
    monkeypatch.setattr(server, "_MOST_BYTES", 12_345)
    setup = session(10).setup
    assert (
        server.most_bytes(replace(setup, renderer=replace(setup.renderer, vision=object())))
        == 12_345
    )
    assert server.most_bytes(setup) == 12_345  # the lower of both
    monkeypatch.setattr(server, "_BYTES_BESIDE", 0)
    assert server.most_bytes(setup) == 10 * 12 * 6


def test_a_long_text_does_not_wait_for_a_huge_one(bytes_tokenizer):
    renderer, ended = (
        Renderer(bytes_tokenizer, "hermes", [bytes_tokenizer.eos_token_id]),
        threading.Event(),
    )

    async def both() -> list[Any]:
        huge = asyncio.create_task(renderer.aside(lambda: ended.wait(2), 10**7))
        await asyncio.sleep(0)
        return [await renderer.aside(ended.set, 10**5), await huge]

    assert asyncio.run(both()) == [None, True]


def test_a_tokenizer_with_stored_truncation_serves_two_threads(bytes_tokenizer):
    core = Tokenizer.from_str(bytes_tokenizer.backend_tokenizer.to_str())
    core.enable_truncation(10)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    renderer = Renderer(tokenizer, "hermes", [tokenizer.eos_token_id])

    async def both() -> list[int]:
        work = asyncio.create_task(
            renderer.aside(lambda: renderer.encode("word " * 40_000), 200_000)
        )
        short = []
        while not work.done():
            short.append(len(renderer.encode("hello")))
            await asyncio.sleep(0)
        return [len(await work), *set(short)]

    assert asyncio.run(both()) == [200_000, 5]
