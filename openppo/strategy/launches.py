"""Check for training that waits for the host, from the launch time and the kernel time of one micro-batch."""

import time
from collections.abc import Callable

from openppo import logger

_WARM_UP_STEPS = 1
"""Optimizer steps that are not timed: the first one allocates memory and compiles kernels."""
_TRIES = 3
"""Attempts to time a micro-batch that is not the last of its step."""
_IDLE = 0.1
"""Fraction of a micro-batch's time: a GPU that finishes this soon after the last launch has waited for launches."""


class LaunchWatch:
    """Timer for the launches of one micro-batch on a GPU, once in a run.

    It does nothing on a CPU, where ``synchronize``, which waits for the GPU, is None. The models of a run share it. The
    last micro-batch of an optimizer step is never timed: it also reduces gradients, and a step with no other
    micro-batch would not gain by larger ones.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize = synchronize
        self._clock = clock
        self._n_steps = 0
        self._n_tries = 0
        self._start: float | None = None

    def before_forward(self) -> None:
        """Start timing a micro-batch, after the warm-up and until one is timed."""
        is_due = self._n_steps >= _WARM_UP_STEPS and self._n_tries < _TRIES
        if is_due and self._synchronize is not None:
            self._synchronize()
            self._start = self._clock()

    def after_backward(self, last: bool) -> None:
        """Log a message if the timed micro-batch has waited for its launches."""
        start = self._start
        self._start = None
        self._n_steps += last
        if self._synchronize is None or start is None:
            return
        self._n_tries += 1
        if last:
            return

        launching_s = self._clock() - start
        self._synchronize()
        total_s = self._clock() - start
        self._n_tries = _TRIES
        if total_s - launching_s < _IDLE * total_s:
            logger.info(
                "training waits for the host (launching a micro-batch took %.0f of %.0f ms): raise "
                "--micro_train_tokens or --micro_train_batch_size",
                1e3 * launching_s,
                1e3 * total_s,
            )
