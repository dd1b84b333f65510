"""New weights while requests are under way: each token is of the version that is recorded with it."""

import asyncio
import copy
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openppo.media import TokenIds
from openppo.models.log_probs import log_probs_from_logits
from openppo.rollout.driver import EngineDriver
from openppo.rollout.hf_engine import HFEngine
from openppo.types import Completion, SamplingParams
from tests.unit.rollout.conftest import assert_same
from tests.unit.rollout.test_prefixes import EOS_IDS, PARAMS, WHOLE, finish, whole

LONG = SamplingParams(max_new_tokens=24, temperature=1.3)


@pytest.fixture
def model(models: Any) -> Any:
    """A copy, whose weights change."""
    return copy.deepcopy(models["llama"])


def train(model: Any, version: int) -> None:
    """Other weights, a function of ``version`` alone."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def assert_versions_explain_log_probs(
    model: Any, asked: list[tuple[list[int], Completion]], params: Any
) -> None:
    """By a plain forward over prompt and response with the weights of each token's version."""
    for version in sorted({v for _, completion in asked for v in completion.versions}):
        train(model, version)
        for prompt, completion in asked:
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                logits = (
                    model(ids, use_cache=False).logits[:, len(prompt) - 1 : -1] / params.temperature
                )
            expected = log_probs_from_logits(logits, ids[:, len(prompt) :])[0].tolist()
            for ours, theirs, of_token in zip(
                completion.log_probs, expected, completion.versions, strict=True
            ):
                assert of_token != version or abs(ours - theirs) < 1e-4


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("way", ["in one with_weights", "between two"])
def test_requests_under_way_continue_with_the_new_weights(model, prompts, way):
    engine = HFEngine(model, (), 0, 3)  # fewer rows than prompts
    train(model, 0)
    done: dict[int, Completion] = {}

    def steps(n: int) -> None:
        for _ in range(n):
            engine.step()
            done.update(engine.collect())

    numbers = [
        engine.submit(TokenIds(prompt), LONG, i, park=True) for i, prompt in enumerate(prompts)
    ]
    for version in range(3):
        train(model, version)
        engine.use_version(version)
        if way == "between two":
            with engine.with_weights(WHOLE):
                steps(7)
        else:
            steps(7)
    while engine.busy:
        steps(1)
    completions = [done[number] for number in numbers]
    assert any(len({*each.versions}) == 3 for each in completions)
    assert all(each.versions == sorted(each.versions) for each in completions)
    assert_versions_explain_log_probs(model, list(zip(prompts, completions, strict=True)), LONG)


def test_nothing_kept_survives_new_weights(model, prompts):
    engine = HFEngine(model, EOS_IDS, 0, 8)
    first = finish(
        engine,
        [engine.submit(TokenIds(prompt), PARAMS, i, park=True) for i, prompt in enumerate(prompts)],
    )
    longer = [[*prompt, *each.token_ids, 3] for prompt, each in zip(prompts, first, strict=True)]
    train(model, 1)
    engine.use_version(1)
    again = [
        engine.submit(TokenIds(p), PARAMS, 9, continue_from=e.parked)
        for p, e in zip(longer, first, strict=True)
    ]
    assert_same(finish(engine, again), [whole(model, prompt, 9) for prompt in longer])
    assert engine.reused_tokens == 0


@pytest.fixture
def driver(model: Any) -> Iterator[EngineDriver]:
    made = EngineDriver(HFEngine(model, EOS_IDS, 0, 8))
    yield made
    made.close()


async def until(driver: EngineDriver, n_steps: int) -> None:
    """Wait for so many more steps."""
    end = driver.steps + n_steps
    while driver.steps < end:
        await asyncio.sleep(0)


def ask(driver: EngineDriver, prompts: list[list[int]], params: SamplingParams = LONG) -> list[Any]:
    return [
        asyncio.run_coroutine_threadsafe(driver.generate(TokenIds(prompt), params, i), driver.loop)
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("leave", ["drain", "continue", "abort"])
def test_requests_outlive_the_work_as_leave_says(model, driver, prompts, leave):
    train(model, 0)
    driver.engine.eos_token_ids = frozenset()
    answers = ask(driver, prompts)
    driver.drive(until(driver, 6), leave=leave)
    assert driver.engine.busy == (leave == "continue")
    train(model, 1)
    driver.engine.use_version(1)

    async def rest() -> list[Completion]:
        return await asyncio.gather(*map(asyncio.wrap_future, answers))

    found = driver.drive(rest())
    versions = {*(v for each in found for v in each.versions)}
    assert versions == {"drain": {0}, "continue": {0, 1}, "abort": {1}}[leave]
    if leave == "abort":
        engine = HFEngine(model, (), 0, 8)
        assert_same(
            found, engine.generate([TokenIds(ids) for ids in prompts], LONG, range(len(prompts)))
        )
    assert_versions_explain_log_probs(model, list(zip(prompts, found, strict=True)), LONG)


def test_requests_of_one_hold_are_sampled_as_one_batch(model, driver, prompts):
    """To the bit: they enter the engine together, in its order."""

    async def work() -> list[Completion]:
        with driver.hold():
            asked = [
                asyncio.ensure_future(driver.generate(TokenIds(p), LONG, i, park=False))
                for i, p in enumerate(prompts)
            ]
            await asyncio.sleep(0)
        return await asyncio.gather(*asked)

    assert driver.drive(work()) == HFEngine(model, EOS_IDS, 0, 8).generate(
        [TokenIds(ids) for ids in prompts], LONG, range(len(prompts))
    )


SIZES = [pytest.param(24, 5, id="24"), pytest.param(256, 20, id="256", marks=pytest.mark.slow)]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("leave", ["drain", "continue"])
@pytest.mark.parametrize("n_sessions, n_syncs", SIZES)
def test_sessions_keep_their_history_over_syncs(model, driver, leave, n_sessions, n_syncs):
    """C3: conversations that go on while weights change; what is kept of earlier turns is of one version."""
    train(model, 0)
    params, asked = SamplingParams(6, temperature=1.3), list[tuple[list[int], Completion]]()
    going = SimpleNamespace(on=True)

    async def session(number: int) -> None:
        rng = random.Random(number)
        while going.on:
            ids, parked = [rng.randrange(3, 20) for _ in range(rng.randint(2, 6))], None
            for turn in range(3):
                completion = await driver.generate(
                    TokenIds(ids), params, rng.randrange(2**31), parked
                )
                asked.append((ids, completion))
                ids, parked = [*ids, *completion.token_ids, 3 + turn], completion.parked

    sessions = [
        asyncio.run_coroutine_threadsafe(session(i), driver.loop) for i in range(n_sessions)
    ]
    for version in range(n_syncs):
        train(model, version)
        driver.engine.use_version(version)
        driver.drive(until(driver, 9), leave=leave)
    going.on = False

    async def rest() -> None:
        await asyncio.gather(*map(asyncio.wrap_future, sessions))

    driver.drive(rest())
    assert all(each.versions == sorted(each.versions) for _, each in asked)
    mixed = sum(len({*each.versions}) > 1 for _, each in asked)
    assert mixed == 0 if leave == "drain" else mixed > 0
    assert driver.engine.reused_tokens > 0
    assert_versions_explain_log_probs(model, asked, params)
