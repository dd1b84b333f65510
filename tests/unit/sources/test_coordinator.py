"""The coordinator and its workers over real connections, in one process."""

import json
import os
import socket
import stat
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import DistNetworkError

from openppo.media import MediaItem
from openppo.rollout.failures import GROUPS_IN_A_ROW
from openppo.sources.coordinator import Coordinator
from openppo.sources.groups import GroupPlayer
from openppo.sources.outcomes import Outcome, OutcomePlayer
from openppo.sources.schedule import TaskSchedule
from openppo.sources.work_buffer import WorkBuffer
from openppo.sources.worker import Worker
from openppo.strategy.links import Entrance, connect
from openppo.tracking import Metrics
from openppo.tracking.phase import current
from openppo.types import SingleProcess, StopCheck
from tests.samples import with_last
from tests.unit.sources.conftest import StubPlayer, task_of

GO = StopCheck()


@contextmanager
def working(task, batch=2, max_staleness=1, most=1000, n_workers=1, pauses=False):
    """A coordinator, and workers that are driven on threads of their own."""
    schedule = TaskSchedule({"": task.progress})
    coordinator = Coordinator(
        WorkBuffer(batch, max_staleness), schedule, {"": task}, most, n_workers, pauses
    )
    stubs = [StubPlayer() for _ in range(n_workers)]
    workers = []
    for rank, stub in enumerate(stubs, 5):
        outcomes = OutcomePlayer(
            {"": task}, GroupPlayer({"": stub}, stub.driver), parts=None, scorer=None
        )
        link = connect(coordinator.workers.entrance.address)
        workers.append(Worker(outcomes, link, rank, "continue"))
    threads = []
    for worker in [] if pauses else workers:
        threads.append(threading.Thread(target=drive_to_the_end, args=(worker,), daemon=True))
        threads[-1].start()
    try:
        yield coordinator, stubs, workers
    finally:
        coordinator.close()
        for thread in threads:
            thread.join(10)
        for stub in stubs:
            stub.driver.close()


def drive_to_the_end(worker):
    while worker.drive().reason != "end":
        pass


def arrived(coordinator):
    with coordinator._changed:
        assert coordinator._changed.wait_for(lambda: coordinator.workers.are_here, 10)


def numbers(batch):
    return [group[0].group for group in batch]


def test_batches_come_in_order_and_no_further_than_the_gate_allows(task):
    with working(task) as (coordinator, (stub,), _):
        trained = []
        for version in range(4):
            coordinator.want_batch(coordinator.buffer.batch)
            trained += numbers(coordinator.wait_for_batch(GO)[0])
            assert len({group for group, *_ in stub.asked}) <= (1 + version + 1) * 2
            stub.driver.engine.use_version(version + 1)
            coordinator.advance(version + 1, synced=True)
        assert sorted(trained) == trained == list(range(8))
        assert coordinator.buffer.counts["trained"] == 8


def test_more_than_a_thousand_groups_are_under_way_at_once(task):
    with working(task, batch=512, max_staleness=2, most=2000) as (coordinator, (stub,), _):
        under_way, most = set(), []

        def wait(group):
            under_way.add(group)
            most.append(len(under_way))
            return 0.5

        stub.wait = wait
        coordinator.want_batch(coordinator.buffer.batch)
        assert numbers(coordinator.wait_for_batch(GO)[0]) == list(range(512))
        assert max(most) == 3 * 512


def test_groups_go_to_the_worker_that_plays_fewest(task):
    with working(task, batch=4, max_staleness=0, n_workers=2) as (coordinator, stubs, _):
        coordinator.want_batch(coordinator.buffer.batch)
        assert len(coordinator.wait_for_batch(GO)[0]) == 4
        assert [len({group for group, *_ in each.asked}) for each in stubs] == [2, 2]


def test_no_group_is_played_that_the_run_does_not_need(task):
    with working(task, max_staleness=4, most=4) as (coordinator, (stub,), _):
        for version in (1, 2):
            coordinator.want_batch(coordinator.buffer.batch)
            assert coordinator.wait_for_batch(GO) is not None
            coordinator.advance(version, synced=True)
        assert {group for group, *_ in stub.asked} == set(range(4))


def test_groups_that_grew_old_before_a_batch_was_wanted_are_replaced(task):
    with working(task, most=4) as (coordinator, (stub,), _):
        coordinator.want_batch(coordinator.buffer.batch)
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [0, 1]
        while coordinator.buffer.running:
            time.sleep(0.01)
        stub.driver.engine.use_version(2)
        coordinator.advance(2, synced=True)
        coordinator.want_batch(
            coordinator.buffer.batch
        )  # finds that 2 and 3 are too old, with nothing under way
        assert numbers(
            coordinator.wait_for_batch(Mock(requested=iter([False] * 50 + [True]).__next__))[0]
        ) == [4, 5]


def test_a_complete_batch_pauses_workers_that_train_too(task):
    with working(task, pauses=True) as (coordinator, _, (worker,)):
        for version in (1, 2):
            coordinator.want_batch(coordinator.buffer.batch)
            assert worker.drive().reason == "batch"
            batch, _ = coordinator.wait_for_batch(GO)
            assert len(batch) == 2
            coordinator.advance(version, synced=True)


def test_new_weights_pause_workers(task):
    with working(task, pauses=True) as (coordinator, _, (worker,)):
        coordinator.want_batch(coordinator.buffer.batch)
        assert worker.drive().reason == "batch"
        coordinator.pause_for(version=3)
        pause = worker.drive()
        assert (pause.reason, pause.version) == ("weights", 3)


def test_the_share_of_time_without_requests_comes_with_groups(task):
    with working(task) as (coordinator, (stub,), _):
        stub.wait = lambda group: 0.2
        coordinator.want_batch(coordinator.buffer.batch)
        assert (
            0.5
            < coordinator.wait_for_batch(GO)[1].reduced(SingleProcess())["async/engine_idle_share"]
            <= 1.05
        )


def test_failures_in_a_row_end_the_wait(task):
    with working(task) as (coordinator, (stub,), _):
        stub.failing = lambda group, seed: True
        coordinator.want_batch(coordinator.buffer.batch)
        with pytest.raises(
            RuntimeError,
            match=f"{GROUPS_IN_A_ROW} groups in a row failed; the last: agent_error: no answer",
        ):
            coordinator.wait_for_batch(GO)


def test_failures_in_a_row_leave_the_engine_where_workers_train_too(task):
    with working(task, pauses=True) as (coordinator, (stub,), (worker,)):
        stub.failing = lambda group, seed: True
        coordinator.want_batch(coordinator.buffer.batch)
        assert worker.drive().reason == "batch"
        with pytest.raises(RuntimeError, match="10 groups in a row failed"):
            coordinator.wait_for_batch(GO)


def test_groups_that_teach_nothing_end_the_wait_at_last(task):
    with working(task_of(dynamic_sampling=3)) as (
        coordinator,
        *_,
    ):  # without rewards all are equal
        coordinator.want_batch(coordinator.buffer.batch)
        with pytest.raises(
            RuntimeError, match="--dynamic_sampling: 6 groups in a row had equal rewards"
        ):
            coordinator.wait_for_batch(GO)


@pytest.fixture
def waiting(task):
    """A coordinator whose one worker has not connected."""
    schedule = TaskSchedule({"": task.progress})
    coordinator = Coordinator(
        WorkBuffer(2, 0), schedule, tasks={"": task}, most=10, n_workers=1, pauses=False
    )
    yield coordinator
    coordinator.close()


def test_silent_connections_keep_no_worker_out(waiting):
    address = waiting.workers.entrance.address
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as gone:
        for stranger in (silent, gone):
            stranger.connect(address)
        gone.close()
        link = connect(address)
        link.send(5)
        arrived(waiting)
        assert waiting._fault is None, "a connection that says nothing is no worker's"


def test_only_the_user_reaches_the_socket_until_workers_are_there(waiting):
    folder = Path(waiting.workers.entrance.address).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    link = connect(waiting.workers.entrance.address)
    link.send(5)
    arrived(waiting)
    assert not folder.exists()


def test_a_run_that_ends_before_its_workers_leaves_no_socket(waiting):
    folder = Path(waiting.workers.entrance.address).parent
    waiting.close()
    assert not folder.exists()


def test_a_long_temporary_folder_is_an_error_that_names_it(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(
        ValueError,
        match=r"x/openppo-\w+/socket has \d+ bytes. Set TMPDIR to a folder with a shorter",
    ):
        Entrance()
    assert list(folder.iterdir()) == []


def test_waiting_for_workers_is_no_progress(waiting, monkeypatch):
    seen = Mock()
    monkeypatch.setattr(current, "progress", seen)
    waiting.want_batch(2)
    stop = Mock(requested=Mock(side_effect=[False, False, True]))
    assert waiting.wait_for_batch(stop) is None
    assert not seen.called
    link = connect(waiting.workers.entrance.address)
    link.send(5)
    arrived(waiting)
    assert waiting.wait_for_batch(Mock(requested=Mock(side_effect=[False, True]))) is None
    assert seen.called


def test_a_task_joins_once(task):
    other = replace(task, name="new", ratio=0.5, fields={"name": "new"})
    with working(task) as (coordinator, *_):
        arrived(coordinator)
        before = coordinator.state_dict()
        coordinator.join(other)
        with pytest.raises(ValueError, match="there is a task 'new' already"):
            coordinator.join(other)
        after = coordinator.state_dict()
        assert after["joined"] == [{"name": "new"}]
        for state in (after, before, after):
            coordinator.load_state_dict(state)
            assert {*coordinator.tasks} == {"", "new"}
        assert coordinator.schedule.tasks["new"].ratio == 0.5


def test_groups_that_trainers_find_useless_are_replaced(task):
    with working(task, most=4) as (coordinator, (stub,), _):
        coordinator.want_batch(2)
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [0, 1]
        coordinator.give_back(1)
        coordinator.want_batch(1)
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [2]
        assert coordinator.buffer.counts["trained"] == 2
        assert coordinator.buffer.counts["filtered"] == 1
        stub.driver.engine.use_version(1)
        coordinator.advance(1, synced=True)
        coordinator.want_batch(2)
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [3, 4], "a run of four needs a fifth"


def test_single_failures_are_replaced(task):
    with working(task) as (coordinator, (stub,), _):
        stub.failing = lambda group, seed: group in (0, 2)
        coordinator.want_batch(coordinator.buffer.batch)
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [1, 3]


def test_each_side_notices_that_the_other_is_gone(task):
    with working(task, pauses=True) as (coordinator, (stub,), (worker,)):
        stub.wait = lambda group: 100.0
        coordinator.want_batch(coordinator.buffer.batch)
        with socket.socket(fileno=os.dup(worker.link._connection.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(DistNetworkError, match="rollout rank 5"):
            coordinator.wait_for_batch(GO)
        with pytest.raises(DistNetworkError, match="rank 0, which trains"):
            worker.drive()


def test_an_error_in_a_group_is_raised_where_the_engine_runs(task):
    with working(task, pauses=True) as (coordinator, (stub,), (worker,)):
        stub.failing = lambda group, seed: 1 / 0
        coordinator.want_batch(coordinator.buffer.batch)
        with pytest.raises(ZeroDivisionError):
            worker.drive()


def test_groups_of_a_checkpoint_may_be_too_old(task):
    with working(task, batch=1, max_staleness=4) as (coordinator, (stub,), _):
        coordinator.want_batch(coordinator.buffer.batch)
        coordinator.wait_for_batch(GO)
        while len(coordinator.buffer.buffered) < 4:
            time.sleep(0.01)
        state = coordinator.state_dict()
    with working(task, batch=1, max_staleness=0) as (resumed, (stub,), _):
        stub.driver.engine.use_version(1)
        resumed.load_state_dict(state)
        resumed.advance(1, synced=True)
        resumed.want_batch(resumed.buffer.batch)
        assert resumed.wait_for_batch(GO) is not None
        assert resumed.buffer.counts["stale"] == len(state["groups"])


def test_late_results_of_a_group_given_up_change_nothing(task):
    with working(task, max_staleness=0) as (coordinator, *_):
        coordinator.want_batch(coordinator.buffer.batch)
        batch, _ = coordinator.wait_for_batch(GO)
        before = coordinator.state_dict()
        for late in (Outcome(0, batch[0], Metrics()), Outcome(99, None, Metrics(), "lost")):
            with coordinator._changed:
                coordinator._on_worker(late)
        assert coordinator.state_dict() == before


def test_groups_with_images_of_an_agent_are_played_again(task):
    with working(task, max_staleness=2) as (coordinator, *_):
        coordinator.want_batch(coordinator.buffer.batch)
        trained = coordinator.wait_for_batch(GO)[0]
        with coordinator._changed:
            assert coordinator._changed.wait_for(lambda: len(coordinator.buffer.buffered) == 4, 10)
            image = MediaItem({"pixel_values": torch.ones(1)}, 1, 1, key=7)
            group = coordinator.buffer.buffered[3]
            group[0] = with_last(group[0], media=(image,))
            state = json.loads(json.dumps(coordinator.state_dict()))
    assert numbers(trained) == [0, 1]
    assert [group["start"]["number"] for group in state["groups"]] == [2, 4, 5]
    assert [start["number"] for start in state["schedule"]["again"]] == [3]
    assert state["schedule"]["shares"][""]["accepted"] == 5 * task.n_samples
    with working(task, max_staleness=2) as (resumed, *_):
        resumed.load_state_dict(state)
        assert resumed.progress()[""]["accepted_episodes"] == 5 * task.n_samples
        trained = []
        for version in (1, 2):
            resumed.want_batch(resumed.buffer.batch)
            trained += numbers(resumed.wait_for_batch(GO)[0])
            resumed.advance(version, synced=True)
        assert sorted(trained) == [2, 3, 4, 5]


def test_a_signal_ends_the_wait(task):
    class Stop(StopCheck):
        def requested(self):
            return True

    with working(task, pauses=True) as (coordinator, *_):
        coordinator.want_batch(coordinator.buffer.batch)
        assert coordinator.wait_for_batch(Stop()) is None


def test_a_resumed_coordinator_plays_what_was_under_way_again(task):
    with working(task, max_staleness=2) as (coordinator, (stub,), _):
        stub.wait = lambda group: 100.0 if group in (1, 4) else 0.0
        coordinator.want_batch(coordinator.buffer.batch)
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [0, 2]
        coordinator.advance(1, synced=True)
        coordinator.want_batch(coordinator.buffer.batch)
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [3, 5]
        state = coordinator.state_dict()
    with working(task, max_staleness=2) as (resumed, (stub,), _):
        stub.driver.engine.use_version(2)
        resumed.load_state_dict(state)
        resumed.advance(2, synced=True)
        assert resumed.buffer.room() == (2 + 2 + 1) * 2 - resumed.buffer.accepted
        trained = []
        for version in (3, 4, 5):
            resumed.want_batch(resumed.buffer.batch)
            trained += numbers(resumed.wait_for_batch(GO)[0])
            resumed.advance(version, synced=True)
        assert sorted(trained) == [1, 4, 6, 7, 8, 9]
