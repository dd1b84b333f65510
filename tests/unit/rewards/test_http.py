"""Reward servers: requests, load, retries, and the end that every kind of bad answer has."""

import asyncio
import base64
import datetime
import logging
import socket
import threading
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from openppo.config import RewardConfig
from openppo.rewards import RemoteScorer, http, start_scoring
from openppo.types import Score


async def lengths(request, number):
    """The good answer: each query's length."""
    return web.json_response({"rewards": [len(query) for query in request["query"]]})


@pytest.fixture
def start_server():
    """``start_server(answer, allowed=)``: servers on loopback, in one loop on a thread, that end with the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners = []

    async def serve(answer, allowed):
        server = SimpleNamespace(requests=[], tokens=[])

        async def handle(request):
            server.tokens.append(request.headers.get("Authorization"))
            if allowed is not None and server.tokens[-1] != f"Bearer {allowed}":
                return web.Response(status=401, text="who are you?")
            if request.method != "POST":
                return web.Response(status=404)  # as servers that know nothing else
            server.requests.append(await request.json())
            return await answer(server.requests[-1], len(server.requests))

        app = web.Application()
        app.router.add_route("*", "/get_reward", handle)
        runners.append(web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runners[-1].addresses[0][1]}/get_reward"
        return server

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    yield lambda answer=lengths, allowed=None: run(serve(answer, allowed))
    for runner in runners:
        run(runner.cleanup())
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
def many(make_sample):
    """Twenty samples; the i-th query has i + 1 letters and "<eos>"."""
    return [make_sample([4] * i, [5, 1], text="a" * i) for i in range(20)]


EXPECTED = [Score({"remote": i + 6.0}) for i in range(20)]
OF_TWO = [Score({"remote": 9.0}), Score({"remote": 6.0})]


def free_url():
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/get_reward"


def test_a_request_is_what_openrlhf_sends(start_server, scorer_of, two, make_sample):
    server = start_server()
    assert not scorer_of(server).collective
    assert scorer_of(server).score(two) == OF_TWO
    scorer_of(server).score([make_sample([4], [1], label=datetime.date(2026, 11, 22))])
    assert server.requests == [
        {"query": ["abcd<eos>", "a<eos>"], "prompts": ["ab", "a"], "labels": [1, {"answer": 2}]},
        {"query": ["a<eos>"], "prompts": ["ask"], "labels": ["2026-11-22"]},
    ]
    assert server.tokens == [None, None]
    assert scorer_of(free_url()).score([]) == [], "without samples nothing is sent"


@pytest.mark.parametrize("size", [1, 3, 20, 64])
def test_batches_are_put_together_in_the_order_of_the_samples(size, start_server, scorer_of, many):
    server = start_server()
    assert start_scoring(scorer_of(server, batch_size=size), many)() == EXPECTED
    assert max(len(request["query"]) for request in server.requests) == min(size, 20)
    assert len(server.requests) == -(-20 // size)


def test_load_is_spread_over_servers_and_bounded(start_server, scorer_of, many):
    both_have_one, under_way, most = threading.Barrier(2), 0, 0

    async def answer(request, number):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if number == 1:  # neither answers before the other has a request too
            await asyncio.get_running_loop().run_in_executor(None, both_have_one.wait, 60)
        under_way -= 1
        return await lengths(request, number)

    servers = [start_server(answer), start_server(answer)]
    assert scorer_of(*servers, batch_size=1).score(many) == EXPECTED
    assert sum(len(server.requests) for server in servers) == 20
    assert 1 < most <= 2 * http._REQUESTS_PER_SERVER


class CutOff(web.StreamResponse):
    """An answer whose connection breaks in the middle."""

    async def prepare(self, request):
        self.content_length = 1000
        writer = await super().prepare(request)
        await self.write(b'{"rewards": [')
        request.transport.close()
        return writer


@pytest.mark.parametrize(
    ("n_failures", "response"),
    [
        (1, lambda: web.Response(status=500)),
        (3, lambda: web.Response(status=429)),
        (1, CutOff),
        (1, lambda: web.Response(body=b"no gzip at all", headers={"Content-Encoding": "gzip"})),
    ],
)
def test_a_failure_that_may_pass_is_tried_again(
    n_failures, response, start_server, scorer_of, two, caplog
):
    caplog.set_level(logging.WARNING, "openppo")

    async def answer(request, number):
        return await lengths(request, number) if number > n_failures else response()

    server = start_server(answer)
    assert scorer_of(server, retries=3).score(two) == OF_TWO
    assert len(server.requests) == n_failures + 1
    logged = [record.getMessage() for record in caplog.records if record.name == "openppo"]
    assert len(logged) == 1, "not one for each failure"
    assert server.url in logged[0]


def test_a_timeout_is_retried_and_named(start_server, scorer_of, two):
    async def answer(request, number):
        if number == 1:
            await asyncio.sleep(60)
        return await lengths(request, number)

    server = start_server(answer)
    assert scorer_of(server, timeout=0.5).score(two) == OF_TWO
    assert len(server.requests) >= 2
    with pytest.raises(ConnectionError, match="the last failure: no answer within 0.2 s"):
        scorer_of(start_server(answer), timeout=0.2, retries=0).score(two)


def test_the_work_of_a_dead_server_is_done_by_the_other(start_server, scorer_of, many, caplog):
    server = start_server()
    assert scorer_of(free_url(), server, batch_size=1, retries=1).score(many) == EXPECTED
    assert len(server.requests) == 20
    assert len(caplog.messages) <= 2, "not one for each of the requests"


def test_a_server_that_never_answers_is_named_with_attempts_cause_and_flags(
    start_server, scorer_of, two
):
    async def answer(request, number):
        return web.Response(status=502, text="later")

    dead, broken = free_url(), start_server(answer)
    for url, retries, cause in (
        (dead, 0, "ClientConnectorError"),
        (broken.url, 2, "HTTP status 502, 'later'"),
    ):
        with pytest.raises(ConnectionError, match="^--remote_rm_url ") as error:
            scorer_of(url, retries=retries).score(two)
        for part in (
            url,
            f"after {retries + 1} attempts",
            cause,
            "remote_rm_retries",
            "remote_rm_timeout",
        ):
            assert part in str(error.value)
    assert len(broken.requests) == 3


def test_the_default_attempts_last_longer_than_a_server_is_away():
    shortest = sum(min(2.0**i, 60.0) / 2 for i in range(RewardConfig().remote_rm_retries))
    assert shortest > 60
    pauses = [http._pause(attempt) for attempt in range(1, 1 + RewardConfig().remote_rm_retries)]
    assert shortest <= sum(pauses) <= 2 * shortest


HTML = "<html><body>Welcome to the proxy</body></html>"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, HTML, "answered '<html><body>Welcome"),
        (200, '{"rewards": [1', "answered '{\"rewards\": [1' where"),
        (200, '{"scores": [' + "1, " * 10_000, "..."),
        (200, '{"rewards": 3}', '{"rewards": [numbers]} is needed'),
        (200, '{"rewards": [1]}', "returned 1 scores for 2 samples"),
        (200, '{"rewards": [1, NaN]}', "returned nan for prompt 'a'"),
        (200, '{"rewards": [1, ' + "9" * 5000 + "]}", "where"),
        (200, '{"rewards": ' + "[" * 100_000, "where"),
        (400, '{"error": "no query"}', 'HTTP status 400, \'{"error": "no query"}\''),
        (302, "", "HTTP status 302"),
        (401, "who?", "refuses the token (HTTP status 401)"),
        (403, "no", "--remote_rm_token_file"),
    ],
)
def test_a_wrong_answer_ends_the_run_at_once_naming_server_and_answer(
    status, body, message, start_server, scorer_of, two
):
    async def answer(request, number):
        return web.Response(
            status=status, text=body, headers={"Location": "/elsewhere"} if status == 302 else None
        )

    server = start_server(answer)
    with pytest.raises(ValueError, match="^--remote_rm_url ") as error:
        scorer_of(server, retries=3).score(two)
    assert server.url in str(error.value)
    assert message in str(error.value)
    assert len(str(error.value)) < 500
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "path", ["user:password@HOST/get_reward", "HOST/get_reward?api_key=password"]
)
def test_secrets_in_an_address_are_used_but_never_shown(path, start_server, scorer_of, two, caplog):
    async def answer(request, number):
        return web.Response(status=500) if number == 1 else web.Response(text="{}")

    server, dead, shown = start_server(answer), free_url(), []
    for url, use in (
        (server.url, "score"),
        (dead, "score"),
        (dead, "check"),
    ):  # the first logs a line, then fails
        scorer = scorer_of("http://" + path.replace("HOST", urlsplit(url).netloc), retries=1)
        with pytest.raises((ValueError, ConnectionError)) as error:
            scorer.check() if use == "check" else scorer.score(two)
        shown.append(str(error.value))
    timeout = TimeoutError(
        f"Connection timeout to host http://{path}"
    )  # aiohttp's own has the address in it
    shown += [
        caplog.text,
        http._cause(timeout, 1.0),
        http._cause(OSError(f"no route to http://{path}"), 1.0),
    ]
    assert all("***" in text and "password" not in text for text in shown)
    if "user" in path:
        assert server.tokens == [f"Basic {base64.b64encode(b'user:password').decode()}"] * 2


def test_servers_and_token_are_checked_before_the_run(start_server, scorer_of, two, tmp_path):
    (tmp_path / "token").write_text("open sesame\n")
    token, dead, server = str(tmp_path / "token"), free_url(), start_server(allowed="open sesame")
    scorer_of(start_server(), start_server()).check()  # any answer will do
    for urls, options, message in (
        ([start_server(), dead], {}, f"{dead}: no reward server answers there .* Start it"),
        ([server], {}, "HTTP status 401.*--remote_rm_token_file"),
        (
            ["http://me:pass@a/b"],
            {"token_file": token},
            r"http://\*\*\*@a/b: .* Cannot combine AUTHORIZATION header",
        ),
        (["http://[::1"], {}, "no reward server answers there"),
    ):
        with pytest.raises(ValueError, match=f"^--remote_rm_url .*{message}"):
            scorer_of(*urls, **options).check()
    scorer = scorer_of(server, token_file=token)
    scorer.check()
    assert scorer.score(two) == OF_TWO
    assert server.tokens == [None, *["Bearer open sesame"] * 2]


@pytest.mark.parametrize(
    "urls", ["localhost:5000", "ftp://u:password@a/b", "http://", "http://a/b,", "", "reward.txt"]
)
def test_what_is_no_url_is_an_error_with_an_example(urls, scorer_of):
    with pytest.raises(
        ValueError, match="^--remote_rm_url .*: give http://HOST:PORT/PATH"
    ) as error:
        scorer_of(urls)
    assert "password" not in str(error.value)
