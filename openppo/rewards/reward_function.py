"""A user's reward function, called with the values that its parameters name."""

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from openppo import logger
from openppo.rewards.function_process import FunctionProcess
from openppo.rewards.function_values import (
    BATCH_NAMES,
    BEHIND_COLUMNS,
    IN_BOTH_FORMS,
    SINGLE_NAMES,
    VERL_NAMES,
    Values,
)


class RewardFunction:
    """A user's function, called with the values that its parameters name.

    With names of ``BATCH_NAMES`` it is called once with lists (``is_batch``), with names of ``SINGLE_NAMES`` once for
    each sample; further parameters may name data ``columns``, and ``**kwargs`` gets everything, but not under verl's
    names. A column takes precedence over a parameter of the same name in ``BEHIND_COLUMNS``. ``where`` is the flag and
    file of the function, for messages; ``ValueError`` names it and a parameter without a value.
    """

    def __init__(self, function: Callable[..., Any], where: str, columns: Collection[str]) -> None:
        parameters = inspect.signature(function).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [p for p in parameters if p.kind not in variadic]
        names = [p.name for p in named]
        telling = set(names) - IN_BOTH_FORMS
        columns_first = BEHIND_COLUMNS.intersection(columns)
        _log_columns(where, columns_first.intersection(names))

        self.is_batch = not telling.isdisjoint(BATCH_NAMES.keys() - columns_first)
        known = BATCH_NAMES if self.is_batch else SINGLE_NAMES
        self.known = {name: value for name, value in known.items() if name not in columns_first}
        """Parameter -> name of its value in ``Values``."""
        self.names = [name for name in names if name in self.known or name in columns]
        unknown = [
            p.name
            for p in named
            if p.default is inspect.Parameter.empty and p.name not in self.names
        ]
        if unknown or telling.isdisjoint(self.known):
            raise ValueError(
                f"{where}: {_mismatch(unknown)}. Use {', '.join(BATCH_NAMES)} for lists of a whole batch, or "
                f"{', '.join(SINGLE_NAMES)} for one sample at a time; further parameters may have defaults or name "
                f"columns of the data ({', '.join(sorted(columns)) or 'none'})."
            )

        self.function = function
        self.where = where
        self.n_processes = 0
        self._free_processes = SimpleQueue[FunctionProcess]()
        self._seconds = math.inf
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        call = getattr(function, "__call__", None)  # noqa: B004 (an object whose __call__ is async)
        self.is_async = any(map(inspect.iscoroutinefunction, (function, call)))

    def start_processes(self, file: Path, name: str, n: int, seconds: float | None) -> None:
        """Call ``name`` of ``file`` in ``n`` processes from now on, unless it is async or an object.

        A call may take this many ``seconds`` for each of its samples.
        """
        if self.is_async or not inspect.isfunction(self.function):
            kind = "async" if self.is_async else "an object, which may hold state of the run"
            logger.warning(
                "%s is %s: it stays in this process, without --reward_workers and time limit",
                self.where,
                kind,
            )
            return
        if self.is_batch:
            logger.info(
                "%s scores whole batches, each in one of --reward_workers %d", self.where, n
            )
        for _ in range(n):
            self._free_processes.put(FunctionProcess(self.where, file, name))
        self.n_processes = n
        self._seconds = math.inf if seconds is None else seconds

    def __call__(self, samples: Sequence[Values]) -> Any:
        """Call the function with copies of ``samples``."""
        arguments = {}
        for name in self._arguments(samples):
            values = [copy.deepcopy(self._value(sample, name)) for sample in samples]
            arguments[name] = values if self.is_batch else values[0]
        if self.n_processes > 0:
            return self._call_in_process(arguments, len(samples))

        result = self.function(**arguments)
        # A generator raises its errors here.
        return list(result) if isinstance(result, Iterator) else result

    def _call_in_process(self, arguments: dict[str, Any], n_samples: int) -> Any:
        """Call the function in a free process; raises as ``FunctionProcess.call`` does."""
        process = self._free_processes.get()
        try:
            return process.call(arguments, n_samples * self._seconds)
        except TimeoutError:
            message = f"no result within --reward_timeout {self._seconds:g} s a sample"
            raise TimeoutError(message) from None
        finally:
            self._free_processes.put(process)

    def _arguments(self, samples: Sequence[Values]) -> list[str]:
        """Names of the arguments of a call, in order."""
        if not self.takes_all:
            return self.names
        columns = [column for sample in samples for column in sample["row"]]
        known = [name for name in self.known if name not in VERL_NAMES]
        return list(dict.fromkeys([*self.names, *columns, *known]))

    def _value(self, sample: Values, name: str) -> Any:
        """Value of a parameter for a sample: a known value, else that of the data column."""
        if name in self.known:
            return sample[self.known[name]]
        return sample["row"].get(name)


def _log_columns(where: str, names: Collection[str]) -> None:
    """Log that parameters get values of data columns although their names could mean other values."""
    if not names:
        return
    are = "is a column" if len(names) == 1 else "are columns"
    logger.info(
        "%s: %s %s of the data here, and gets its values",
        where,
        " and ".join(sorted(names)),
        are,
    )


def _mismatch(unknown: Sequence[str]) -> str:
    """Reason why a function cannot be called, in words; ``unknown`` are parameters without a value."""
    if not unknown:
        return "its parameters do not say what it scores"
    name = unknown[0]
    if name in SINGLE_NAMES:
        return f"its parameter {name!r} is for one sample, and others are for a batch"
    return f"its parameter {name!r} is unknown"
