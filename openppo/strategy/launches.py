"""Whether training waits for the host: the launches of one micro-batch beside the time that its kernels take."""

import time
from collections.abc import Callable

from openppo import logger

_WARM_UP_STEPS = 1
"""Optimizer steps that are not timed: the first one allocates, and compiles kernels."""
_TRIES = 3
_IDLE = 0.1
"""Part of a micro-batch's time: a GPU that is done so soon after the last launch has waited for launches."""


class LaunchWatch:
    """Times the launches of one micro-batch on a GPU, once in a run; on a CPU nothing.

    The models of a run share it. ``synchronize`` waits for the GPU (None: there is none). The last micro-batch of an
    optimizer step is never timed: it also reduces gradients, and a step that has no other gains nothing by larger ones.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize, self._clock = synchronize, clock
        self._n_steps = self._n_tries = 0
        self._began: float | None = None

    def before_forward(self) -> None:
        """Begin to time a micro-batch, if it is time to."""
        if (
            self._synchronize is not None
            and self._n_steps >= _WARM_UP_STEPS
            and self._n_tries < _TRIES
        ):
            self._synchronize()
            self._began = self._clock()

    def after_backward(self, last: bool) -> None:
        """Log it if the micro-batch that was timed has waited for its launches."""
        began, self._began = self._began, None
        self._n_steps += last
        if self._synchronize is None or began is None:
            return
        self._n_tries += 1
        if last:
            return
        launching_s = self._clock() - began
        self._synchronize()
        total_s = self._clock() - began
        self._n_tries = _TRIES
        if total_s - launching_s < _IDLE * total_s:
            logger.info(
                "training waits for the host (launching a micro-batch took %.0f of %.0f ms): raise "
                "--micro_train_tokens or --micro_train_batch_size",
                1e3 * launching_s,
                1e3 * total_s,
            )
