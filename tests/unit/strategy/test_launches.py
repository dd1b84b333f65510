"""Which micro-batch is timed, and what the log says of it; a clock by hand stands in for a GPU."""

import logging
from collections.abc import Callable

import pytest

from openppo.strategy.launches import LaunchWatch

SAYS = "training waits for the host (launching a micro-batch took {} of {} ms): raise --micro_train_tokens or "
SAYS += "--micro_train_batch_size"


class Device:
    """Kernels of a micro-batch take ``kernels_ms`` and overlap their launches, which take ``launches_ms``."""

    def __init__(self, launches_ms: float, kernels_ms: float, warm_up_ms: float = 0.0) -> None:
        self.launches_ms, self.kernels_ms, self.warm_up_ms = launches_ms, kernels_ms, warm_up_ms
        self.now_ms = self.done_ms = 0.0
        self.n_waits = 0

    def launch(self, is_first: bool) -> None:
        begins = max(self.now_ms, self.done_ms)
        self.now_ms += self.launches_ms + self.warm_up_ms * is_first
        self.done_ms = max(begins + self.kernels_ms, self.now_ms)

    def synchronize(self) -> None:
        self.n_waits += 1
        self.now_ms = max(self.now_ms, self.done_ms)

    def clock(self) -> float:
        return self.now_ms / 1e3


def train(device: Device, micro_batches: int = 3, steps: int = 4) -> None:
    """Optimizer steps as of ``TrainableModel``."""
    watch = LaunchWatch(device.synchronize, device.clock)
    for step in range(steps):
        for number in range(micro_batches):
            watch.before_forward()
            device.launch(is_first=step == number == 0)
            watch.after_backward(last=number == micro_batches - 1)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="openppo")
    return lambda: caplog.messages


def test_launches_that_take_longer_than_kernels_are_said_once(
    lines: Callable[[], list[str]],
) -> None:
    device = Device(launches_ms=150, kernels_ms=110)
    train(device)
    assert lines() == [SAYS.format(150, 150)]
    assert device.n_waits == 2, "one micro-batch is timed"


def test_kernels_that_take_longer_than_launches_are_not_said(
    lines: Callable[[], list[str]],
) -> None:
    device = Device(launches_ms=150, kernels_ms=170)
    train(device)
    assert lines() == []
    assert device.n_waits == 2


def test_a_first_step_that_compiles_is_not_timed(lines: Callable[[], list[str]]) -> None:
    train(Device(launches_ms=150, kernels_ms=170, warm_up_ms=4000))
    assert lines() == []


def test_a_step_of_one_micro_batch_is_soon_left_alone(lines: Callable[[], list[str]]) -> None:
    device = Device(launches_ms=150, kernels_ms=1)
    train(device, micro_batches=1, steps=40)
    assert lines() == []
    assert device.n_waits == 3


def test_on_a_cpu_nothing_is_timed(lines: Callable[[], list[str]]) -> None:
    watch = LaunchWatch(None, clock=lambda: pytest.fail("the clock was read"))
    for number in range(20):
        watch.before_forward()
        watch.after_backward(last=number % 2 == 1)
    assert lines() == []
