"""A program that plays episodes by itself and is told of each: the form of agents for services."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import aiohttp

from openppo.agents.episodes import Agent
from openppo.agents.gateway.server import Gateway
from openppo.agents.program import row_json
from openppo.agents.session import Session, Task
from openppo.config.fields import mask_credentials
from openppo.types import Prompt

_SECONDS_TO_ACCEPT = 30.0
_SECONDS_BETWEEN_TRIES = 0.5


class ServiceError(Exception):
    """A service that did not take an episode, or said that it failed."""


class ServiceAgent(Agent):
    """The program at ``url``, which plays an episode for each ``POST url/run`` and has the model at ``base_url``.

    It answers 202 at once, and ends the episode with ``POST {base_url}/complete``: ``{"reward": ..., "attempt": ...}``,
    or ``{"status": "failed"}``. What it does after that, or after its time limit, changes nothing: its key is taken
    back.
    """

    def __init__(self, url: str) -> None:
        self.url, self._attempts = url.rstrip("/"), count(1)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """``ValueError`` if nothing answers at the address."""
        try:
            urlopen(self.url, timeout=_SECONDS_TO_ACCEPT).close()
        except HTTPError:
            return  # an answer, of a service that has no such page
        except OSError as error:
            raise ValueError(
                f"{self._name} does not answer ({error}): start it before the run."
            ) from error

    async def start(self) -> None:
        """Listen on a free port."""
        self.gateway = Gateway()
        await self.gateway.start()
        limit = aiohttp.ClientTimeout(total=_SECONDS_TO_ACCEPT)
        self._http = aiohttp.ClientSession(timeout=limit, json_serialize=row_json)

    async def stop(self) -> None:
        """Listen no more."""
        await self._http.close()
        await self.gateway.stop()

    async def run(self, task: Task, session: Session) -> float | Mapping[str, float] | None:
        """Hand the episode over, and wait for its end."""
        attempt, ended = next(self._attempts), asyncio.get_running_loop().create_future()
        key = self.gateway.open(session, attempt, ended)
        try:
            await self._hand_over(self._of_episode(task, key, attempt))
            status = await ended
        finally:
            self.gateway.close(key)
        if status != "completed":
            raise ServiceError(f"{self._name} says that the episode {status}")
        return None

    async def _hand_over(self, body: dict[str, Any]) -> None:
        """Try until the service takes it: one that has just been killed may be starting again."""
        while True:
            with suppress(aiohttp.ClientConnectorError):  # it was never sent
                async with self._http.post(f"{self.url}/run", json=body) as answer:
                    if answer.status == 202:
                        return
                    text = (await answer.text())[:200]
                    raise ServiceError(f"{self._name} answered {answer.status}, not 202: {text}")
            await asyncio.sleep(_SECONDS_BETWEEN_TRIES)

    def _of_episode(self, task: Task, key: str, attempt: int) -> dict[str, Any]:
        url, episode = self.gateway.base_url(key), f"{task.group}-{secrets.token_hex(4)}"
        of_group = {
            "group": task.group,
            "seed": task.seed,
            "row": task.prompt.row,
            "messages": task.messages,
        }
        return {"episode": episode, "attempt": attempt, **of_group, "base_url": url, "api_key": key}

    @property
    def _name(self) -> str:
        return f"the service {mask_credentials(self.url)}"
