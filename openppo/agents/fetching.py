"""Images from addresses in messages, which anybody may have written: public addresses only, within bounds."""

import asyncio
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from openppo.datasets.templates import shortened

_MOST_SECONDS = 30.0
_MOST_BYTES = 20 * 2**20
_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_UNICAST = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")
_CLOUD_METADATA = (
    ip_network("192.0.0.0/24"),  # Oracle
    ip_network("168.63.129.16/32"),  # Azure
)


def is_public(address: str) -> bool:
    """True for an IP address of the internet; an IPv6 address is as public as the IPv4 address in it."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is None:
            return ip in _UNICAST and ip.is_global
        ip = inner

    is_metadata = any(ip in network for network in _CLOUD_METADATA)
    return ip.is_global and not ip.is_multicast and not is_metadata


async def fetch(address: str) -> bytes:
    """Load the body at ``address`` or a redirect of it.

    ``OSError`` if that fails or exceeds a bound. The address that a socket connects to is the one that is checked, so
    no name can resolve to another in between.
    """
    refused: list[str] = []

    def open_socket(info: Any) -> socket.socket:
        family, kind, protocol, _, (host, *_) = info
        if not is_public(host):
            refused.append(host)
            raise OSError(f"{host} is not public")
        return socket.socket(family, kind, protocol)

    client = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(socket_factory=open_socket),
        headers={"Accept-Encoding": "identity"},  # a small body cannot become a large one
        auto_decompress=False,
    )
    try:
        async with asyncio.timeout(_MOST_SECONDS), client:
            return await _followed(client, address)
    except TimeoutError as error:
        raise OSError(
            f"--allow_image_urls waits {_MOST_SECONDS:g} seconds for an image, and it took longer"
        ) from error
    except aiohttp.ClientConnectorError as error:
        if not refused:
            raise OSError(f"{type(error).__name__} {error}") from error
        where = f"{error.host} is at {', '.join(refused)}"
        raise OSError(
            f"--allow_image_urls fetches from public addresses only, and {where}: send a data URL"
        ) from error
    except aiohttp.ClientError as error:
        raise OSError(f"{type(error).__name__} {error}") from error


async def _followed(client: aiohttp.ClientSession, url: str) -> bytes:
    """Load the body at ``url``, or at the end of its redirects."""
    for _ in range(1 + _MOST_REDIRECTS):
        async with client.get(url, allow_redirects=False) as answer:
            if answer.status not in _REDIRECTS:
                return await _body(answer)
            url = urljoin(url, answer.headers.get("Location", ""))
        if urlsplit(url).scheme not in ("http", "https"):
            raise OSError(
                f"it redirects to {shortened(url)}, and --allow_image_urls fetches http and https only"
            )
    raise OSError(f"--allow_image_urls follows {_MOST_REDIRECTS} redirects, and it has more")


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    answer.raise_for_status()
    content = bytearray()
    async for chunk in answer.content.iter_chunked(2**16):
        content += chunk
        if len(content) > _MOST_BYTES:
            raise OSError(
                f"--allow_image_urls reads {_MOST_BYTES // 2**20} MiB of an image, and it is larger"
            )
    return bytes(content)
