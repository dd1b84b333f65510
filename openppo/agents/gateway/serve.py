"""A model behind the gateway, without training: to debug an agent."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from openppo import logger
from openppo.agents.driver import EngineDriver
from openppo.agents.gateway.server import Gateway
from openppo.agents.parsers import choose_parser
from openppo.agents.renderer import Renderer
from openppo.agents.session import Session, SessionSetup, Task, Tools, Turn
from openppo.config import ServeAgentConfig, parse_template_kwargs
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import Message
from openppo.models.actor import Actor
from openppo.models.loading import attention_implementation, model_error_context
from openppo.models.pretrained import check_model, context_length, eos_token_ids, load_tokenizer, pad_token_id
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.row_cache import check_cache
from openppo.rollout.sampling import decoder, sampling_params
from openppo.strategy.comm import InferenceStrategy
from openppo.tracking.console import write_line
from openppo.types import Prompt


class _LoggedSession(Session):
    """A session that logs each turn."""

    async def chat(self, messages: Sequence[Message], tools: Tools | None = None, **limits: Any) -> Turn:
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
        flag, name, trust = "--pretrain", options.pretrain, options.trust_remote_code
        self.strategy, self.seed = InferenceStrategy(options.bf16), options.seed
        self.gateway = Gateway(port=options.port, newcomer=self._session)
        model_config = check_model(name, flag, trust)
        check_cache(model_config)
        attention_implementation(options.flash_attn, options.bf16)
        kwargs = parse_template_kwargs(options.chat_template_kwargs)
        tokenizer = load_tokenizer(name, flag, trust_remote_code=trust, template_kwargs=kwargs)
        parser = choose_parser(tokenizer.chat_template, options.tool_parser, f"{flag} {name}")
        with model_error_context(flag, name):
            actor = Actor(name, bf16=options.bf16, flash_attn=options.flash_attn, trust_remote_code=trust)
        policy: Any = self.strategy.prepare_frozen(actor).model
        eos, context = eos_token_ids(policy, tokenizer), context_length(model_config)
        engine = HFEngine(policy, eos, pad_token_id(tokenizer))
        engine.decode = decoder(tokenizer)
        self.driver, limits = EngineDriver(engine), AgentConfig(max_turns=options.max_turns, history=options.history)
        longest = options.episode_max_len or context or sys.maxsize
        sampling = Renderer(tokenizer, parser, eos), self.driver.generate, sampling_params(options)
        self.setup = SessionSetup(*sampling, limits, longest, context)

    def fit(self) -> None:
        """Serve until a signal ends the process."""
        self.driver.drive(self._serve())

    async def _serve(self) -> None:
        await self.gateway.start()
        url = f"OPENAI_BASE_URL={self.gateway.address}/v1 OPENAI_API_KEY=$RANDOM"
        write_line(f"Each OPENAI_API_KEY is an episode of its own:\n    {url} python my_agent.py", sys.stdout)
        await asyncio.Event().wait()

    def _session(self, key: str) -> Session:
        return _LoggedSession(self.setup, Task(Prompt(key or "no key", []), self.seed))

    def close(self) -> None:
        """Release the engine's thread and the process group."""
        self.driver.close()
        self.strategy.close()
