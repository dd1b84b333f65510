"""A model behind the gateway, without training: to debug an agent."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Any

from openppo import logger
from openppo.agents.driver import EngineDriver
from openppo.agents.gateway.server import Gateway
from openppo.agents.parsers import choose_parser
from openppo.agents.renderer import Renderer
from openppo.agents.session import EpisodeEnded, Session, SessionSetup, Task, Tools, Turn
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
        key, first = self.task.prompt.text, not self.turns
        try:
            turn = await super().chat(messages, tools, **limits)
        except (EpisodeEnded, ValueError) as error:
            logger.warning("%s: refused (%s); another OPENAI_API_KEY is another episode", key, error)
            raise
        whole = "rendered" if first else "rendered anew, because these messages do not continue recorded ones"
        how = whole if turn.parent is None else f"continues turn {turn.parent.number}"
        read, sampled = len(turn.prompt_ids), len(turn.completion.token_ids)
        said = (key, turn.number, how, read, sampled, turn.finish_reason.value)
        logger.info("%s, turn %d: %s; %d tokens read, %d sampled, ends by %s", *said)
        if turn.malformed is not None:
            logger.warning("%s, turn %d: a tool call cannot be read: %s", key, turn.number, turn.malformed)
        return turn


class _OpenGateway(Gateway):
    """A gateway where a key that nobody has used opens an episode of ``setup``."""

    setup: SessionSetup
    seed = 0

    def unknown(self, key: str) -> Session:
        return _LoggedSession(self.setup, Task(Prompt(key or "no key", []), self.seed))


class AgentServer:
    """The command serve_agent."""

    def __init__(self, options: ServeAgentConfig) -> None:
        """Open the port and load the model; ``ValueError`` names the flag to change."""
        flag, name, trust = "--pretrain", options.pretrain, options.trust_remote_code
        self.strategy, self.gateway = InferenceStrategy(options.bf16), _OpenGateway(port=options.port)
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
        self.gateway.setup, self.gateway.seed = SessionSetup(*sampling, limits, longest, context), options.seed

    def fit(self) -> None:
        """Serve until SIGTERM or SIGINT; what is under way is given up."""
        end = asyncio.Event()
        signal.set_wakeup_fd(-1)  # or the watchdog would end the process at once
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.driver.loop.call_soon_threadsafe(end.set))

        async def serve() -> None:
            await self.gateway.start()
            url = f"OPENAI_BASE_URL={self.gateway.address}/v1 OPENAI_API_KEY=$RANDOM"
            write_line(f"Each OPENAI_API_KEY is an episode of its own:\n    {url} python my_agent.py", sys.stdout)
            await end.wait()
            await self.gateway.stop()

        self.driver.drive(serve())

    def close(self) -> None:
        """Release the engine's thread and the process group."""
        self.driver.close()
        self.strategy.close()
