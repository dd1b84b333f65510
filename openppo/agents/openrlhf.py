"""OpenRLHF's agent files: an instance for each episode, with feedback as text after the recorded tokens."""

import re
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openppo import logger
from openppo.agents.episodes import Agent
from openppo.agents.session import Session
from openppo.config.rollout import ALL_TOKENS
from openppo.types import EpisodeInput, SamplingParams
from openppo.user_code import load_module


class AgentInstanceBase(ABC):
    """An environment of one episode."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 (most need nothing)
        pass

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the first text for the model as ``observation``; the prompt's unless overridden."""
        return states

    @abstractmethod
    async def step(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return ``rewards``, ``environment_feedback`` and ``done`` after the model's ``action_text``."""


class MultiTurnAgentExecutor:
    """The class of the instances, which ``OpenRLHFAgent`` steps."""

    def __init__(
        self, agent_instance_cls: type[AgentInstanceBase] | None = None, *_: Any, **__: Any
    ) -> None:
        self.agent_instance_cls = agent_instance_cls


_IMPORTS_OPENRLHF = re.compile(r"^\s*(from|import) openrlhf\b", re.MULTILINE)


class OpenRLHFAgent(Agent):
    """Steps an instance of a file's ``AgentInstance``, or of the class that its ``AgentExecutor`` names."""

    def __init__(self, location: str) -> None:
        file = Path(location).expanduser()
        if file.is_file() and _IMPORTS_OPENRLHF.search(file.read_text("utf-8")):
            raise ValueError(
                f"--agent {location} imports OpenRLHF: write 'from openppo.agents.openrlhf import ...'."
            )

        members = vars(load_module(file, f"--agent {location}"))
        executor = members.get("AgentExecutor", MultiTurnAgentExecutor)
        if hasattr(executor, "execute"):
            logger.warning(
                "--agent %s: AgentExecutor.execute is not run; instances are stepped as usual",
                location,
            )

        self.make: Any = members.get("AgentInstance") or executor().agent_instance_cls
        if not (isinstance(self.make, type) and issubclass(self.make, AgentInstanceBase)):
            raise ValueError(
                f"--agent {location}: it has no AgentInstance, an AgentInstanceBase of openppo.agents.openrlhf. "
                f"Write one, or name a coroutine of the file: {location}:NAME."
            )

    async def run(self, task: EpisodeInput, session: Session) -> None:
        """Play an episode; its reward, on the last action, is the sum over all steps, as in OpenRLHF."""
        instance = self.make()
        prompt = task.prompt.text
        label = task.prompt.label
        states = {"observation": prompt, "prompt": prompt, "label": label}
        text = str((await instance.reset(states))["observation"])

        sampling = _vllm_params(session.setup.params)
        token_ids = await session.encode(text)
        turn = await session.extend(None, token_ids, {"role": "user", "content": text})

        total_reward = 0.0
        while True:
            states = {
                "observation_text": text,
                "action_text": turn.text,
                "label": label,
                "sampling_params": sampling,
            }
            result = await instance.step(states)
            total_reward += float(result["rewards"])
            session.reward(total_reward)

            logs = {"scores": result.get("scores", total_reward)}
            logs |= result.get("extra_logs") or {}
            session.record_metrics({name: float(value) for name, value in logs.items()})

            feedback = str(result["environment_feedback"])
            session.record_output(feedback)
            if result["done"]:
                return

            text += turn.text + feedback
            sampling = result.get("sampling_params") or sampling
            is_overridden = _differs(sampling, _vllm_params(session.setup.params))
            session.counts["sampling_overridden"] += is_overridden
            turn = await session.extend(
                turn,
                await session.encode(feedback),
                {"role": "user", "content": feedback},
                max_tokens=sampling.max_tokens,
                stop=sampling.stop or (),
            )


def _differs(sampling: Any, ours: Any) -> bool:
    """True if two parameters in vLLM's names sample from different distributions."""
    if sampling.top_k != ours.top_k and {sampling.top_k, ours.top_k} != {*ALL_TOKENS}:
        return True
    return bool(sampling.temperature != ours.temperature or sampling.top_p != ours.top_p)


def _vllm_params(params: SamplingParams) -> SimpleNamespace:
    """Sampling parameters under vLLM's names."""
    return SimpleNamespace(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or -1,
        stop=list(params.stop),
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        logprobs=1,
    )
