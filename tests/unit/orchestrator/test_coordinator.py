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

from openppo.config import TrainPPOConfig, from_options
from openppo.media import MediaItem
from openppo.orchestrator.coordinator import Coordinator
from openppo.orchestrator.groups import GroupPlayer, Outcome
from openppo.orchestrator.schedule import TaskSchedule
from openppo.orchestrator.work_buffer import WorkBuffer
from openppo.orchestrator.worker import Worker
from openppo.rollout.failures import GROUPS_IN_A_ROW
from openppo.rollout.tasks import RunTask, TaskProgress
from openppo.strategy.links import Entrance, connect
from openppo.tracking import Metrics
from openppo.tracking.phase import current
from openppo.types import SingleProcess, StopCheck
from tests.samples import with_last
from tests.unit.orchestrator.conftest import PROMPTS, StubSampler

GO = StopCheck()


@contextmanager
def working(plan, batch=2, max_staleness=1, most=1000, n_workers=1, pauses=False):
    """A coordinator, and workers that are driven on threads of their own."""
    schedule = TaskSchedule({"": TaskProgress(1.0, plan.n_samples)})
    coordinator = Coordinator(
        WorkBuffer(batch, max_staleness), schedule, {"": plan}, most, n_workers, pauses
    )
    samplers = [StubSampler() for _ in range(n_workers)]
    links = [connect(coordinator.workers.entrance.address) for _ in samplers]
    players = [GroupPlayer({"": plan}, sampler, None) for sampler in samplers]
    workers = [
        Worker(p, link, 5 + i, "continue")
        for i, (p, link) in enumerate(zip(players, links, strict=True))
    ]
    threads = []
    for worker in [] if pauses else workers:
        threads.append(threading.Thread(target=drive_to_the_end, args=(worker,), daemon=True))
        threads[-1].start()
    try:
        yield coordinator, samplers, workers
    finally:
        coordinator.close()
        for thread in threads:
            thread.join(10)
        for sampler in samplers:
            sampler.driver.close()


def drive_to_the_end(worker):
    while worker.drive().reason != "end":
        pass


def arrived(coordinator):
    with coordinator._changed:
        assert coordinator._changed.wait_for(lambda: coordinator.workers.are_here, 10)


def numbers(batch):
    return [group[0].group for group in batch]


def test_batches_come_in_order_and_no_further_than_the_gate_allows(plan):
    with working(plan) as (coordinator, (sampler,), _):
        trained = []
        for version in range(4):
            coordinator.want_batch()
            trained += numbers(coordinator.wait_for_batch(GO)[0])
            assert len({group for group, *_ in sampler.asked}) <= (1 + version + 1) * 2
            sampler.driver.engine.version = version + 1
            coordinator.advance(version + 1, synced=True)
        assert sorted(trained) == trained == list(range(8))
        assert coordinator.buffer.counts["trained"] == 8


def test_more_than_a_thousand_groups_are_under_way_at_once(plan):
    with working(plan, batch=512, max_staleness=2, most=2000) as (coordinator, (sampler,), _):
        under_way, most = set(), []

        def wait(group):
            under_way.add(group)
            most.append(len(under_way))
            return 0.5

        sampler.wait = wait
        coordinator.want_batch()
        assert numbers(coordinator.wait_for_batch(GO)[0]) == list(range(512))
        assert max(most) == 3 * 512


def test_groups_go_to_the_worker_that_plays_fewest(plan):
    with working(plan, batch=4, max_staleness=0, n_workers=2) as (coordinator, samplers, _):
        coordinator.want_batch()
        assert len(coordinator.wait_for_batch(GO)[0]) == 4
        assert [len({group for group, *_ in each.asked}) for each in samplers] == [2, 2]


def test_no_group_is_played_that_the_run_does_not_need(plan):
    with working(plan, max_staleness=4, most=4) as (coordinator, (sampler,), _):
        for version in (1, 2):
            coordinator.want_batch()
            assert coordinator.wait_for_batch(GO) is not None
            coordinator.advance(version, synced=True)
        assert {group for group, *_ in sampler.asked} == set(range(4))


def test_groups_that_grew_old_before_a_batch_was_wanted_are_replaced(plan):
    with working(plan, most=4) as (coordinator, (sampler,), _):
        coordinator.want_batch()
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [0, 1]
        while coordinator.buffer.running:
            time.sleep(0.01)
        sampler.driver.engine.version = 2
        coordinator.advance(2, synced=True)
        coordinator.want_batch()  # finds that 2 and 3 are too old, with nothing under way
        assert numbers(
            coordinator.wait_for_batch(Mock(requested=iter([False] * 50 + [True]).__next__))[0]
        ) == [4, 5]


def test_a_complete_batch_pauses_workers_that_train_too(plan):
    with working(plan, pauses=True) as (coordinator, _, (worker,)):
        for version in (1, 2):
            coordinator.want_batch()
            assert worker.drive().reason == "batch"
            batch, _ = coordinator.wait_for_batch(GO)
            assert len(batch) == 2
            coordinator.advance(version, synced=True)


def test_new_weights_pause_workers(plan):
    with working(plan, pauses=True) as (coordinator, _, (worker,)):
        coordinator.want_batch()
        assert worker.drive().reason == "batch"
        coordinator.pause_for(version=3)
        pause = worker.drive()
        assert (pause.reason, pause.version) == ("weights", 3)


def test_the_share_of_time_without_requests_comes_with_groups(plan):
    with working(plan) as (coordinator, (sampler,), _):
        sampler.wait = lambda group: 0.2
        coordinator.want_batch()
        assert (
            0.5
            < coordinator.wait_for_batch(GO)[1].reduced(SingleProcess())["async/engine_idle_share"]
            <= 1.05
        )


def test_failures_in_a_row_end_the_wait(plan):
    with working(plan) as (coordinator, (sampler,), _):
        sampler.failing = lambda group, seed: True
        coordinator.want_batch()
        with pytest.raises(
            RuntimeError, match=f"{GROUPS_IN_A_ROW} groups in a row failed; the last: no answer"
        ):
            coordinator.wait_for_batch(GO)


def test_failures_in_a_row_leave_the_engine_where_workers_train_too(plan):
    with working(plan, pauses=True) as (coordinator, (sampler,), (worker,)):
        sampler.failing = lambda group, seed: True
        coordinator.want_batch()
        assert worker.drive().reason == "batch"
        with pytest.raises(RuntimeError, match="10 groups in a row failed"):
            coordinator.wait_for_batch(GO)


def test_groups_that_teach_nothing_end_the_wait_at_last(plan):
    with working(replace(plan, most_in_vain=6)) as (
        coordinator,
        *_,
    ):  # without rewards all are equal
        coordinator.want_batch()
        with pytest.raises(
            RuntimeError, match="--dynamic_sampling: 6 groups in a row had equal rewards"
        ):
            coordinator.wait_for_batch(GO)


@pytest.fixture
def waiting(plan):
    """A coordinator whose one worker has not connected."""
    schedule = TaskSchedule({"": TaskProgress(1.0, plan.n_samples)})
    coordinator = Coordinator(
        WorkBuffer(2, 0), schedule, plans={"": plan}, most=10, n_workers=1, pauses=False
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
    monkeypatch.setattr(current, "on_progress", seen)
    waiting.want_batch()
    stop = Mock(requested=Mock(side_effect=[False, False, True]))
    assert waiting.wait_for_batch(stop) is None
    assert not seen.called
    link = connect(waiting.workers.entrance.address)
    link.send(5)
    arrived(waiting)
    assert waiting.wait_for_batch(Mock(requested=Mock(side_effect=[False, True]))) is None
    assert seen.called


def test_a_task_joins_once_also_where_a_state_is_taken_back(plan):
    def newcomer(fields):
        config = from_options(TrainPPOConfig, pretrain="MODEL", advantage_estimator="rloo")
        return RunTask(fields["name"], config, None, 0.5, fields=fields), [
            replace(PROMPTS[0], task="new")
        ]

    with working(plan) as (coordinator, *_):
        arrived(coordinator)
        coordinator.schedule.newcomer, before = newcomer, coordinator.state_dict()
        coordinator.join({"name": "new"})
        with pytest.raises(ValueError, match="there is a task 'new' already"):
            coordinator.join({"name": "new"})
        after = coordinator.state_dict()
        assert after["joined"] == [{"name": "new"}]
        for state in (after, before, after):
            coordinator.load_state_dict(state)
            assert {*coordinator.plans} == {"", "new"}
    with working(plan) as (resumed, *_):
        arrived(resumed)
        resumed.schedule.newcomer = newcomer
        resumed.load_state_dict(after)
        assert resumed.schedule.tasks["new"].ratio == 0.5


def test_single_failures_are_replaced(plan):
    with working(plan) as (coordinator, (sampler,), _):
        sampler.failing = lambda group, seed: group in (0, 2)
        coordinator.want_batch()
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [1, 3]


def test_each_side_notices_that_the_other_is_gone(plan):
    with working(plan, pauses=True) as (coordinator, (sampler,), (worker,)):
        sampler.wait = lambda group: 100.0
        coordinator.want_batch()
        with socket.socket(fileno=os.dup(worker.link._connection.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(DistNetworkError, match="rollout rank 5"):
            coordinator.wait_for_batch(GO)
        with pytest.raises(DistNetworkError, match="rank 0, which trains"):
            worker.drive()


def test_an_error_in_a_group_is_raised_where_the_engine_runs(plan):
    with working(plan, pauses=True) as (coordinator, (sampler,), (worker,)):
        sampler.failing = lambda group, seed: 1 / 0
        coordinator.want_batch()
        with pytest.raises(ZeroDivisionError):
            worker.drive()


def test_groups_of_a_checkpoint_may_be_too_old(plan):
    with working(plan, batch=1, max_staleness=4) as (coordinator, (sampler,), _):
        coordinator.want_batch()
        coordinator.wait_for_batch(GO)
        while len(coordinator.buffer.buffered) < 4:
            time.sleep(0.01)
        state = coordinator.state_dict()
    with working(plan, batch=1, max_staleness=0) as (resumed, (sampler,), _):
        sampler.driver.engine.version = 1
        resumed.load_state_dict(state)
        resumed.advance(1, synced=True)
        resumed.want_batch()
        assert resumed.wait_for_batch(GO) is not None
        assert resumed.buffer.counts["stale"] == len(state["groups"])


def test_late_results_of_a_group_given_up_change_nothing(plan):
    with working(plan, max_staleness=0) as (coordinator, *_):
        coordinator.want_batch()
        batch, _ = coordinator.wait_for_batch(GO)
        before = coordinator.state_dict()
        for late in (Outcome(0, batch[0], Metrics()), Outcome(99, None, Metrics(), "lost")):
            with coordinator._changed:
                coordinator._on_worker(late)
        assert coordinator.state_dict() == before


def test_groups_with_images_of_an_agent_are_played_again(plan):
    with working(plan, max_staleness=2) as (coordinator, *_):
        coordinator.want_batch()
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
    assert state["schedule"]["shares"][""]["accepted"] == 5 * plan.n_samples
    with working(plan, max_staleness=2) as (resumed, *_):
        resumed.load_state_dict(state)
        assert resumed.progress()[""]["accepted_episodes"] == 5 * plan.n_samples
        trained = []
        for version in (1, 2):
            resumed.want_batch()
            trained += numbers(resumed.wait_for_batch(GO)[0])
            resumed.advance(version, synced=True)
        assert sorted(trained) == [2, 3, 4, 5]


def test_a_signal_ends_the_wait(plan):
    class Stop(StopCheck):
        def requested(self):
            return True

    with working(plan, pauses=True) as (coordinator, *_):
        coordinator.want_batch()
        assert coordinator.wait_for_batch(Stop()) is None


def test_a_resumed_coordinator_plays_what_was_under_way_again(plan):
    with working(plan, max_staleness=2) as (coordinator, (sampler,), _):
        sampler.wait = lambda group: 100.0 if group in (1, 4) else 0.0
        coordinator.want_batch()
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [0, 2]
        coordinator.advance(1, synced=True)
        coordinator.want_batch()
        assert numbers(coordinator.wait_for_batch(GO)[0]) == [3, 5]
        state = coordinator.state_dict()
    with working(plan, max_staleness=2) as (resumed, (sampler,), _):
        sampler.driver.engine.version = 2
        resumed.load_state_dict(state)
        resumed.advance(2, synced=True)
        assert resumed.buffer.room() == (2 + 2 + 1) * 2 - resumed.buffer.accepted
        trained = []
        for version in (3, 4, 5):
            resumed.want_batch()
            trained += numbers(resumed.wait_for_batch(GO)[0])
            resumed.advance(version, synced=True)
        assert sorted(trained) == [1, 4, 6, 7, 8, 9]
