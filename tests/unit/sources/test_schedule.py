"""Ratios of tasks: kept whatever each takes, changed while the run goes on, renormalized when a task fails."""

import heapq
import json

import pytest

from openppo.rollout.failures import GROUPS_IN_A_ROW
from openppo.sources.progress import TaskProgress, by_speed, by_success
from openppo.sources.schedule import Start, TaskSchedule
from openppo.sources.work_buffer import WorkBuffer
from openppo.types import Completion, FinishReason, Prompt, Sample

DURATIONS = {"short": 1, "middle": 5, "long": 20}
RATIOS = {"short": 0.5, "middle": 0.3, "long": 0.2}


def schedule_of(group_size=1, **limits):
    return TaskSchedule(
        {name: TaskProgress(ratio, group_size, limits.get(name)) for name, ratio in RATIOS.items()}
    )


class Run:
    """Tasks of the given durations through buffer and schedule, on a virtual clock; a step takes no time."""

    def __init__(self, schedule, batch=8, max_staleness=1):
        self.schedule, self.buffer = schedule, WorkBuffer(batch, max_staleness)
        self.clock, self.number, self.ends, self.starts = 0.0, 0, [], {}
        self.on_step = lambda: None

    def go_on(self, n_episodes):
        """Until so many more are accepted; how many of each task."""
        before = {name: task.accepted for name, task in self.schedule.tasks.items()}
        while (
            sum(task.accepted for task in self.schedule.tasks.values())
            < sum(before.values()) + n_episodes
        ):
            for _ in range(self.buffer.room()):
                start = self.schedule.next(self.number)
                if start is None:
                    break
                self.number, self.starts[start.number] = start.number + 1, start
                self.buffer.submit(start.number)
                heapq.heappush(
                    self.ends,
                    (self.clock + DURATIONS[start.task], start.number, self.buffer.version),
                )
            self.clock, number, version = heapq.heappop(self.ends)
            completion = Completion([2], [-1.0], [version], finish_reason=FinishReason.STOP)
            sample = Sample.of_response(Prompt("", [1]), completion, number)
            self.schedule.accept(self.starts[number], [1.0], DURATIONS[self.starts[number].task])
            self.buffer.complete(number, [sample])
            had = set(self.buffer.buffered)
            batch = self.buffer.cut()
            for old in had - set(self.buffer.buffered) - {group[0].group for group in batch or []}:
                self.schedule.take_back(self.starts[old], 1)
            if batch is not None:
                self.on_step()
                self.buffer.advance(self.buffer.version + 1)
                self.buffer.sync(self.buffer.version)
        return {name: task.accepted - before[name] for name, task in self.schedule.tasks.items()}


@pytest.mark.parametrize("max_staleness", [0, 1, 4, 16])
def test_shares_are_the_ratios_whatever_an_episode_takes(max_staleness):
    """E1: three tasks of 50, 30 and 20 % that last 1, 5 and 20, over 2,000 episodes, then after a change."""
    run = Run(schedule_of(), max_staleness=max_staleness)
    shares = run.go_on(2000)
    assert {name: n / 2000 for name, n in shares.items()} == pytest.approx(RATIOS, abs=0.02)
    wanted = {"short": 0.2, "middle": 0.3, "long": 0.5}
    run.schedule.set_ratios(wanted)
    shares = run.go_on(400)
    assert {name: n / 400 for name, n in shares.items()} == pytest.approx(wanted, abs=0.03)


def test_automatic_ratios_are_reached_though_they_are_set_at_each_step():
    run, wanted = Run(schedule_of()), {"short": 3, "middle": 1, "long": 1}
    run.schedule.automatic = lambda shares: wanted
    run.on_step = run.schedule.advance
    run.go_on(100)
    shares = run.go_on(1000)
    assert {name: n / 1000 for name, n in shares.items()} == pytest.approx(
        {n: w / 5 for n, w in wanted.items()}, abs=0.02
    )


def test_a_task_that_teaches_nothing_is_not_played_over_and_over():
    schedule = TaskSchedule({"solved": TaskProgress(0.5, 4), "open": TaskProgress(0.5, 4)})
    played = []
    for number in range(40):
        start = schedule.next(number)
        played.append(start.task)
        schedule.accept(start, [] if start.task == "solved" else [0.0] * 4, 1.0)
    assert played.count("solved") == 20


def test_a_task_left_out_comes_back_with_a_ratio_only():
    schedule = schedule_of()
    for number in range(GROUPS_IN_A_ROW):
        schedule.tasks["short"].running += 1
        schedule.fail(Start(number, number, "short"), "no answer")
    schedule.tasks["short"].running += 1
    schedule.accept(Start(99, 99, "short"), [1.0], 1.0)
    schedule.change("short", None, 5)
    assert schedule.tasks["short"].is_left_out, "a late success is no other chance"
    schedule.change("short", 0.5, None)
    assert not schedule.tasks["short"].is_left_out
    assert "short" in {schedule.next(100 + i).task for i in range(4)}


def test_a_task_has_no_more_episodes_under_way_than_it_may():
    schedule = schedule_of(group_size=4, short=9)
    begun = [schedule.next(number).task for number in range(12)]
    assert begun.count("short") == 2
    schedule = TaskSchedule({"only": TaskProgress(1.0, 4, max_concurrent=2)})
    assert schedule.next(0) == Start(0, 0, "only"), "one group, else nothing would ever begin"
    assert schedule.next(1) is None


def test_groups_of_any_size_count_by_their_episodes():
    schedule = TaskSchedule({"pairs": TaskProgress(0.5, 2), "eights": TaskProgress(0.5, 8)})
    for number in range(100):
        start = schedule.next(number)
        schedule.accept(start, [0.0] * schedule.tasks[start.task].group_size, 1.0)
    pairs, eights = (task.accepted for task in schedule.tasks.values())
    assert abs(pairs - eights) <= 8


def test_one_ratio_changes_and_the_others_with_it():
    schedule = schedule_of()
    schedule.set_ratio("long", 0.6)
    assert {name: task.ratio for name, task in schedule.tasks.items()} == pytest.approx(
        {"short": 0.25, "middle": 0.15, "long": 0.6}
    )


def test_ten_failures_in_a_row_leave_a_task_out(caplog):
    schedule = schedule_of()
    number = 0
    while not schedule.tasks["middle"].is_left_out:
        start = schedule.next(number)
        number += 1
        if start.task == "middle":
            schedule.fail(start, "no answer")
        else:
            schedule.accept(start, [1.0], 1.0)
    assert schedule.tasks["middle"].failed == GROUPS_IN_A_ROW
    assert {name: task.ratio for name, task in schedule.tasks.items()} == pytest.approx(
        {"short": 5 / 7, "middle": 0.0, "long": 2 / 7}
    )
    assert "10 groups of task middle in a row failed; the last: no answer" in caplog.text
    assert "the ratios are now: short 0.714, long 0.286" in caplog.text
    assert "middle" not in {schedule.next(number + i).task for i in range(20)}


def test_without_any_task_left_the_run_ends():
    schedule = TaskSchedule({"only": TaskProgress(1.0, 1)})
    for number in range(GROUPS_IN_A_ROW - 1):
        schedule.fail(schedule.next(number), "no answer")
    with pytest.raises(
        RuntimeError, match="10 groups of task only in a row failed; the last: no answer"
    ):
        schedule.fail(schedule.next(99), "no answer")


def test_one_success_ends_a_row_of_failures():
    schedule = TaskSchedule({"only": TaskProgress(1.0, 1)})
    for number in range(5 * GROUPS_IN_A_ROW):
        start = schedule.next(number)
        schedule.fail(start, "no answer") if number % GROUPS_IN_A_ROW else schedule.accept(
            start, [1.0], 1.0
        )
    assert not schedule.tasks["only"].is_left_out


def test_ratios_follow_success_or_speed():
    shares = {"easy": TaskProgress(0.5, 1, ended=10, rewards=8.0, seconds=10.0)}
    shares |= {
        "hard": TaskProgress(0.5, 1, ended=10, rewards=2.0, seconds=40.0),
        "new": TaskProgress(0.5, 1),
    }
    assert by_success(shares) == pytest.approx({"easy": 0.2, "hard": 0.8, "new": 1.0})
    assert by_speed(shares) == pytest.approx({"easy": 1.0, "hard": 0.25, "new": 0.4})
    schedule = TaskSchedule(shares, by_success)
    schedule.advance()
    assert {name: task.ratio for name, task in schedule.tasks.items()} == pytest.approx(
        {"easy": 0.1, "hard": 0.4, "new": 0.5}
    )


def test_a_resumed_schedule_continues_in_the_data():
    schedule = schedule_of()
    starts = [schedule.next(number) for number in range(6)]
    for start in starts[:4]:
        schedule.accept(start, [1.0], 2.0)
    state = json.loads(json.dumps(schedule.state_dict(starts[4:], {})))
    resumed = schedule_of()
    resumed.load_state_dict(state)
    assert [resumed.next(6), resumed.next(6)] == starts[4:]
    assert {name: task.accepted for name, task in resumed.tasks.items()} == {
        name: task.accepted for name, task in schedule.tasks.items()
    }
    later = resumed.next(6)
    assert later.index == sum(start.task == later.task for start in starts)
    with pytest.raises(ValueError, match="the checkpoint has task long, which the file lacks"):
        TaskSchedule({name: TaskProgress(0.5, 1) for name in ("short", "middle")}).load_state_dict(
            state
        )
