"""Addresses in messages: nothing behind the machine's own walls is reached, nothing without end is read."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from openppo.agents import fetching
from openppo.agents.fetching import fetch, is_public

PUBLIC = "8.8.8.8 93.184.216.34 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1"
REFUSED = """
    0.0.0.0 0.1.2.3 127.0.0.1 127.8.8.8 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 100.100.100.200
    192.0.0.192 168.63.129.16 192.0.2.1 198.18.0.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255
    :: ::1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd00:ec2::254 ff02::1 ff0e::1 2001:db8::1 2001::1 5f00::1
    ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
    64:ff9b:1::1 2002:7f00:1::1 2002:a00:1::1 ::ffff:0:7f00:1
"""
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", REFUSED.split())
def test_addresses_behind_walls_are_refused_in_every_form(address: str) -> None:
    assert not is_public(address)


def fetched(answer: Answer, path: str = "/", host: str = "127.0.0.1") -> tuple[Any, list[str]]:
    """What ``fetch`` returns or raises for a server of one's own, and the requests that reached it."""
    reached: list[str] = []

    async def run() -> Any:
        async def count(request: web.Request) -> web.StreamResponse:
            reached.append(f"{request.host.split(':')[0]}{request.path}")
            return await answer(request)

        app = web.Application()
        app.add_routes([web.get("/{path:.*}", count)])
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "0.0.0.0", 0)
        await site.start()
        try:
            return await fetch(f"http://{host}:{runner.addresses[0][1]}{path}")
        except OSError as error:
            return str(error)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), reached


async def image(request: web.Request) -> web.Response:
    return web.Response(body=b"image")


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one address that counts as public."""
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]"])
def test_a_server_of_the_machine_is_not_reached(host: str) -> None:
    error, reached = fetched(image, host=host)
    assert error.startswith("--allow_image_urls fetches from public addresses only, and ")
    assert error.endswith(": send a data URL")
    assert reached == []


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f.1", "0177.0.0.1"])
def test_no_spelling_of_its_address_leads_to_the_machine(host: str) -> None:
    assert fetched(image, host=host)[1] == []


def test_the_address_that_is_connected_to_is_the_one_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that resolves to a public address when it is looked at, and to the machine itself afterwards."""
    answers = iter(["8.8.8.8", "127.0.0.1"])
    resolve = socket.getaddrinfo

    def rebinding(host: Any, *arguments: Any, **named: Any) -> Any:
        return resolve(
            next(answers, "127.0.0.1") if host == "pictures.example" else host, *arguments, **named
        )

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    assert socket.getaddrinfo("pictures.example", 80)[0][4][0] == "8.8.8.8"
    error, reached = fetched(image, host="pictures.example")
    assert "pictures.example is at 127.0.0.1: send a data URL" in error
    assert reached == []


def test_what_public_addresses_give_is_returned(local: None) -> None:
    assert fetched(image, "/a.png") == (b"image", ["127.0.0.1/a.png"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://127.0.0.2:{port}/secret", "127.0.0.2 is at 127.0.0.2: send a data URL"),
        ("//[::1]:{port}/secret", "::1 is at ::1: send a data URL"),
        (
            "file:///etc/passwd",
            "redirects to 'file:///etc/passwd', and --allow_image_urls fetches http and https only",
        ),
        (
            "ftp://127.0.0.1/a",
            "redirects to 'ftp://127.0.0.1/a', and --allow_image_urls fetches http and https only",
        ),
        ("/again", "--allow_image_urls follows 5 redirects, and it has more"),
    ],
)
def test_a_redirect_is_held_to_the_same_rules(local: None, target: str, message: str) -> None:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": target.format(port=request.url.port)})

    error, reached = fetched(redirect)
    assert message in error
    assert "127.0.0.2/secret" not in reached
    assert len(reached) == (6 if target == "/again" else 1)


def test_a_redirect_to_a_public_address_is_followed(local: None) -> None:
    async def redirect(request: web.Request) -> web.Response:
        return (
            await image(request)
            if request.path == "/b"
            else web.Response(status=307, headers={"Location": "/b"})
        )

    assert fetched(redirect, "/a") == (b"image", ["127.0.0.1/a", "127.0.0.1/b"])


def test_a_body_without_end_is_read_to_its_bound(
    local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_MOST_BYTES", 2**20)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(2**16))

    assert fetched(endless)[0] == "--allow_image_urls reads 1 MiB of an image, and it is larger"


def test_a_compressed_body_is_not_inflated(local: None) -> None:
    async def compressed(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=b"as it is", headers={"Content-Encoding": "gzip"})

    assert fetched(compressed)[0] == b"as it is"


@pytest.mark.parametrize("form", ["drops", "hops"])
def test_the_time_of_all_reads_and_hops_is_bounded(
    local: None, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(fetching, "_MOST_SECONDS", 0.5)
    monkeypatch.setattr(fetching, "_MOST_REDIRECTS", 10**6)

    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        if form == "hops":
            return web.Response(status=302, headers={"Location": "/again"})
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b".")
            await asyncio.sleep(0.05)

    assert (
        fetched(slow)[0] == "--allow_image_urls waits 0.5 seconds for an image, and it took longer"
    )
