"""All HTTP servers: what is no HTTP gets 400 and one line of the log, and clients that stall are hung up on."""

import asyncio
import json
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from openppo.agents.gateway.server import Gateway
from openppo.config import ServeRMConfig
from openppo.rewards import http_server
from openppo.rewards.http_server import app_runner, body_of, serve
from openppo.rewards.server import RewardServer, listen
from openppo.sources.task_server import TaskServer

HEAD = b"POST %s HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GARBAGE = {
    "a chunk of no length": CHUNKED + b"zz\r\nab\r\n0\r\n\r\n",
    "bytes": b"\x16\x03\x01\x02\x00\x01\x00\xff\r\n\r\n",
    "a word": b"hello\r\n\r\n",
    "another version": b"GET / HTTP/9.9\r\nHost: h\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost h\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: " + b"h" * 20_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n"
    + b"".join(b"X-%d: y\r\n" % i for i in range(5000))
    + b"\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a negative length": b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -5\r\n\r\n",
    "control characters": b"GET /\x1b[31m\x07 HTTP/1.1\r\nHost: h\r\n\r\n",
}
BODIES = {
    "no gzip": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "no JSON": HEAD + b"Content-Length: 4\r\n\r\nabcd",
    "no UTF-8": HEAD + b"Content-Length: 4\r\n\r\n\xff\xfe\xfd\xfc",
}


class Door:
    """A running server: its address, a path and a key that it takes, and how to run a coroutine in its loop."""

    def __init__(self, address: tuple[str, int], path: str, key: str) -> None:
        self.address, self.path, self.key = address, path.encode(), key.encode()

    def answer(self, *pieces: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to a request, in which its path and key stand for ``%s``."""
        with socket.create_connection(self.address, timeout=60) as client:
            client.sendall(b"".join(pieces).replace(b"%s", self.path, 1).replace(b"%s", self.key))
            got = HTTPResponse(client)
            got.begin()
            return got.status, got.read()


@contextmanager
def in_thread(work: Callable[[asyncio.Event, Callable[[Any], None]], Any]) -> Iterator[Any]:
    """What ``work`` hands over in an event loop on another thread, until its event is set."""
    handed, ready, ends = SimpleNamespace(), threading.Event(), asyncio.Event()

    def hand_over(value: Any) -> None:
        handed.value, handed.loop = value, asyncio.get_running_loop()
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(work(ends, hand_over)))
    thread.start()
    assert ready.wait(60)
    try:
        yield handed.value
    finally:
        handed.loop.call_soon_threadsafe(ends.set)
        thread.join(60)


@contextmanager
def gateway_door(session: Any = None) -> Iterator[Door]:
    async def work(ends: asyncio.Event, hand_over: Callable[[Any], None]) -> None:
        gateway = Gateway()
        await gateway.start()
        renderer = SimpleNamespace(bound=None, vision=None)
        of_episode = session or SimpleNamespace(
            setup=SimpleNamespace(renderer=renderer, most=100), counts={}
        )
        hand_over((gateway.address, gateway.open(of_episode)))
        await ends.wait()
        await gateway.stop()

    with in_thread(work) as (address, key):
        yield Door(("127.0.0.1", int(address.rpartition(":")[2])), "/v1/chat/completions", key)


@contextmanager
def tasks_door(place: Path) -> Iterator[Door]:
    server = TaskServer(SimpleNamespace(progress=dict), place / "tasks.json")  # type: ignore[arg-type]
    known = json.loads((place / "tasks.json").read_text())
    yield Door(
        ("127.0.0.1", int(re.findall(r":(\d+)/", known["url"])[0])), "/tasks", known["token"]
    )
    server.close()


@contextmanager
def rewards_door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    async def work(ends: asyncio.Event, hand_over: Callable[[Any], None]) -> None:
        listener = listen("127.0.0.1", 0)
        options = ServeRMConfig("my/model", port=0)
        server = RewardServer(
            lambda rows: [1.0] * len(rows), lambda text: [1], listener, options, "key"
        )
        loop, handlers = asyncio.get_running_loop(), {}
        monkeypatch.setattr(
            loop, "add_signal_handler", handlers.__setitem__
        )  # only of the main thread
        serving = asyncio.create_task(server._serve())
        while signal.SIGTERM not in handlers:
            await asyncio.sleep(0.01)
        hand_over(listener.getsockname()[:2])
        await ends.wait()
        handlers[signal.SIGTERM]()
        await serving
        server.close()

    with in_thread(work) as address:
        yield Door(address, "/get_reward", "key")


@pytest.fixture(params=["gateway", "tasks", "serve_rm"])
def door(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Door]:
    doors = {
        "gateway": gateway_door,
        "tasks": lambda: tasks_door(tmp_path),
        "serve_rm": lambda: rewards_door(monkeypatch),
    }
    with doors[request.param]() as opened:
        yield opened


def test_no_http_gets_400_and_one_line_of_the_log(door, caplog):
    caplog.set_level(
        logging.DEBUG, "openppo.http"
    )  # aiohttp logs other protocols, such as TLS, for debugging only
    for name, sent in GARBAGE.items():
        caplog.clear()
        assert door.answer(sent)[0] == 400, name
        lines = caplog.text.splitlines()
        assert len(lines) == 1, (name, lines)
        assert "127.0.0.1 sent a request that is no HTTP: " in lines[0], name
        assert not re.search("[\x1b\x07]", lines[0])


def test_a_body_that_cannot_be_read_gets_400_and_no_traceback(door, caplog):
    for name, form in BODIES.items():
        status, answer = door.answer(form)
        assert status == 400 and b'"error"' in answer, (name, answer)
    assert "Traceback" not in caplog.text


def test_a_key_of_other_letters_gets_401_before_the_body(door, caplog):
    head = HEAD.replace(b"%s", door.path, 1).replace(
        b"%s", "\udcff\udcfeé".encode(errors="surrogateescape")
    )
    with socket.create_connection(door.address, timeout=60) as client:
        client.sendall(head + b"Content-Length: 1000\r\n\r\n")  # which never come
        assert client.recv(65536).startswith(b"HTTP/1.1 401 Unauthorized")
    assert "Traceback" not in caplog.text


@pytest.fixture
def plain() -> Iterator[Door]:
    """A server that gives back what it gets."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await body_of(request, 1000))

    async def work(ends: asyncio.Event, hand_over: Callable[[Any], None]) -> None:
        app, listener = web.Application(), listen("127.0.0.1", 0)
        app.add_routes([web.post("/", echo)])
        runner = app_runner(app)
        server = await serve(runner, listener)
        hand_over(listener.getsockname())
        await ends.wait()
        server.close()
        await runner.cleanup()

    with in_thread(work) as address:
        yield Door(address, "/", "")


def patched(monkeypatch: pytest.MonkeyPatch, **bounds: float) -> None:
    for name, bound in bounds.items():
        monkeypatch.setattr(http_server, name, bound)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, SECONDS_IDLE=0.2, SECONDS_TO_READ=0.2)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, MOST_CONNECTIONS=2)


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost:"])
def test_a_silent_connection_is_closed(hasty, plain, sent):
    with socket.create_connection(plain.address, timeout=60) as client:
        client.sendall(sent)
        assert client.recv(100) == b""


def test_a_body_that_does_not_come_gets_408(hasty, plain):
    with socket.create_connection(plain.address, timeout=60) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nabc")
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout")
    assert b"the request was not sent within 0.2 s" in answer


def test_a_body_over_its_bound_gets_413(plain):
    for length, status in ((1000, 200), (1001, 413)):
        sent = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % length
        assert plain.answer(sent, b"x" * length)[0] == status


def test_connections_beyond_the_bound_get_503(crowded, plain, caplog):
    sent = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi"
    served = [socket.create_connection(plain.address, timeout=60) for _ in range(2)]
    for client in served:
        client.sendall(sent)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK")
    for _ in range(2):
        with socket.create_connection(plain.address, timeout=60) as refused:
            assert refused.recv(65536).startswith(b"HTTP/1.1 503 Service Unavailable")
    warned = [record.getMessage() for record in caplog.records if record.name == "openppo.http"]
    assert warned == ["2 connections are open, no more are served: new ones are answered with 503"]
    for client in served:
        client.close()
    while plain.answer(sent)[0] == 503:
        pass  # the server has yet to see that they hung up
