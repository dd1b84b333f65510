"""OpenRLHF's agent files run but for the import."""

from pathlib import Path
from typing import Any

import pytest

from openppo.agents import agent_source
from openppo.agents.openrlhf import OpenRLHFAgent
from openppo.config.agents import AgentConfig
from openppo.tracking import Metrics
from openppo.types import Ending, Prompt, SamplingParams, SingleProcess

HEAD = """
import torch
from openppo.agents.openrlhf import AgentInstanceBase, MultiTurnAgentExecutor
SEEN = []
"""
INSTANCE = """
class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.n = 0

    async def reset(self, states, **kwargs):
        SEEN.append(states)
        return {"observation": states["observation"] + "Assistant:"}

    async def step(self, states, **kwargs):
        SEEN.append(states)
        self.n += 1
        reward = torch.tensor([0.25]) if self.n < 3 else 1
        return {
            "rewards": reward,
            "scores": torch.tensor(0.5),
            "environment_feedback": f"\\n\\nHuman: no, {self.n}\\n</s>\\n\\nAssistant: ",
            "done": self.n == 3,
            "sampling_params": states.get("sampling_params", None),
            "extra_logs": {"dummy_scores": torch.tensor([self.n])},
        }
"""
EXECUTOR = """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture
def agent_file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        (tmp_path / "agent_func.py").write_text(text)
        return str(tmp_path / "agent_func.py")

    return write


def play(sampler: Any, n: int = 1, **limits: Any) -> tuple[list[Any], dict[str, float]]:
    metrics = Metrics()
    prompts = [Prompt("Human: hi\n", [5, 6], label="answer") for _ in range(n)]
    params = SamplingParams(limits.pop("max_new_tokens", 64), **limits)
    sampled = sampler.sample(prompts, params, 1, seed=1, first_group=0, metrics=metrics)
    assert all(len(sample.segments) == 1 for sample in sampled)
    return sampled, metrics.reduced(SingleProcess())


def seen_by(agent: OpenRLHFAgent) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = agent.make.step.__globals__["SEEN"]
    return seen


def test_feedback_is_appended_to_the_recorded_ids(make_sampler, chat_tokenizer, agent_file):
    agent = OpenRLHFAgent(agent_file(HEAD + INSTANCE + EXECUTOR))
    sampler = make_sampler(agent, lambda prompt: "yes")
    [sample], metrics = play(sampler)
    ids = [
        chat_tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("Human: hi\nAssistant:", "yes")
    ]
    feedback = [
        chat_tokenizer(f"\n\nHuman: no, {i}\n</s>\n\nAssistant: ", add_special_tokens=False)[
            "input_ids"
        ]
        for i in (1, 2)
    ]
    answer = [*ids[1], chat_tokenizer.eos_token_id]
    tokens = [*ids[0], *answer, *feedback[0], *answer, *feedback[1], *answer]
    assert sample.last.token_ids == tokens
    assert sample.n_actions == 3 * len(answer)
    assert sample.scores == {"reward": 1.5} and sample.last.token_rewards is None
    assert sample.episode.ending is Ending.COMPLETED
    assert metrics["agent/dummy_scores"] == 3 and metrics["agent/scores"] == 0.5
    assert metrics["agent/rerendered_turns"] == 0


def test_an_instance_sees_what_it_sees_in_openrlhf(make_sampler, agent_file):
    agent = OpenRLHFAgent(agent_file(HEAD + INSTANCE + EXECUTOR))
    play(make_sampler(agent, lambda prompt: "yes"))
    first, *steps = seen_by(agent)
    assert first == {"observation": "Human: hi\n", "prompt": "Human: hi\n", "label": "answer"}
    assert [step["action_text"] for step in steps] == ["yes"] * 3  # without EOS, as vLLM's text
    assert (
        steps[1]["observation_text"]
        == "Human: hi\nAssistant:yes\n\nHuman: no, 1\n</s>\n\nAssistant: "
    )
    assert {step["label"] for step in steps} == {"answer"}
    assert steps[0]["sampling_params"].max_tokens == 64


def test_each_episode_has_an_instance_of_its_own(make_sampler, agent_file):
    agent = OpenRLHFAgent(agent_file(HEAD + INSTANCE + EXECUTOR))
    sampled, metrics = play(make_sampler(agent, lambda prompt: "yes"), 5)
    assert len(sampled) == 5 and metrics["agent/turns"] == 3


def test_a_limit_keeps_the_rewards_so_far(make_sampler, agent_file):
    agent = OpenRLHFAgent(agent_file(HEAD + INSTANCE))
    [sample], _ = play(make_sampler(agent, lambda prompt: "yes", max_turns=2))
    assert sample.episode.ending is Ending.MAX_TURNS and sample.scores == {"reward": 0.5}


def test_sampling_params_lower_the_length_and_leave_the_distribution(make_sampler, agent_file):
    change = """
        states["sampling_params"].max_tokens = 2
        states["sampling_params"].temperature = 9.0
        return {"rewards": 1"""
    agent = OpenRLHFAgent(
        agent_file(HEAD + INSTANCE.replace('return {\n            "rewards": reward', change, 1))
    )
    sampler = make_sampler(agent, lambda prompt: "yes")
    [sample], metrics = play(sampler)
    assert [stop - start for start, stop in sample.last.spans] == [4, 2, 2]
    assert metrics["agent/sampling_overridden"] == 2


def test_an_executor_may_name_the_class(make_sampler, agent_file, caplog):
    executor = (
        EXECUTOR.replace("(AgentInstance)", "(Game)")
        + "    async def execute(self):\n        pass\n"
    )
    file = agent_file(HEAD + INSTANCE.replace("AgentInstance(", "Game(") + executor)
    [sample], _ = play(
        make_sampler(agent_source(AgentConfig(agent=file)).agent, lambda prompt: "yes")
    )
    assert sample.scores == {"reward": 1.5}
    assert "AgentExecutor.execute is not run" in caplog.text


def test_an_agent_file_needs_prompts(agent_file):
    assert agent_source(AgentConfig(agent=agent_file(HEAD + INSTANCE))).needs_prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "from openrlhf.utils.agent import AgentInstanceBase" + INSTANCE,
            "write 'from openppo.agents.openrlhf import",
        ),
        (
            "async def solve(task, session):\n    return 1.0\n",
            "or name a coroutine of the file: .*agent_func.py:NAME",
        ),
        ("class AgentInstance:\n    pass\n", "no AgentInstance, an AgentInstanceBase"),
    ],
)
def test_another_file_is_refused(agent_file, text, message):
    with pytest.raises(ValueError, match=message):
        OpenRLHFAgent(agent_file(text))


def test_top_k_0_of_an_agent_is_the_runs_own(make_sampler, agent_file):
    change = """
        states["sampling_params"].top_k = 0
        return {"rewards": 1"""
    agent = OpenRLHFAgent(
        agent_file(HEAD + INSTANCE.replace('return {\n            "rewards": reward', change, 1))
    )
    _, metrics = play(make_sampler(agent, lambda prompt: "yes"))
    assert metrics["agent/sampling_overridden"] == 0
