"""Agents that are killed, raise, hang, hang up, repeat requests: each episode ends once, and groups survive."""

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openppo.agents import player as player_module
from openppo.agents.program import ProgramAgent
from openppo.config.agents import AgentConfig
from openppo.process_groups import process_groups
from openppo.tracking import Metrics
from openppo.types import Ending, Prompt, SamplingParams, SingleProcess, segments_of
from tests.unit.agents.conftest import ScriptedEngine

CLIENT = """
import json, os, socket, sys, time

kind, task = sys.argv[1:]
host, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").split("/", 1)

def send(end, body, retry=0):
    data = json.dumps(body).encode()
    connection = socket.create_connection(host.split(":"))
    head = f"POST /{path}/{end} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(data)}"
    connection.sendall("\\r\\n".join([*head, f"x-stainless-retry-count: {retry}", "", ""]).encode() + data)
    return connection

def answer(connection):
    with connection.makefile("rb") as file:
        head, _, body = file.read().partition(b"\\r\\n\\r\\n")
    assert b" 200 " in head, head + body
    return json.loads(body)

def until_under_way():
    while not os.path.exists(f"{sys.argv[0]}.{task}"):
        time.sleep(0.005)

def chat(text):
    return {"messages": messages + [{"role": "user", "content": text}]}

def ask(text):
    messages.extend([chat(text)["messages"][-1], answer(send("chat/completions", chat(text)))["choices"][0]["message"]])

messages = []
ask(f"{task} first")
if kind == "raises":
    raise KeyError(task)
if kind == "hangs":
    time.sleep(600)
if kind in ("killed", "hangs_up", "retries"):
    asked = f"{task} {kind}"
    connection = send("chat/completions", chat(asked))
    until_under_way()
    if kind == "killed":
        os.kill(os.getpid(), 9)
    connection.close()
    again = send("chat/completions", chat(asked), retry=int(kind == "retries"))
    if kind == "retries":
        open(f"{sys.argv[0]}.{task}.again", "w").close()
    answer(again)
elif kind == "lost":  # the answer comes, but its reader has timed out, and asks again
    connection = send("chat/completions", chat(f"{task} second"))
    connection.recv(1, socket.MSG_PEEK)
    connection.close()
    answer(send("chat/completions", chat(f"{task} second"), retry=1))
else:
    ask(f"{task} second")
if kind == "posts_twice":
    answer(send("reward", {"reward": 0.25}))
    answer(send("reward", {"reward": 0.75}))
print(json.dumps({"reward": 1.0}))
"""
"""Plain sockets: a process is there and gone in a few hundredths of a second."""

PER_HUNDRED = {
    "killed": 10,
    "raises": 5,
    "hangs": 5,
    "hangs_up": 5,
    "retries": 3,
    "lost": 2,
    "posts_twice": 2,
}
STALLED = ("killed", "hangs_up", "retries")
FAILS = {"killed": Ending.AGENT_ERROR, "raises": Ending.AGENT_ERROR, "hangs": Ending.TIMEOUT}


class Faulty(ProgramAgent):
    """Runs the program once for each kind of ``kinds``."""

    def __init__(self, options: AgentConfig, kinds: list[str]) -> None:
        super().__init__(options)
        self.kinds, self.kind_of = iter(enumerate(kinds)), {}

    async def run(self, task, session):
        number, kind = next(self.kinds)
        self.kind_of[session] = kind
        return await super().run(
            replace(task, prompt=replace(task.prompt, row={"kind": kind, "n": number})), session
        )


class Stalling(ScriptedEngine):
    """Holds requests of clients that will hang up; of those that retry, until a file says that they have.

    A file tells the client that its request is under way.
    """

    place: Path

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.held: dict[int, tuple[Path, Any]] = {}
        self.asked: set[tuple[str, str]] = set()
        self.n_steps = 0
        self.given_up: dict[tuple[int, ...], int] = {}
        self.freed_after: Counter[int] = Counter()

    @property
    def busy(self):
        return bool(self.running or self.held)

    def submit(self, prompt, *arguments, **options):
        number = super().submit(prompt, *arguments, **options)
        task, what = (
            self.tokenizer.decode(prompt.token_ids)
            .split("<|im_start|>user\n")[-1]
            .split("<|im_end|>")[0]
            .split()
        )
        first = (task, what) not in self.asked
        self.asked.add((task, what))
        if what in STALLED and (first or what == "retries"):
            asked = self.place.with_name(f"{self.place.name}.{task}")
            self.held[number] = asked.with_name(f"{asked.name}.again"), self.running.pop(number)
            asked.touch()
        return number

    def cancel(self, number):
        prompt = tuple(
            (self.held.pop(number)[1] if number in self.held else self.running.pop(number))[0]
        )
        self.freed_after[self.n_steps - self.given_up.get(prompt, self.n_steps)] += 1

    def step(self):
        self.n_steps += 1
        for number in [number for number, (again, _) in self.held.items() if again.exists()]:
            self.running[number] = self.held.pop(number)[1]
        super().step()


def children() -> int:
    """Processes that this one has started and not waited for."""
    parents = [
        file.read_text().rpartition(")")[2].split()[1] for file in Path("/proc").glob("[0-9]*/stat")
    ]
    return parents.count(str(os.getpid()))


def start_guardian() -> None:
    """Start the process, with its pipe, that this process keeps from its first group of a program on."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as program:
        process_groups.add(program.pid)
        process_groups.kill(program.pid)


@pytest.mark.parametrize(
    ("n", "concurrency", "timeout"),
    [(100, 8, 4.0), pytest.param(1000, 24, 10.0, marks=pytest.mark.slow)],
)
def test_every_episode_ends_once_whatever_its_agent_does(
    make_sampler, monkeypatch, tmp_path, n, concurrency, timeout
):
    Stalling.place = tmp_path / "agent.py"
    Stalling.place.write_text(CLIENT)
    kinds = [kind for kind, share in PER_HUNDRED.items() for _ in range(share * n // 100)]
    kinds += ["works"] * (n - len(kinds))
    random.Random(3).shuffle(kinds)
    command = f"{sys.executable} -S -E {Stalling.place} {{kind}} {{n}}"
    options = {"agent_command": command, "agent_concurrency": concurrency, "agent_timeout": timeout}
    agent, records = Faulty(AgentConfig(**options), kinds), []

    async def recorded(*arguments, play=player_module.play, **named):
        records.append(await play(*arguments, **named))
        return records[-1]

    monkeypatch.setattr(player_module, "play", recorded)
    start_guardian()
    files, before = len(os.listdir("/proc/self/fd")), children()
    sampler = make_sampler(agent, lambda prompt: "yes", engine=Stalling, **options)
    engine = sampler.engine

    async def generate(prompt, *rest, original=sampler.driver.generate):
        try:
            return await original(prompt, *rest)
        except asyncio.CancelledError:
            engine.given_up[tuple(prompt.token_ids)] = engine.n_steps
            raise

    sampler.driver.generate = generate
    metrics, prompts = Metrics(), [Prompt(f"task {i}", [5, 6], index=i) for i in range(n // 10)]
    sampled = sampler.sample(prompts, SamplingParams(64), 10, 1, 0, metrics)

    assert len(records) == len({record.session for record in records}) == n
    by_kind = Counter((agent.kind_of[record.session], record.episode.ending) for record in records)
    assert by_kind == Counter((kind, FAILS.get(kind, Ending.COMPLETED)) for kind in kinds)
    measured = metrics.reduced(SingleProcess())
    assert sum(measured[f"agent/{ending.value}"] for ending in Ending) == pytest.approx(1)

    turns = Counter(
        str((t.prompt_ids, t.completion.token_ids))
        for record in records
        for t in record.session.turns
    )
    assert turns - Counter(str(entry) for entry in engine.journal) == Counter()
    assert set(turns.values()) == {1}, "no request has two turns"
    n_turns = {(agent.kind_of[record.session], len(record.session.turns)) for record in records}
    assert n_turns == {(kind, 1 if kind in FAILS else 2) for kind in set(kinds)}
    killed = [record.episode for record in records if agent.kind_of[record.session] == "killed"]
    assert {(episode.error[:25], episode.messages[-1]["content"]) for episode in killed} == {
        ("ProgramError: exit status", "yes")
    }
    twice = [record for record in records if agent.kind_of[record.session] == "posts_twice"]
    assert {record.session.rewards["reward"] for record in twice} == {0.75}

    n_failed = sum(kind in FAILS for kind in kinds)
    assert len(sampled) == len(segments_of(sampled)) == n - n_failed
    assert {sample.group for sample in sampled} == set(range(len(prompts)))
    spans = {len(segment.spans) for segment in segments_of(sampled)}
    assert spans == {2}, "both turns are trained on"

    assert (
        kinds.count("killed")
        <= engine.freed_after.total()
        <= sum(kind in STALLED for kind in kinds)
    )
    assert max(engine.freed_after) <= 1, "a row is free after one step"
    assert not engine.busy

    sampler.close()
    monkeypatch.setattr(sampler, "close", lambda: None)
    # What earlier tests left open may be closed meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= files and children() <= before
