"""Services: programs that are told of each episode, end it themselves, and may be killed and started again."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from openppo.agents.service import ServiceAgent
from openppo.types import Ending, EpisodeInput, Prompt, SamplingParams

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "task_service.py"
PARAMS = SamplingParams(16)


def rows(n):
    return [
        Prompt(f"say {i}", [5], row={"input": f"say {i}", "label": str(i)}, index=i)
        for i in range(n)
    ]


def played(sampler, prompts, n_samples=1):
    samples = sampler.sample(prompts, PARAMS, n_samples, seed=0, evaluation=True)
    assert all(len(sample.segments) == 1 for sample in samples)
    return samples


def post(url, body, key=""):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
        return json.load(answer)


@pytest.fixture
def service():
    """``service(play, status)``: the address of one that plays with ``play(job)``, and answers ``status``; its jobs."""
    servers = []

    def start(play, status=202):
        jobs = []

        class Service(BaseHTTPRequestHandler):
            def do_POST(self):
                job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                jobs.append(job)
                self.send_response(status)
                self.end_headers()
                threading.Thread(target=play, args=(job,), daemon=True).start()

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}", jobs

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def example():
    """``example()`` starts the service of the examples; ``example(port)`` again on the same port."""
    processes = []

    def start(port=None):
        if port is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        processes.append(subprocess.Popen([sys.executable, EXAMPLE, "--port", str(port)]))
        while True:
            try:
                urlopen(f"http://127.0.0.1:{port}", timeout=5).close()
            except urllib.error.URLError:
                time.sleep(0.02)
            else:
                return processes[-1], port

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_the_example_asks_twice_and_gives_half_for_the_second_answer(make_sampler, example):
    _, port = example()

    def script(text):
        asked = text.rpartition("user\nsay ")[2][:1]
        return asked if "Try again" in text or asked == "1" else "no"

    agent = ServiceAgent(f"http://127.0.0.1:{port}")
    agent.check([])
    sampler = make_sampler(agent, script)
    samples = played(sampler, rows(3))
    scores = [sample.scores for sample in samples]
    assert scores == [{"reward": 0.5}, {"reward": 1.0}, {"reward": 0.5}]
    assert [sample.episode.n_turns for sample in samples] == [2, 1, 2]
    assert all(sample.episode.ending is Ending.COMPLETED for sample in samples)


def test_a_service_learns_what_it_needs_of_an_episode(make_sampler, service):
    def play(job):
        post(f"{job['base_url']}/complete", {"reward": {"a": 1, "b": 2}, "attempt": job["attempt"]})

    url, jobs = service(play)
    sampler = make_sampler(ServiceAgent(url), lambda text: "x")
    (lost,) = played(sampler, rows(1))
    assert (lost.episode.ending, lost.episode.error) == (
        Ending.AGENT_ERROR,
        "the agent requested no turn, or received none",
    )
    (job,) = jobs
    assert job["row"] == {"input": "say 0", "label": "0"}
    assert job["messages"] == [{"role": "user", "content": "say 0"}]
    assert {"episode", "attempt", "group", "seed", "base_url", "api_key"} <= job.keys()


def test_an_episode_that_the_service_gives_up_has_failed(make_sampler, service):
    url, _ = service(lambda job: post(f"{job['base_url']}/complete", {"status": "failed"}))
    (lost,) = played(make_sampler(ServiceAgent(url), lambda text: "x"), rows(1))
    assert lost.episode.ending is Ending.AGENT_ERROR
    assert "says that the episode failed" in lost.episode.error


def test_a_service_that_refuses_an_episode_has_failed_it(make_sampler, service):
    url, _ = service(lambda job: None, status=500)
    (lost,) = played(make_sampler(ServiceAgent(url), lambda text: "x"), rows(1))
    assert "answered 500, not 202" in lost.episode.error


def test_what_comes_after_the_time_limit_changes_nothing(make_sampler, service):
    """Late, twice, of another attempt: each is refused."""
    refused, late = Counter(), threading.Event()

    def attempt(url, body):
        try:
            post(url, body)
        except urllib.error.HTTPError as error:
            refused[error.code] += 1

    def play(job):
        attempt(f"{job['base_url']}/complete", {"reward": 9.0, "attempt": job["attempt"] + 1})
        post(
            f"{job['base_url']}/chat/completions",
            {"messages": job["messages"], "model": "any"},
            job["api_key"],
        )
        if job["row"]["label"] == "0":
            assert late.wait(10)
        for _ in range(2):
            attempt(f"{job['base_url']}/complete", {"reward": 1.0, "attempt": job["attempt"]})

    url, jobs = service(play)
    sampler = make_sampler(ServiceAgent(url), lambda text: "x", agent_timeout=1.0)
    samples = played(sampler, rows(2))
    late.set()
    endings = [sample.episode.ending for sample in samples]
    assert endings == [Ending.TIMEOUT, Ending.COMPLETED]
    assert samples[1].scores == {"reward": 1.0}
    while refused[401] < 2 and refused[401] + refused[409] < 5:
        time.sleep(0.01)
    assert refused[409] == len(jobs) == 2
    assert refused[401] >= 2


def test_a_service_that_does_not_answer_is_named_before_the_run():
    with pytest.raises(
        ValueError,
        match="the service http://127.0.0.1:1 does not answer .*: start it before the run",
    ):
        ServiceAgent("http://127.0.0.1:1").check([])


def test_a_service_that_is_killed_and_started_again_loses_no_episode(make_sampler, example):
    """With -9, while it plays: what it played is tried again, and ends once."""
    process, port = example()
    agent, slow = ServiceAgent(f"http://127.0.0.1:{port}"), lambda text: time.sleep(0.02) or "no"
    sampler = make_sampler(agent, slow, agent_timeout=2.0)
    ended, started = [], threading.Event()

    async def one(i, prompt):
        for attempt in range(3):
            task = EpisodeInput(prompt, seed=10 * i + attempt, group=i)
            sample = await sampler.player.play(task, PARAMS)
            if not sample.is_trained:
                continue
            ended.append((i, attempt, sample.scores))
            if len(ended) == 5:
                started.set()
            return
        raise AssertionError(f"episode {i} has failed")

    async def work():
        await sampler.groups.start()
        gate = asyncio.Semaphore(4)

        async def gated(i, prompt):
            async with gate:
                await one(i, prompt)

        await asyncio.gather(*(gated(i, prompt) for i, prompt in enumerate(rows(40))))

    def restart():
        assert started.wait(30)
        while not sampler.engine.running:  # a turn is under way
            time.sleep(0.001)
        process.kill()
        process.wait()
        time.sleep(0.5)
        example(port)

    thread = threading.Thread(target=restart)
    thread.start()
    sampler.driver.drive(work())
    thread.join()
    assert sorted(i for i, *_ in ended) == list(range(40))
    assert all(scores == {"reward": 0.0} for *_, scores in ended)
    assert max(attempt for _, attempt, _ in ended) > 0, "some were under way"
