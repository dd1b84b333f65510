"""OpenRLHF's agent files: an instance for each episode, whose feedback is text after the recorded tokens."""

import re
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openppo import logger
from openppo.agents.episodes import Agent
from openppo.agents.session import Session, Task
from openppo.config.rollout import ALL_TOKENS
from openppo.types import SamplingParams
from openppo.user_code import load_module


class AgentInstanceBase(ABC):
    """An environment of one episode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 (most need nothing)
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The first text that the model reads, ``observation``; of the prompt unless overridden."""
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """``rewards``, ``environment_feedback`` and ``done`` after the model's ``action_text``."""


class MultiTurnAgentExecutor:
    """Names the class of the instances, which ``OpenRLHFAgent`` steps."""

    def __init__(
        self, agent_instance_cls: type[AgentInstanceBase] | None = None, *_: Any, **__: Any
    ) -> None:
        self.agent_instance_cls = agent_instance_cls


class OpenRLHFAgent(Agent):
    """Steps an instance of a file's ``AgentInstance``, or of the class that its ``AgentExecutor`` names."""

    def __init__(self, location: str) -> None:
        file = Path(location).expanduser()
        if file.is_file() and re.search(
            r"^\s*(from|import) openrlhf\b", file.read_text("utf-8"), flags=re.MULTILINE
        ):
            raise ValueError(
                f"--agent {location} imports OpenRLHF: write 'from openppo.agents.openrlhf import ...'."
            )
        named = vars(load_module(file, f"--agent {location}"))
        executor = named.get("AgentExecutor", MultiTurnAgentExecutor)
        if hasattr(executor, "execute"):
            logger.warning(
                "--agent %s: AgentExecutor.execute is not run; instances are stepped as usual",
                location,
            )
        self.make: Any = named.get("AgentInstance") or executor().agent_instance_cls
        if not (isinstance(self.make, type) and issubclass(self.make, AgentInstanceBase)):
            raise ValueError(
                f"--agent {location}: it has no AgentInstance, an AgentInstanceBase of openppo.agents.openrlhf. "
                f"Write one, or name a coroutine of the file: {location}:NAME."
            )

    async def run(self, task: Task, session: Session) -> None:
        """Play an episode. Its reward is the sum of all steps', on the last action, as in OpenRLHF."""
        instance = self.make()
        prompt, label = task.prompt.text, task.prompt.label
        states = {"observation": prompt, "prompt": prompt, "label": label}
        text = str((await instance.reset(states))["observation"])
        total = 0.0
        sampling = _of_vllm(session.setup.params)
        turn = await session.extend(
            None, await session.encode(text), {"role": "user", "content": text}
        )
        while True:
            states = {
                "observation_text": text,
                "action_text": turn.text,
                "label": label,
                "sampling_params": sampling,
            }
            made = await instance.step(states)
            total += float(made["rewards"])
            session.reward(total)
            measured = {"scores": made.get("scores", total), **(made.get("extra_logs") or {})}
            session.metrics |= {name: float(value) for name, value in measured.items()}
            feedback = session.output = str(made["environment_feedback"])
            if made["done"]:
                return
            text += turn.text + feedback
            sampling = made.get("sampling_params") or sampling
            session.counts["sampling_overridden"] += _is_other(
                sampling, _of_vllm(session.setup.params)
            )
            said = {"role": "user", "content": feedback}
            most = sampling.max_tokens
            stop = sampling.stop or ()
            turn = await session.extend(
                turn, await session.encode(feedback), said, max_tokens=most, stop=stop
            )


def _is_other(sampling: Any, ours: Any) -> bool:
    """Whether two parameters in vLLM's names sample from different distributions."""
    same_top_k = sampling.top_k == ours.top_k or {sampling.top_k, ours.top_k} == {*ALL_TOKENS}
    return not same_top_k or (sampling.temperature, sampling.top_p) != (
        ours.temperature,
        ours.top_p,
    )


def _of_vllm(params: SamplingParams) -> SimpleNamespace:
    """Parameters by vLLM's names."""
    top_k, stop = params.top_k or -1, list(params.stop)
    named = {"temperature": params.temperature, "top_p": params.top_p, "top_k": top_k, "stop": stop}
    return SimpleNamespace(
        **named, max_tokens=params.max_new_tokens, min_tokens=params.min_new_tokens, logprobs=1
    )
