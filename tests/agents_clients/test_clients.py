"""Programs of real client packages, unchanged, as agents: every token that is trained on is one that was sampled."""

import asyncio
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from openppo.agents import Agent, Session
from openppo.agents.gateway.server import Gateway
from openppo.tracking import Metrics
from openppo.types import EpisodeInput, Prompt, Sample, SamplingParams, segments_of

PROGRAMS = Path(__file__).parent / "programs"
QUICK_STARTS = """
openai quick_start.py openai talks~like~a~pirate
openai quick_start.py openai Talk~like~a~pirate
openai quick_start.py openai disestablishmentarianism
openai quick_start.py openai stream~=~client.responses.create
openai quick_start.py openai json_object
openai-agents quick_start.py openai-agents Assistant
langchain quick_start.py langchain-openai max_retries=2 love~programming print(chunk.text GetWeather
smolagents quick_start.py smolagents leopard
"""
"""Client, file and arguments, with ~ for a blank."""
WITH_TOOLS = """
openai openai_tools.py chat
openai openai_tools.py chat_stream
openai openai_tools.py responses
openai openai_tools.py responses_stream
openai-agents agents_tools.py responses whole
openai-agents agents_tools.py responses stream
openai-agents agents_tools.py chat_completions whole
openai-agents agents_tools.py chat_completions stream
langchain langchain_tools.py whole
langchain langchain_tools.py stream
smolagents smolagents_tools.py
"""
LINEAR = ("openai", "openai-agents", "langchain")
"""Clients that send a conversation back as it was."""
N_CALLS = 3


def policy(prompt: str) -> str:
    """What the model says: a few calls where there are tools, then an answer. Its spelling is not the template's."""
    n_turns = prompt.count("<|im_start|>assistant\n") - 1
    if "<code>" in prompt:
        return "Thought: I know.\n<code>\nfinal_answer(9)\n</code>"
    if n_turns < N_CALLS and '"get_weather"' in prompt:
        return '<think>where?</think><tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>'
    if '"final_answer"' in prompt:
        return '<tool_call>{"name":"final_answer","arguments":{"answer":"It is fair."}}</tool_call>'
    return "<think>so</think>It is fair."


class ClientAgent(Agent):
    """Runs the program of a row against a gateway."""

    def __init__(self, python: str) -> None:
        self.python, self.gateway, self.at_once = python, Gateway(), asyncio.Semaphore(3)
        self.ended: list[tuple[Mapping[str, Any], Session, str]] = []

    async def start(self) -> None:
        await self.gateway.start()

    async def stop(self) -> None:
        await self.gateway.stop()

    async def run(self, task: EpisodeInput, session: Session) -> float:
        async with self.at_once:
            key = self.gateway.open(session)
            address = {"OPENAI_BASE_URL": self.gateway.base_url(key), "OPENAI_API_KEY": key}
            more = {
                "OPENAI_AGENTS_DISABLE_TRACING": "1",
                "PATH": os.environ["PATH"],
                "HOME": os.environ["HOME"],
            }
            command = [self.python, str(PROGRAMS / task["file"]), *task["arguments"]]
            loop = asyncio.get_running_loop()
            done = await loop.run_in_executor(
                None,
                lambda: subprocess.run(
                    command, env=address | more, capture_output=True, text=True, timeout=300
                ),
            )
            self.gateway.close(key)
        assert done.returncode == 0, f"{command[1:]}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        self.ended.append((task.prompt.row, session, done.stdout))
        return 1.0


def prompts(lines: str, times: int = 1) -> list[Prompt]:
    made = []
    for line in lines.split("\n")[1:-1] * times:
        client, file, *arguments = line.split()
        row = {
            "client": client,
            "file": file,
            "arguments": [each.replace("~", " ") for each in arguments],
        }
        made.append(Prompt(line, [5], row=row))
    return made


def table(agent: ClientAgent) -> tuple[str, dict[str, float]]:
    """What became of the turns of each client, and the share of continued turns among those with a history."""
    rows = defaultdict(lambda: [0] * 6)
    for row, session, _ in agent.ended:
        renderer = session.setup.renderer
        differ = sum(
            turn.prompt_ids != renderer.render(turn.messages, turn.tools) for turn in session.turns
        )
        sampled = sum(len(turn.completion.token_ids) for turn in session.turns)
        bridged, anew = session.counts["bridged_turns"], session.counts["rerendered_turns"]
        found = (1, len(session.turns), bridged, anew, differ, sampled)
        rows[row["client"]] = list(map(sum, zip(rows[row["client"]], found, strict=True)))
    head = f"{'client':<14}{'episodes':>9}{'turns':>7}{'bridged':>9}{'anew':>6}{'rendering differs':>19}{'sampled':>9}"
    lines = [
        f"{name:<14}{n:>9}{t:>7}{b:>9}{a:>6}{d:>19}{s:>9}"
        for name, (n, t, b, a, d, s) in sorted(rows.items())
    ]
    return "\n".join(["", head, *lines]), {
        name: b / max(1, a + b) for name, (_, _, b, a, _, _) in rows.items()
    }


def play(make_sampler: Any, agent: ClientAgent, lines: str, times: int = 1) -> list[Sample]:
    """Samples of programs, each of whose turns is in the engine's own journal."""
    sampler = make_sampler(agent, policy, longest=200_000, agent_timeout=3600.0)
    tasks = prompts(lines, times)
    sampled = sampler.sample(
        tasks, SamplingParams(1000), 1, seed=1, first_group=0, metrics=Metrics()
    )
    assert len(agent.ended) == len(tasks), "each episode ended as completed"
    turns = [turn for _, session, _ in agent.ended for turn in session.turns]
    journal = sampler.engine.journal
    assert sorted((turn.prompt_ids, turn.completion.token_ids) for turn in turns) == sorted(journal)
    assert all(turn.trained for turn in turns)
    assert sum(sample.n_actions for sample in sampled) == sum(len(ids) for _, ids in journal)
    return sampled


def check_tools(make_sampler: Any, client_python: str, capsys: Any, times: int) -> None:
    agent = ClientAgent(client_python)
    sampled = play(make_sampler, agent, WITH_TOOLS, times)
    shown, bridged = table(agent)
    with capsys.disabled():
        print(shown)
    assert {client for client, share in bridged.items() if share >= 0.95} >= set(LINEAR)
    for row, session, output in agent.ended:
        reported = json.loads(output.splitlines()[-1])["tokens"]
        assert reported in (None, sum(len(turn.completion.token_ids) for turn in session.turns)), (
            row
        )
        if row["client"] in LINEAR:
            assert len(session.turns) == N_CALLS + 1, row
            renderer = session.setup.renderer
            differ = [
                turn.prompt_ids != renderer.render(turn.messages, turn.tools)
                for turn in session.turns
            ]
            assert any(differ), "rendering anew would have tokenized other text"
    linear = [len(session.turns) for row, session, _ in agent.ended if row["client"] in LINEAR]
    assert len(sampled) == len(agent.ended)
    assert len(segments_of(sampled)) == len(linear) + sum(
        1 + session.counts["rerendered_turns"]
        for row, session, _ in agent.ended
        if row["client"] not in LINEAR
    ), "one segment for each linear episode"


def test_quick_starts_of_the_packages_are_episodes(make_sampler, client_python, capsys):
    agent = ClientAgent(client_python)
    play(make_sampler, agent, QUICK_STARTS)
    with capsys.disabled():
        print(table(agent)[0])


def test_each_turn_of_real_clients_is_the_engines_own(make_sampler, client_python, capsys):
    check_tools(make_sampler, client_python, capsys, times=1)


@pytest.mark.slow
def test_16_episodes_of_each_interface_are_exact(make_sampler, client_python, capsys):
    check_tools(make_sampler, client_python, capsys, times=16)
