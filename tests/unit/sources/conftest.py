"""Samples without a model."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openppo.config import TrainPPOConfig, from_options
from openppo.rollout.driver import EngineDriver
from openppo.rollout.engine import Engine
from openppo.sources.task import Task
from openppo.types import (
    Completion,
    Ending,
    Episode,
    EpisodeInput,
    FinishReason,
    Prompt,
    Sample,
    SamplingParams,
)

PROMPTS = [Prompt(f"prompt {i}", [3 + i], index=i) for i in range(8)]


class IdleEngine(Engine):
    """It has nothing to do."""

    busy = False

    def submit(self, *_: Any, **__: Any) -> int:
        raise NotImplementedError

    cancel = step = with_weights = submit  # type: ignore[assignment]


class StubPlayer:
    """A sample of one token after ``wait(group)`` seconds; ``failing`` tells of which seeds there is none."""

    def __init__(self) -> None:
        self.driver = EngineDriver(IdleEngine())
        self.asked: list[tuple[int, int, int]] = []
        self.temperatures: list[float] = []
        self.failing: Callable[[int, int], bool] = lambda group, seed: False
        self.wait: Callable[[int], float] = lambda group: 0.0

    async def start(self) -> None:
        pass

    async def play(self, task: EpisodeInput, params: SamplingParams) -> Sample:
        self.asked.append((task.group, task.seed, task.env_seed))
        self.temperatures.append(params.temperature)
        await asyncio.sleep(self.wait(task.group))
        counts = {"played": 1.0}
        if self.failing(task.group, task.seed):
            error = f"no answer to {task.prompt.text}"
            episode = Episode([], Ending.AGENT_ERROR, n_turns=0, error=error, counts=counts)
            return Sample.failed(task, episode)
        version = self.driver.engine.version
        completion = Completion([1], [-1.0], [version], finish_reason=FinishReason.STOP)
        return Sample.of_response(task.prompt, completion, task.group)

    async def end(self) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[StubPlayer]:
    player = StubPlayer()
    yield player
    player.driver.close()


def task_of(**options: Any) -> Task:
    """The single task of a run on ``PROMPTS``, with three samples of each."""
    given = {
        "pretrain": "MODEL",
        "generate_max_len": 4,
        "n_samples_per_prompt": 3,
        "seed": 42,
        "advantage_estimator": "rloo",
        "rollout_batch_size": 2,
    }
    return Task("", from_options(TrainPPOConfig, **given | options), prompts=PROMPTS)


@pytest.fixture
def task() -> Task:
    return task_of()
