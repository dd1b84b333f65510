"""A model behind the gateway, without training: to debug an agent."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from openppo import logger
from openppo.agents.gateway.server import Gateway
from openppo.agents.parsers import choose_parser
from openppo.agents.renderer import Renderer
from openppo.agents.session import Session, SessionSetup, Task, Tools, Turn
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
from openppo.types import Prompt


class _LoggedSession(Session):
    """A session that logs each turn."""

    async def chat(
        self, messages: Sequence[Message], tools: Tools | None = None, **limits: Any
    ) -> Turn:
        """The model's answer."""
        turn = await super().chat(messages, tools, **limits)
        how = "rendered whole" if turn.parent is None else f"continues turn {turn.parent.number}"
        n_tokens = len(turn.prompt_ids), len(turn.completion.token_ids)
        error = "" if turn.malformed is None else f"; a tool call cannot be read: {turn.malformed}"
        said = (self.task.prompt.text, turn.number, how, *n_tokens, turn.finish_reason.value, error)
        logger.info("%s, turn %d: %s; %d tokens read, %d sampled, ends by %s%s", *said)
        return turn


class AgentServer:
    """The command serve_agent. Each key that a program sends opens an episode."""

    def __init__(self, options: ServeAgentConfig) -> None:
        """Open the port and load the model; ``ValueError`` names the flag to change."""
        self.gateway, self.seed = Gateway(port=options.port, newcomer=self._session), options.seed
        self.ended = asyncio.Event()
        self.strategy, policy = (
            InferenceStrategy(options.bf16, fused_kernels=options.fused_kernels),
            FrozenPolicy(options),
        )
        name = f"--pretrain {options.pretrain}"
        parser = choose_parser(policy.tokenizer.chat_template, options.tool_parser, name)
        policy.load(self.strategy.prepare_frozen)
        limits = AgentConfig(
            max_turns=options.max_turns,
            history=options.history,
            allow_image_urls=options.allow_image_urls,
        )
        self.driver = EngineDriver(policy.engine)
        sampling = self.driver.generate, sampling_params(options), limits
        longest = options.episode_max_len or policy.context or sys.maxsize
        tokens = [*placeholders(policy.config)]
        load = partial(load_processor, options.pretrain, "--pretrain", options.trust_remote_code)
        vision = Vision(
            load, tokens, policy.tokenizer, options=RowsConfig(), named=name
        ).for_agents(policy.config, name)
        renderer = Renderer(policy.tokenizer, parser, policy.eos_token_ids, vision=vision)
        self.setup = SessionSetup(renderer, *sampling, longest, policy.context)

    def fit(self) -> None:
        """Serve until SIGTERM or SIGINT; requests under way are cancelled."""
        signal.set_wakeup_fd(-1)  # else the watchdog ends the process, with the status of a failure
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
        return _LoggedSession(self.setup, Task(Prompt(key or "no key", []), self.seed))

    def close(self) -> None:
        """Release the engine's thread and the process group."""
        self.driver.close()
        self.strategy.close()
