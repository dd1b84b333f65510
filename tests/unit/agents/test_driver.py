"""Coroutines in an event loop, the engine on the calling thread."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest

from openppo.media import TokenIds
from openppo.rollout import driver
from openppo.rollout.driver import EngineDriver
from openppo.tracking import Metrics
from openppo.types import (
    EpisodeInput,
    FinishReason,
    Interrupted,
    Prompt,
    SamplingParams,
    StopCheck,
    segments_of,
)
from tests.unit.agents.conftest import ScriptedEngine

PARAMS = SamplingParams(64)
MakeDriver = Callable[..., EngineDriver]


@pytest.fixture
def make_driver(chat_tokenizer: Any) -> Iterator[MakeDriver]:
    """A driver of an engine that answers with ``answer``; ``step`` is called at each of its steps."""
    made: list[EngineDriver] = []

    def make(
        answer: str = "yes", step: Callable[[], None] = lambda: None, any_rank: Any = None
    ) -> EngineDriver:
        class Engine(ScriptedEngine):
            def step(self) -> None:
                step()
                super().step()

        engine = Engine(chat_tokenizer, lambda prompt: answer)
        engine.any_rank = any_rank
        made.append(EngineDriver(engine))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def turns(made: EngineDriver, n: int, pause: float = 0.0) -> int:
    """Ask so many times; how many tokens were sampled."""
    n_tokens = 0
    for i in range(n):
        n_tokens += len((await made.generate(TokenIds([5, i]), PARAMS, i)).token_ids)
        await asyncio.sleep(pause)
    return n_tokens


def test_completions_of_one_step_are_spread_over_passes_of_the_loop(make_driver):
    """Each costs the loop work, such as rendering; that of a thousand at once would keep it from all else."""
    made, passes, ended = make_driver(), [0], []

    async def work() -> None:
        async def count() -> None:
            while True:
                passes[0] += 1
                await asyncio.sleep(0)

        async def ask(i: int) -> None:
            await made.generate(TokenIds([5, i]), PARAMS, i)
            ended.append(passes[0])

        counter = asyncio.ensure_future(count())
        await asyncio.gather(*map(ask, range(50)))
        counter.cancel()

    made.drive(work())
    assert len(set(ended)) == 50, "no two in the same pass"


def test_the_loop_ticks_every_100_ms_during_a_long_step(make_driver):
    """A step that computes in Python all the time holds the interpreter's lock most of all."""
    ticks, during = [0], []

    def compute() -> None:
        before, end = ticks[0], time.monotonic() + 2
        while time.monotonic() < end:
            sum(range(1000))
        during.append(ticks[0] - before)

    async def work() -> None:
        async def tick() -> None:
            while True:
                await asyncio.sleep(0.01)
                ticks[0] += 1

        ticking = asyncio.ensure_future(tick())
        await made.generate(TokenIds([5]), SamplingParams(1), 0)
        ticking.cancel()

    made = make_driver("yes", compute)
    made.drive(work())
    assert len(during) == 1 and during[0] >= 2 / 0.1


def test_code_that_blocks_the_loop_is_no_progress(make_driver):
    """Else a run that stands still would look alive to the watchdog."""
    looks, shown, blocked, over = [0], [0], threading.Event(), threading.Event()

    def any_rank(flag: bool) -> bool:
        looks[0] += blocked.is_set()
        if looks[0] == 100:
            during.append(shown[0])
            over.set()
        return flag

    def show() -> None:
        shown[0] += 1
        if blocked.is_set() and not during:
            late.append(shown[0])

    async def block() -> None:
        await made.generate(TokenIds([5]), PARAMS, 0)
        blocked.set()
        over.wait(60)
        await made.generate(TokenIds([5]), PARAMS, 1)

    during: list[int] = []
    late: list[int] = []
    made = make_driver(any_rank=any_rank)
    made.drive(block(), show)
    assert len(late) <= 2 and shown[0] > during[0]


def test_requests_of_many_coroutines_share_steps(make_driver):
    def wait_for_the_loop() -> None:  # however busy the machine is
        for _ in range(5):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), made.loop).result()

    made = make_driver("yes", wait_for_the_loop)

    async def work() -> list[int]:
        return await asyncio.gather(*(turns(made, 3) for _ in range(20)))

    assert made.drive(work()) == [3 * 4] * 20
    assert 12 <= made.steps <= 3 * 12, "a turn is of four steps"


def test_the_engine_steps_on_the_calling_thread_and_coroutines_elsewhere(make_driver):
    stepped: list[Any] = []

    async def work() -> Any:
        await turns(made, 1)
        return threading.current_thread()

    made = make_driver("a", lambda: stepped.append(threading.current_thread()))
    assert made.drive(work()) is not threading.current_thread()
    assert set(stepped) == {threading.current_thread()}


def test_a_cancelled_request_frees_its_row_within_a_step(make_driver):
    cancelled_at: list[int] = []
    freed_at: list[int] = []

    def note() -> None:
        if cancelled_at and not freed_at and len(made.engine.running) == 1:
            freed_at.append(made.steps)

    async def work() -> int:
        long = asyncio.ensure_future(made.generate(TokenIds([5]), PARAMS, 0))
        other = asyncio.ensure_future(made.generate(TokenIds([6]), PARAMS, 1))
        while made.steps < 3:
            await asyncio.sleep(0)
        cancelled_at.append(made.steps)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        cancelled_at[0] = made.steps  # from here on the engine's thread can know
        return len((await other).token_ids)

    made: Any = make_driver("x" * 40, lambda: (note(), time.sleep(0.01)))
    assert made.drive(work()) == 41, "the other goes on"
    assert len(made.engine.journal) == 1
    assert freed_at[0] <= cancelled_at[0] + 1


def test_what_the_work_leaves_behind_is_cancelled(make_driver):
    left: list[Any] = []

    async def endless() -> None:
        while True:
            await made.generate(TokenIds([5]), PARAMS, 0)

    async def work() -> str:
        left.append(asyncio.ensure_future(endless()))
        await turns(made, 1)
        return "done"

    made: Any = make_driver("x" * 10)
    assert made.drive(work()) == "done"
    assert not made.engine.busy
    assert made.drive(turns(made, 1)) == 11, "and the next work is not disturbed"


def test_an_exception_of_the_work_is_raised_on_the_calling_thread(make_driver):
    async def work() -> None:
        await turns(made, 1)
        raise KeyError("of the agent")

    made = make_driver("yes")
    with pytest.raises(KeyError, match="of the agent"):
        made.drive(work())


def test_an_exception_of_the_engine_cancels_the_work(make_driver):
    ended: list[str] = []

    async def work() -> None:
        try:
            await turns(made, 1)
        finally:
            ended.append("cleaned up")

    def broken() -> None:
        raise FloatingPointError("not finite")

    made = make_driver("yes", broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        made.drive(work())
    made.drive(asyncio.sleep(0))
    assert ended == ["cleaned up"]


def test_a_refused_prompt_fails_its_request_alone(make_driver):
    made: Any = make_driver("yes")
    submit = made.engine.submit

    def refuse(prompt: TokenIds, *arguments: Any, **options: Any) -> int:
        if not prompt.token_ids:
            raise ValueError("at least one token")
        return submit(prompt, *arguments, **options)

    made.engine.submit = refuse

    async def work() -> list[Any]:
        asked = (made.generate(TokenIds(ids), PARAMS, 0) for ids in ([], [5]))
        return await asyncio.gather(*asked, return_exceptions=True)

    refused, answered = made.drive(work())
    assert isinstance(refused, ValueError) and answered.finish_reason is FinishReason.STOP


@pytest.fixture
def signalled_driver(make_driver: MakeDriver) -> EngineDriver:
    """A driver that a signal asks to stop after its engine's first step."""

    class Signal(StopCheck):
        def requested(self) -> bool:
            return made.steps > 0

        def __call__(self) -> None:
            raise Interrupted("SIGTERM")

    made = make_driver("yes")
    made.stop = Signal()
    return made


def test_a_signal_cancels_the_work_which_may_clean_up(signalled_driver):
    """However long the tool that it waits for."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await turns(signalled_driver, 1, pause=3600)
        finally:
            await asyncio.sleep(0.05)
            ended.append("cleaned up")

    with pytest.raises(Interrupted, match="SIGTERM"):
        signalled_driver.drive(work())
    assert ended == ["cleaned up"]


def test_a_signal_ends_work_that_swallows_a_cancellation(signalled_driver, monkeypatch):
    """As ``asyncio.wait_for`` before Python 3.12 did where what it waits for ended in the same moment."""
    monkeypatch.setattr(driver, "_SECONDS_TO_CLEAN_UP", 0.05)
    swallowed: list[str] = []

    async def work() -> None:
        try:
            await turns(signalled_driver, 1, pause=3600)
        except asyncio.CancelledError:
            swallowed.append("once")
        await asyncio.sleep(3600)

    with pytest.raises(Interrupted, match="SIGTERM"):
        signalled_driver.drive(work())
    assert swallowed == ["once"]


def test_ranks_in_lockstep_agree_before_each_step_and_never_spin(make_driver):
    """Between agreements in which nothing runs lies a wait for a request, as long as asked and no longer."""
    agreed: list[bool] = []
    waits: list[float] = []

    def any_rank(flag: bool) -> bool:
        agreed.append(flag)
        return flag

    class Inbox(Queue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if block:
                assert timeout is not None
                waits.append(timeout)
            return super().get(block, timeout)

    made: Any = make_driver("yes", any_rank=any_rank)
    made._inbox = Inbox()
    began = time.monotonic()
    made.drive(turns(made, 4, pause=0.2))
    took = time.monotonic() - began
    assert len(agreed) == made.steps + 2 * (len(waits) + 1), (
        "once before a step, twice before a wait and at the end"
    )
    assert set(waits) == {0.02}
    assert 4 <= len(waits) <= took / 0.02 + 4 + 2, "each is 20 ms long, or ends with a request"


def test_no_time_limit_counts_the_time_in_which_nobody_drives(make_sampler):
    """As between the steps of a run whose ranks sample and train in turn."""

    async def solve(task, session):
        return float(len((await session.chat(task.messages)).text))

    sampler = make_sampler(solve, lambda text: "yes", agent_timeout=0.4)
    sampler.driver.drive(sampler.groups.start(), leave="continue")
    episode = sampler.player.play(EpisodeInput(Prompt("x", [5]), seed=1), SamplingParams(8))
    played = asyncio.run_coroutine_threadsafe(episode, sampler.driver.loop)
    time.sleep(1.0)
    assert not played.done()
    sampler.driver.drive(
        asyncio.wait_for(asyncio.wrap_future(played, loop=sampler.driver.loop), 10),
        leave="continue",
    )
    sample = played.result()
    assert len(sample.segments) == 1 and sample.scores == {"reward": 3.0}
    assert 1.0 <= sampler.driver.stood < 2.0


def test_a_rank_without_work_takes_the_steps_of_others(make_driver):
    """The first has one turn to play, the second five and slow tools: both take equally many steps."""
    meet = threading.Barrier(2)
    flags = [False, False]

    def of(rank: int) -> Callable[[bool], bool]:
        def any_rank(flag: bool) -> bool:
            flags[rank] = flag
            meet.wait(timeout=60)
            result = any(flags)
            meet.wait(timeout=60)
            return result

        return any_rank

    quick, slow = (make_driver("yes", any_rank=of(rank)) for rank in (0, 1))
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(quick.drive(turns(quick, 1))))
    thread.start()
    results.append(slow.drive(turns(slow, 5, pause=0.05)))
    thread.join(timeout=60)
    assert sorted(results) == [4, 20]
    assert quick.steps == slow.steps >= 20


async def cancel_all(task, session):
    """Cancel the tasks of the loop once, as a program does that ends."""
    if task.prompt.text == "hostile":
        for each in asyncio.all_tasks():
            each.cancel()
    return float(len((await session.chat(task.messages)).text))


def test_an_agent_that_cancels_its_loop_fails_alone(make_sampler):
    sampler, failed = make_sampler(cancel_all, lambda text: "yes"), []
    prompts = [Prompt("x", [5]), Prompt("hostile", [5]), Prompt("y", [5])]
    sampled = sampler.sample(prompts, PARAMS, 1, 1, 0, Metrics(), note_failed=failed.append)
    assert [sample.prompt.text for sample in sampled] == ["x", "y"]
    assert len(segments_of(sampled)) == 2
    assert [each.prompt.text for each in failed] == ["hostile"]
    assert (
        failed[0].episode.failure
        == "cancelled: its own code, or a library that it uses, cancelled it"
    )


def test_cancelled_work_is_no_signal(make_driver):
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="was cancelled, by no signal"):
        make_driver().drive(work())
