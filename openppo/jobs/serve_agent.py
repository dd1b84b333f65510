"""A model behind the gateway, without training, to debug an agent."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from openppo import logger
from openppo.agents.gateway.server import Gateway
from openppo.agents.parsers import Tools, choose_parser
from openppo.agents.renderer import Renderer
from openppo.agents.session import Session, SessionSetup
from openppo.agents.turn import Turn
from openppo.config import RowsConfig, ServeAgentConfig
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message
from openppo.datasets.vision import Vision
from openppo.models.pretrained import load_processor
from openppo.models.vision_models import placeholders
from openppo.rollout.driver import EngineDriver
from openppo.rollout.policy import FrozenPolicy
from openppo.rollout.sampling import sampling_params
from openppo.strategy.comm import InferenceStrategy
from openppo.tracking.console import write_line
from openppo.types import EpisodeInput, Prompt


class _LoggedSession(Session):
    """A session that logs each turn."""

    async def chat(
        self, messages: Sequence[Message], tools: Tools | None = None, **limits: Any
    ) -> Turn:
        """Return the model's answer."""
        turn = await super().chat(messages, tools, **limits)
        origin = "rendered whole" if turn.parent is None else f"continues turn {turn.parent.number}"
        error = "" if turn.malformed is None else f"; a tool call cannot be read: {turn.malformed}"
        logger.info(
            "%s, turn %d: %s; %d tokens read, %d sampled, ends by %s%s",
            self.task.prompt.text,
            turn.number,
            origin,
            len(turn.prompt_ids),
            len(turn.completion.token_ids),
            turn.finish_reason.value,
            error,
        )
        return turn


class AgentServer:
    """The command serve_agent. Each key that a program sends opens an episode."""

    def __init__(self, options: ServeAgentConfig) -> None:
        """Open the port and load the model; ``ValueError`` names the flag to change."""
        self.gateway = Gateway(port=options.port, newcomer=self._session)
        self.seed = options.seed
        self.ended = asyncio.Event()
        self.strategy = InferenceStrategy(options.bf16, fused_kernels=options.fused_kernels)

        policy = FrozenPolicy(options)
        name = f"--pretrain {options.pretrain}"
        parser = choose_parser(policy.tokenizer.chat_template, options.tool_parser, name)
        policy.load(self.strategy.prepare_frozen)
        self.driver = EngineDriver(policy.engine)

        load = partial(load_processor, options.pretrain, "--pretrain", options.trust_remote_code)
        image_tokens = list(placeholders(policy.config))
        vision = Vision(
            load, image_tokens, policy.tokenizer, options=RowsConfig(), named=name
        ).for_agents(policy.config, name)
        self.setup = SessionSetup(
            Renderer(policy.tokenizer, parser, policy.eos_token_ids, vision=vision),
            self.driver.generate,
            sampling_params(options),
            options=AgentConfig(
                max_turns=options.max_turns,
                history=options.history,
                allow_image_urls=options.allow_image_urls,
            ),
            longest=options.episode_max_len or policy.context or sys.maxsize,
            context=policy.context,
        )

    def fit(self) -> None:
        """Serve until SIGTERM or SIGINT; running requests are cancelled then."""
        # Otherwise the watchdog ends the process, with the status of a failure.
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.driver.loop.call_soon_threadsafe(self.ended.set))
        self.driver.drive(self._serve())

    async def _serve(self) -> None:
        await self.gateway.start()
        url = f"OPENAI_BASE_URL={self.gateway.address}/v1 OPENAI_API_KEY=$RANDOM"
        write_line(
            f"Each OPENAI_API_KEY is an episode of its own:\n    {url} python my_agent.py",
            sys.stdout,
        )
        await self.ended.wait()
        await self.gateway.stop()

    def _session(self, key: str) -> Session:
        return _LoggedSession(self.setup, EpisodeInput(Prompt(key or "no key", []), self.seed))

    def close(self) -> None:
        """Release the engine's thread and the process group."""
        self.driver.close()
        self.strategy.close()
