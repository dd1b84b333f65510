"""Reward servers: what is sent, how load and failures spread, and what every kind of bad answer ends in."""

import asyncio
import base64
import contextlib
import datetime
import gzip
import json
import logging
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from openppo.config import RewardConfig
from openppo.rewards import RemoteScorer, http, start_scoring
from openppo.types import Score


@dataclass
class Server:
    """A server on loopback, in a thread of its own."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)


async def lengths(request, number):
    """The good answer: each query's length."""
    return web.json_response({"rewards": [len(query) for query in request["query"]]})


@pytest.fixture
def start_server():
    """Starts servers that answer as told; they end with the test."""
    loops = []

    def start(answer=lengths, allowed=None):
        server, ready = Server(""), threading.Event()
        loop = asyncio.new_event_loop()

        async def handle(request):
            server.tokens.append(request.headers.get("Authorization"))
            if allowed is not None and server.tokens[-1] != f"Bearer {allowed}":
                return web.Response(status=401, text="who are you?")
            if request.method != "POST":
                return web.Response(status=404)  # as servers that know nothing else
            server.requests.append(await request.json())
            return await answer(server.requests[-1], len(server.requests))

        async def serve():
            app = web.Application()
            app.router.add_route("*", "/get_reward", handle)
            runner = web.AppRunner(app, shutdown_timeout=0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/get_reward"
            ready.set()

        def run():
            loop.run_until_complete(serve())
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)  # answers that nobody waits for: ended here, not by the garbage collector
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks))
            loop.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        loops.append((loop, thread))
        assert ready.wait(30)
        return server

    yield start
    for loop, thread in loops:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@pytest.fixture
def scorer_of(make_tokenizer, monkeypatch):
    """A scorer for servers or URLs, whose pauses take no time."""
    monkeypatch.setattr(http, "_FIRST_PAUSE_SECONDS", 0.001)

    def make(*servers, **options):
        urls = ",".join(server if isinstance(server, str) else server.url for server in servers)
        options = {f"remote_rm_{name}": value for name, value in options.items()}
        return RemoteScorer(RewardConfig(remote_rm_url=urls, **options), make_tokenizer(), "remote")

    return make


@pytest.fixture
def many(make_trajectory):
    """Twenty samples; the i-th query has i + 1 letters and "<eos>"."""
    return [make_trajectory([4] * i, [5, 1], text="a" * i) for i in range(20)]


EXPECTED = [Score({"remote": i + 6.0}) for i in range(20)]


def free_url():
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/get_reward"


# Good answers


def test_a_request_is_what_openrlhf_sends(start_server, scorer_of, two):
    server = start_server()
    assert not scorer_of(server).collective
    assert scorer_of(server).score(two) == [Score({"remote": 9.0}), Score({"remote": 6.0})]
    assert server.requests == [{"query": ["abcd<eos>", "a<eos>"], "prompts": ["ab", "a"], "labels": [1, {"answer": 2}]}]
    assert server.tokens == [None]


@pytest.mark.parametrize("size", [1, 3, 20, 64])
def test_batches_are_put_together_in_the_order_of_the_samples(size, start_server, scorer_of, many):
    server = start_server()
    assert start_scoring(scorer_of(server, batch_size=size), many).wait() == EXPECTED
    assert max(len(request["query"]) for request in server.requests) == min(size, 20)
    assert len(server.requests) == -(-20 // size)


def test_without_samples_nothing_is_sent(scorer_of):
    assert scorer_of(free_url()).score([]) == []


def test_load_is_spread_over_servers(start_server, scorer_of, many):
    both_are_asked = threading.Barrier(2)

    async def answer(request, number):
        if number == 1:  # neither answers before the other is asked too
            await asyncio.get_running_loop().run_in_executor(None, both_are_asked.wait, 60)
        return await lengths(request, number)

    servers = [start_server(answer), start_server(answer)]
    assert scorer_of(*servers, batch_size=1).score(many) == EXPECTED
    assert sum(len(server.requests) for server in servers) == 20


def test_no_more_requests_are_under_way_than_servers_can_take(start_server, scorer_of, many):
    under_way, most = Counter[str](), 0

    async def answer(request, number):
        nonlocal most
        under_way["now"] += 1
        most = max(most, under_way["now"])
        await asyncio.sleep(0.01)
        under_way["now"] -= 1
        return await lengths(request, number)

    assert scorer_of(start_server(answer), batch_size=1).score(many) == EXPECTED
    assert 1 < most <= http._REQUESTS_PER_SERVER


def test_a_token_is_sent(start_server, scorer_of, two, tmp_path):
    (tmp_path / "token").write_text("open sesame\n")
    server = start_server(allowed="open sesame")
    scorer = scorer_of(server, token_file=str(tmp_path / "token"))
    scorer.check()
    scorer.score(two)
    assert set(server.tokens) == {"Bearer open sesame"}
    assert "sesame" not in str(scorer)


# Failures that may pass


def failing(n, response):
    """Fails ``n`` times, then gives the good answer."""

    async def answer(request, number):
        return await lengths(request, number) if number > n else web.Response(status=response.status, body=b"later")

    return answer


async def cut_connection(request, number):
    """Promises more than it sends, the first time."""
    if number > 1:
        return await lengths(request, number)
    return CutOff()


async def garbled(request, number):
    """Says gzip and sends something else, the first time."""
    if number > 1:
        return await lengths(request, number)
    return web.Response(body=b"no gzip at all", headers={"Content-Encoding": "gzip"})


class CutOff(web.StreamResponse):
    """An answer whose connection breaks in the middle."""

    async def prepare(self, request):
        self.content_length = 1000
        writer = await super().prepare(request)
        await self.write(b'{"rewards": [')
        request.transport.close()
        return writer


@pytest.mark.parametrize(
    ("answer", "n_requests"),
    [(failing(n, web.Response(status=status)), n + 1) for n, status in ((1, 500), (2, 503), (3, 429))]
    + [(cut_connection, 2), (garbled, 2)],
    ids=["500", "503", "429", "cut connection", "garbled"],
)
def test_a_failure_that_may_pass_is_tried_again(answer, n_requests, start_server, scorer_of, two, caplog):
    caplog.set_level(logging.WARNING, "openppo")
    server = start_server(answer)
    assert scorer_of(server, retries=3).score(two) == [Score({"remote": 9.0}), Score({"remote": 6.0})]
    assert len(server.requests) == n_requests
    told = [record.getMessage() for record in caplog.records if record.name == "openppo"]
    assert len(told) == n_requests - 1
    assert all(server.url in message for message in told)


def test_a_slow_answer_is_asked_for_again(start_server, scorer_of, two):
    async def answer(request, number):
        if number == 1:
            await asyncio.sleep(60)
        return await lengths(request, number)

    server = start_server(answer)
    assert scorer_of(server, timeout=0.5).score(two) == [Score({"remote": 9.0}), Score({"remote": 6.0})]
    assert len(server.requests) >= 2


def test_the_work_of_a_dead_server_is_done_by_the_other(start_server, scorer_of, many):
    server = start_server()
    assert scorer_of(free_url(), server, batch_size=1, retries=1).score(many) == EXPECTED
    assert len(server.requests) == 20


@pytest.mark.parametrize("retries", [0, 2])
def test_a_server_that_never_answers_ends_in_an_error_with_url_attempts_cause_and_flag(
    retries, start_server, scorer_of, two
):
    dead, broken = free_url(), start_server(failing(99, web.Response(status=502)))
    for server, url, cause in ((dead, dead, "ClientConnectorError"), (broken, broken.url, "HTTP status 502, 'later'")):
        with pytest.raises(ConnectionError, match="^--remote_rm_url ") as error:
            scorer_of(server, retries=retries).score(two)
        for part in (url, f"after {retries + 1} attempts", cause, "--remote_rm_retries", "--remote_rm_timeout"):
            assert part in str(error.value)
    assert len(broken.requests) == retries + 1


def test_a_timeout_is_named_as_one(start_server, scorer_of, two):
    async def answer(request, number):
        await asyncio.sleep(60)
        return web.Response()

    with pytest.raises(ConnectionError, match="the last failure: no answer within 0.2 s"):
        scorer_of(start_server(answer), timeout=0.2, retries=0).score(two)


def test_what_failed_names_no_secret_of_the_address():
    """aiohttp's ConnectionTimeoutError has the address in it, and is a TimeoutError."""
    url = "http://user:swordfish@10.255.255.1/r?key=swordfish"
    for error in (TimeoutError(f"Connection timeout to host {url}"), OSError(f"no route to {url}")):
        assert "swordfish" not in http._cause(error, 1.0)


# Answers that are wrong


HTML = "<html><body>Welcome to the proxy</body></html>"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, HTML, "answered '<html><body>Welcome"),
        (200, "", "answered '' where"),
        (200, '{"rewards": [1', "answered '{\"rewards\": [1' where"),
        (200, "[1, 2]", "answered '[1, 2]' where"),
        (200, '{"scores": [1, 2]}', '{"rewards": [numbers]} is needed'),
        (200, '{"rewards": 3}', "answered '{\"rewards\": 3}' where"),
        (200, '{"rewards": [1]}', "returned 1 scores for 2 samples"),
        (200, '{"rewards": [1, 2, 3]}', "returned 3 scores for 2 samples"),
        (200, '{"rewards": [1, NaN]}', "returned nan for prompt 'a'"),
        (200, '{"rewards": [null, 1]}', "returned None for prompt 'ab'"),
        (200, '{"rewards": [1, "2"]}', "returned '2' for prompt 'a'"),
        (200, '{"rewards": [1, -Infinity]}', "returned -inf for prompt 'a'"),
        (200, '{"rewards": [1, 1e39]}', "returned 1e+39 for prompt 'a'"),  # inf in float32
        (200, '{"rewards": [1, ' + "9" * 400 + "]}", "for prompt 'a'"),
        (200, '{"rewards": [1, ' + "9" * 5000 + "]}", "where"),
        (200, '{"rewards": ' + "[" * 100_000, "where"),
        (200, '{"rewards": {"0": 1, "1": 2}}', "where"),
        (200, '{"rewards": [[1], [2]]}', "returned [1] for prompt 'ab'"),
        (400, '{"error": "no query"}', 'HTTP status 400, \'{"error": "no query"}\''),
        (404, HTML, "HTTP status 404"),
        (413, "too large", "HTTP status 413, 'too large'"),
        (302, "", "HTTP status 302"),
        (401, "who?", "refuses the token (HTTP status 401)"),
        (403, "no", "--remote_rm_token_file"),
    ],
)
def test_a_wrong_answer_ends_the_run_at_once_naming_server_and_answer(
    status, body, message, start_server, scorer_of, two
):
    async def answer(request, number):
        return web.Response(status=status, text=body, headers={"Location": "/elsewhere"} if status == 302 else None)

    server = start_server(answer)
    with pytest.raises(ValueError, match="^--remote_rm_url ") as error:
        scorer_of(server, retries=3).score(two)
    assert server.url in str(error.value)
    assert message in str(error.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("whole", ["", '{"rewards": [1.0,'])
def test_an_answer_without_length_that_breaks_off_is_asked_for_again(whole, scorer_of, two):
    """HTTP/1.0, as Python's own server speaks it: the end of the connection is the end of the answer."""
    answers = [whole, '{"rewards": [1.0, 2.0]}']

    class Old(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers.pop(0).encode())

        def log_message(self, *words):
            """Not to stderr."""

    with HTTPServer(("127.0.0.1", 0), Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        scores = scorer_of(f"http://127.0.0.1:{server.server_port}/r", retries=1).score(two)
        server.shutdown()
    assert scores == [Score({"remote": 1.0}), Score({"remote": 2.0})]
    assert answers == []


def test_a_long_wrong_answer_is_shortened(start_server, scorer_of, two):
    async def answer(request, number):
        return web.Response(text=json.dumps({"scores": [1.0] * 10_000}))

    with pytest.raises(ValueError) as error:
        scorer_of(start_server(answer)).score(two)
    assert len(str(error.value)) < 500


class Endless(web.StreamResponse):
    """An answer without end; ``n_bytes`` says how much of it was taken."""

    n_bytes = 0

    async def prepare(self, request):
        writer = await super().prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await self.write(b" " * 2**20)
                Endless.n_bytes += 2**20
        return writer


async def endless(request, number):
    return Endless()


async def bomb(request, number):
    """A gigabyte in one megabyte."""
    packed = gzip.compress(bytes(2**26)) * 16
    return web.Response(body=packed, headers={"Content-Encoding": "gzip"})


@pytest.mark.parametrize("answer", [endless, bomb])
def test_an_answer_too_large_to_be_good_is_not_read_to_its_end(answer, start_server, scorer_of, two):
    Endless.n_bytes = 0
    tracemalloc.start()
    with pytest.raises(ValueError, match="^--remote_rm_url http://.* answered with more than 16 MiB"):
        scorer_of(start_server(answer)).score(two)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**28
    assert Endless.n_bytes < 2**26


def test_labels_that_json_does_not_know_go_as_text(start_server, scorer_of, make_trajectory):
    server = start_server()
    scorer_of(server).score([make_trajectory([4], [1], label=datetime.date(2026, 11, 22))])
    assert server.requests[0]["labels"] == ["2026-11-22"]


# Secrets


@pytest.mark.parametrize("path", ["user:pass word@HOST/get_reward", "HOST/get_reward?api_key=password"])
def test_secrets_in_an_address_are_used_but_never_shown(path, start_server, scorer_of, two, caplog):
    async def answer(request, number):
        return web.Response(status=500) if number == 1 else web.Response(text="{}")

    server = start_server(answer)
    dead = free_url()

    def with_secret(url):
        return "http://" + path.replace("HOST", urlsplit(url).netloc).replace("pass word", "password")

    said = []
    for url, ask in (
        (server.url, lambda scorer: scorer.score(two)),  # a log line, then a wrong answer
        (dead, lambda scorer: scorer.score(two)),
        (dead, lambda scorer: scorer.check()),
    ):
        with pytest.raises((ValueError, ConnectionError)) as error:
            ask(scorer_of(with_secret(url), retries=1))
        said.append(str(error.value))
    assert "***" in caplog.text
    assert all("***" in text for text in said)
    assert "password" not in caplog.text + "".join(said)
    if "user" in path:
        assert server.tokens == [f"Basic {base64.b64encode(b'user:password').decode()}"] * 2


def test_an_address_that_is_none_is_shown_without_its_secret(scorer_of):
    with pytest.raises(ValueError, match=r"^--remote_rm_url 'ftp://\*\*\*@host/': give http"):
        scorer_of("ftp://user:p@ssword@host/")


def test_an_address_with_a_user_and_a_token_are_too_much(scorer_of, tmp_path):
    (tmp_path / "token").write_text("open sesame")
    with pytest.raises(ValueError, match=r"^--remote_rm_url http://\*\*\*@a/b: .*--remote_rm_token_file"):
        scorer_of("http://c/d", "http://me:pass@a/b", token_file=str(tmp_path / "token"))


# Away for a while

SERVER = """
import asyncio, sys
from aiohttp import web

async def answer(request):
    query = (await request.json())["query"]
    await asyncio.sleep(0.05)
    return web.json_response({"rewards": [len(text) for text in query]})

app = web.Application()
app.add_routes([web.post("/get_reward", answer)])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=lambda *_: print("ready", flush=True))
"""


@contextlib.contextmanager
def server_process(port):
    """A server as a process of its own, which answers; killed in the end."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_server_that_goes_away_in_the_middle_and_comes_back_is_waited_for(
    scorer_of, make_trajectory, monkeypatch, caplog
):
    """Nothing is lost, nothing invented: the default number of attempts, with pauses of a tenth of their length."""
    samples = [make_trajectory([4] * i, [5, 1], text="a" * i) for i in range(100)]
    url = free_url()
    scorer = scorer_of(url, batch_size=1)
    monkeypatch.setattr(http, "_FIRST_PAUSE_SECONDS", 0.1)
    with server_process(urlsplit(url).port or 0):
        pending = start_scoring(scorer, samples)
        time.sleep(0.3)  # some are answered, some under way, most wait
    while "attempt 3 of 8" not in caplog.text:  # it is away
        time.sleep(0.05)
    with server_process(urlsplit(url).port or 0):
        scores = pending.wait()
    assert scores == [Score({"remote": i + 6.0}) for i in range(100)]
    assert len(caplog.messages) <= 8  # not one for each of a hundred requests


def test_the_default_attempts_last_longer_than_a_server_is_away():
    shortest = sum(min(2.0**i, 60.0) / 2 for i in range(RewardConfig().remote_rm_retries))
    assert shortest > 60
    load = http._Load(["a"])
    pauses = [load.pause(attempt) for attempt in range(1, 1 + RewardConfig().remote_rm_retries)]
    assert shortest <= sum(pauses) <= 2 * shortest


# Before the run


def test_a_server_that_answers_anything_passes_the_check(start_server, scorer_of):
    scorer_of(start_server(), start_server()).check()


def test_a_server_that_cannot_be_reached_is_an_error_before_the_run(start_server, scorer_of):
    dead = free_url()
    with pytest.raises(
        ValueError, match="^--remote_rm_url .*no reward server answers there .* Start it first"
    ) as error:
        scorer_of(start_server(), dead).check()
    assert dead in str(error.value)


def test_a_server_that_wants_a_token_is_an_error_before_the_run(start_server, scorer_of):
    with pytest.raises(ValueError, match="^--remote_rm_url .*HTTP status 401.*--remote_rm_token_file"):
        scorer_of(start_server(allowed="open sesame")).check()


@pytest.mark.parametrize(
    "urls", ["localhost:5000", "ftp://a/b", "http://", "http://a/b,", "http://[::1", "", "reward.txt"]
)
def test_what_is_no_url_is_an_error_with_an_example(urls, scorer_of):
    with pytest.raises(ValueError, match="^--remote_rm_url .*: give http://HOST:PORT/PATH"):
        scorer_of(urls)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "must hold one line"),
        (b"a\nb", "must hold one line"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_token_file_without_a_token_is_an_error(content, message, scorer_of, tmp_path):
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(ValueError, match=f"^--remote_rm_token_file .*{message}"):
        scorer_of("http://a/b", token_file=str(tmp_path / "token"))
