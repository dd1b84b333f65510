"""Samples without a model."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openppo.experience.estimators import ESTIMATORS
from openppo.orchestrator.groups import GroupPlan
from openppo.rollout.driver import EngineDriver
from openppo.rollout.engine import Engine
from openppo.rollout.samplers import SampleFailed
from openppo.types import Completion, FinishReason, Prompt, Sample, SamplingParams

PROMPTS = [Prompt(f"prompt {i}", [3 + i], index=i) for i in range(8)]


class IdleEngine(Engine):
    """It has nothing to do."""

    busy = False

    def submit(self, *_: Any, **__: Any) -> int:
        raise NotImplementedError

    cancel = step = with_weights = _drop_all = submit  # type: ignore[assignment]


class StubSampler:
    """A sample of one token after ``wait(group)`` seconds; ``failing`` tells of which seeds there is none."""

    def __init__(self) -> None:
        self.driver = EngineDriver(IdleEngine())
        self.asked: list[tuple[int, int, int]] = []
        self.failing: Callable[[int, int], bool] = lambda group, seed: False
        self.wait: Callable[[int], float] = lambda group: 0.0

    async def start(self) -> None:
        pass

    async def sample_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        env_seed: int,
        group: int,
        metrics: Any,
    ) -> Sample:
        self.asked.append((group, seed, env_seed))
        await asyncio.sleep(self.wait(group))
        if self.failing(group, seed):
            raise SampleFailed(f"no answer to {prompt.text}")
        metrics.add("sampled", 1.0, reduce="sum")
        version = self.driver.engine.version
        completion = Completion([1], [-1.0], [version], finish_reason=FinishReason.STOP)
        return Sample.of_response(prompt, completion, group)


@pytest.fixture
def sampler() -> Iterator[StubSampler]:
    stub = StubSampler()
    yield stub
    stub.driver.close()


@pytest.fixture
def plan() -> GroupPlan:
    return GroupPlan(PROMPTS, SamplingParams(4), 3, 42, ESTIMATORS["rloo"], {}, most_in_vain=0)
