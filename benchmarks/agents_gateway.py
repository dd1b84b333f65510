"""The gateway under load: many programs at once, from another process, against an engine that computes nothing.

    python benchmarks/agents_gateway.py [--sessions 1024] [--turns 4] [--step 0.05]

Prints how long that took, what a turn costs the gateway's thread, how late its event loop was, and memory. The stub
samples one token of every request in a step; tests/unit/agents/test_gateway_load.py checks what came of it.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass
class Measured:
    """What one run came to; ``before`` and ``after`` count tasks of the loop and open files."""

    sessions: list[Any]
    journal: list[tuple[list[int], list[int]]]
    client: dict[str, Any] = field(default_factory=dict)
    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)
    cpu_seconds: float = 0.0
    turn_seconds: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    grown_mb: float = 0.0

    def lines(self) -> list[str]:
        n, all_cpu = self.client["turns"], 1000 * self.cpu_seconds
        ours = 100_000 * sum(self.turn_seconds) / all_cpu
        return [
            f"turns               {n} ({self.client['errors']} errors) in {self.client['seconds']:.1f} s",
            f"CPU for a turn      {_quantiles(self.turn_seconds)}",
            f"gateway's thread    {all_cpu / n:.2f} ms of CPU for a turn, {ours:.0f} % of it in the above",
            f"loop was late       {_quantiles(self.lags)}",
            f"memory              +{self.grown_mb:.0f} MB",
        ]


def _quantiles(seconds: list[float]) -> str:
    at = sorted(1000 * each for each in seconds)
    return (
        f"median {at[len(at) // 2]:.1f}, 99 % {at[len(at) * 99 // 100]:.1f}, most {at[-1]:.1f} ms"
    )


@contextmanager
def _cpu_of_turns(costs: list[float]) -> Iterator[None]:
    """Append what each turn costs the thread of the loop, in seconds of CPU.

    A callback of the loop counts for the connection in whose context it runs: reading and parsing its bytes, all steps
    of its coroutines and their tasks, writing. A turn ends when its answer is written; what its connection does then,
    until the next answer, counts for the next turn.
    """
    from aiohttp.web_protocol import RequestHandler

    from openppo.agents.gateway import server

    spent: ContextVar[list[float]] = ContextVar("spent")
    run, connect, send = asyncio.Handle._run, RequestHandler.__init__, server._send

    def timed_run(handle: Any) -> None:
        started = time.thread_time()
        run(handle)
        if cell := handle._context.get(spent):
            cell[0] += time.thread_time() - started

    def marked_connect(*args: Any, **kwargs: Any) -> None:
        spent.set([0.0])
        connect(*args, **kwargs)

    async def counted_send(*args: Any, **kwargs: Any) -> Any:
        sent = await send(*args, **kwargs)
        costs.append(spent.get()[0])
        spent.get()[0] = 0.0
        return sent

    asyncio.Handle._run, RequestHandler.__init__, server._send = (
        timed_run,
        marked_connect,
        counted_send,
    )
    try:
        yield
    finally:
        asyncio.Handle._run, RequestHandler.__init__, server._send = run, connect, send


async def _client(urls: list[str], n_turns: int) -> dict[str, Any]:
    """All conversations at the same time."""
    found = {"turns": 0, "errors": 0, "tokens": 0}

    async def talk(http: aiohttp.ClientSession, url: str, number: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"hello from {number}"}]
        for turn in range(n_turns):
            async with http.post(
                f"{url}/chat/completions", json={"model": "any", "messages": messages}
            ) as got:
                answer = await got.json()
            if got.status != 200:
                found["errors"] += 1
                return
            found["turns"] += 1
            found["tokens"] += answer["usage"]["completion_tokens"]
            messages += [
                answer["choices"][0]["message"],
                {"role": "user", "content": f"and {turn}?"},
            ]

    started = time.perf_counter()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        await asyncio.gather(*(talk(http, url, i) for i, url in enumerate(urls)))
    return found | {"seconds": time.perf_counter() - started}


def measure(n_sessions: int, n_turns: int, step_seconds: float) -> Measured:
    """Play the conversations."""
    sys.path.insert(0, str(REPOSITORY))
    from openppo.agents.gateway.server import Gateway
    from openppo.agents.renderer import Renderer
    from openppo.agents.session import Session, SessionSetup
    from openppo.config.agents import AgentConfig
    from openppo.rollout.driver import EngineDriver
    from openppo.types import EpisodeInput, Prompt, SamplingParams
    from tests.unit.agents.conftest import ScriptedEngine, make_chat_tokenizer

    class SlowEngine(ScriptedEngine):
        def step(self) -> None:
            time.sleep(step_seconds)
            super().step()

    tokenizer = make_chat_tokenizer()
    engine = SlowEngine(tokenizer, lambda prompt: "<think>hm</think>yes")
    driver = EngineDriver(engine)
    renderer, options = (
        Renderer(tokenizer, "hermes", [tokenizer.eos_token_id]),
        AgentConfig(max_turns=n_turns),
    )
    setup = SessionSetup(renderer, driver.generate, SamplingParams(100), options, 10_000)
    made = Measured(
        [Session(setup, EpisodeInput(Prompt("", [1]), i)) for i in range(n_sessions)],
        engine.journal,
    )

    def now() -> tuple[int, int]:
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))

    async def watch() -> None:
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            made.lags.append(time.perf_counter() - due)

    async def work() -> None:
        loop, gateway = asyncio.get_running_loop(), Gateway()
        await gateway.start()
        keys = [gateway.open(session) for session in made.sessions]
        given = json.dumps({"urls": list(map(gateway.base_url, keys)), "n_turns": n_turns})
        await loop.run_in_executor(None, time.sleep, 0)  # its thread belongs to the baseline
        made.before, memory = now(), psutil.Process().memory_info()
        watcher, cpu = loop.create_task(watch()), time.thread_time()
        command = [sys.executable, __file__, "--client"]

        def run() -> "subprocess.CompletedProcess[str]":
            return subprocess.run(command, input=given, capture_output=True, text=True, check=True)

        with _cpu_of_turns(made.turn_seconds):
            made.client = json.loads((await loop.run_in_executor(None, run)).stdout)
        made.cpu_seconds = time.thread_time() - cpu
        made.grown_mb = (psutil.Process().memory_info().rss - memory.rss) / 2**20
        watcher.cancel()
        for _ in range(1000):  # connections close one by one
            made.after = now()
            if made.after == made.before:
                break
            await asyncio.sleep(0.01)
        for key in keys:
            gateway.close(key)
        await gateway.stop()

    driver.drive(work())
    driver.close()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a step of the engine")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        print(json.dumps(asyncio.run(_client(**json.load(sys.stdin)))))
    else:
        print("\n".join(measure(given.sessions, given.turns, given.step).lines()))


if __name__ == "__main__":
    main()
