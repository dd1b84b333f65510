"""OpenRLHF's agent files: an instance for each episode, whose feedback is text after the recorded tokens."""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import isawaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openppo import logger
from openppo.agents.episodes import Agent
from openppo.agents.session import Session, Task
from openppo.types import SamplingParams
from openppo.user_code import load_callable

_FILE = re.compile(r"(.+\.py)(?::(AgentExecutor|AgentInstance))?")


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
    """Names the class of the instances."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase], *_: Any, **__: Any) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``OpenRLHFAgent`` steps the instances."""


AgentExecutorBase = MultiTurnAgentExecutor
"""Its name before OpenRLHF 0.9.1."""


def is_openrlhf(location: str) -> bool:
    """Whether ``path.py`` is one of OpenRLHF's agent files, by the names of its classes."""
    return bool(_classes(location))


def _classes(location: str) -> set[str]:
    found = _FILE.fullmatch(location)
    if found is None or not (file := Path(found[1]).expanduser()).is_file():
        return set()
    return {*re.findall(r"^class (AgentExecutor|AgentInstance)\b", file.read_text("utf-8"), flags=re.MULTILINE)}


class OpenRLHFAgent(Agent):
    """Steps an instance of a file's ``AgentInstance``, or of the class that its ``AgentExecutor`` names."""

    def __init__(self, location: str) -> None:
        name = "AgentInstance" if "AgentInstance" in _classes(location) else "AgentExecutor"
        path = location.partition(".py")[0] + ".py"
        if re.search(r"^\s*(from|import) openrlhf\b", Path(path).expanduser().read_text("utf-8"), flags=re.MULTILINE):
            raise ValueError(f"--agent {location} imports OpenRLHF: write 'from openppo.agents.openrlhf import ...'.")
        made = load_callable(f"{path}:{name}", "--agent")
        executor: Any = vars(sys.modules[made.__module__]).get("AgentExecutor", MultiTurnAgentExecutor)
        if getattr(executor, "execute", None) is not MultiTurnAgentExecutor.execute:
            logger.warning("--agent %s: AgentExecutor.execute is not run; %s is stepped as usual", location, name)
        self.make: Any = made if name == "AgentInstance" else executor().agent_instance_cls
        if not (isinstance(self.make, type) and issubclass(self.make, AgentInstanceBase)):
            raise ValueError(f"--agent {location}: {self.make} is no AgentInstanceBase of openppo.agents.openrlhf.")

    async def run(self, task: Task, session: Session) -> None:
        """Play an episode. Its reward is the sum of all steps', on the last action, as in OpenRLHF."""
        instance = self.make.__new__(self.make)
        if isawaitable(begun := instance.__init__()):  # a coroutine before OpenRLHF 0.9.1
            await begun
        prompt, label, encode = task.prompt.text, task.prompt.label, session.setup.renderer.encode
        states = {"observation": prompt, "prompt": prompt, "label": label}
        text, total, sampling = str((await instance.reset(states))["observation"]), 0.0, _of_vllm(session.setup.params)
        turn = await session.begin(encode(text), [{"role": "user", "content": text}])
        while True:
            states = {"observation_text": text, "action_text": turn.text, "label": label, "sampling_params": sampling}
            made = await instance.step(states)
            if lacks := {"rewards", "environment_feedback", "done"} - {*made}:
                raise ValueError(f"step returned no {' and no '.join(sorted(lacks))}: put it into its dict.")
            total += float(made["rewards"])
            session.reward(total)
            session.metrics |= _numbers({"scores": made.get("scores", total), **(made.get("extra_logs") or {})})
            feedback = session.output = str(made["environment_feedback"])
            if made["done"]:
                return
            text += turn.text + feedback
            sampling = made.get("sampling_params") or sampling
            ours, distribution = _of_vllm(session.setup.params), ("temperature", "top_p", "top_k")
            session.counts["sampling_overridden"] += any(getattr(sampling, n) != getattr(ours, n) for n in distribution)
            said, most, stop = {"role": "user", "content": feedback}, sampling.max_tokens, sampling.stop or ()
            turn = await session.extend(turn, encode(feedback), said, max_tokens=most, stop=stop)


def _of_vllm(params: SamplingParams) -> SimpleNamespace:
    """Parameters by vLLM's names."""
    top_k, stop = params.top_k or -1, list(params.stop)
    named = {"temperature": params.temperature, "top_p": params.top_p, "top_k": top_k, "stop": stop}
    return SimpleNamespace(**named, max_tokens=params.max_new_tokens, min_tokens=params.min_new_tokens, logprobs=1)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
