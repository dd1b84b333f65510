"""Files of users: loaded without side effects on the run."""

import copy
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from jinja2 import TemplateError

TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that a chat template may raise: it is a program too (``OverflowError``: a loop that is too long)."""

_running = threading.local()  # of a thread that runs a user's code: ``source``, the flag and file
_process = os.getpid()
_exit = os._exit


def load_callable(location: str, flag: str, default_name: str | None = None) -> Callable[..., Any]:
    """Load the function or class at ``path.py:name``, or with ``default_name`` also at ``path.py``.

    ``ValueError`` naming ``flag`` if there is none, or if the file cannot be imported.
    """
    parts = re.fullmatch(r"(.+\.py)(?::(\w*))?", location)
    name = (parts[2] if parts else None) or default_name
    if parts is None or name is None:
        how = "path.py or path.py:name" if default_name else "and a name in it, path.py:name"
        raise ValueError(f"{flag} {location}: give a Python file{',' if default_name else ''} {how}.")
    file = Path(parts[1]).expanduser()
    if not file.is_file():
        remedy = "Give one file: its function can call those of others" if ".py," in location else "Check the path"
        raise ValueError(f"{flag} {location}: no such file {file}. {remedy}.")
    spec = spec_from_file_location(f"{flag.removeprefix('--')}_{file.stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses and pickle look it up there
    with leaving_no_trace(f"{flag} {location}"):
        try:
            spec.loader.exec_module(module)
        except (ImportError, SyntaxError) as error:
            reason = f"cannot be imported ({error}). Install what it needs, or correct it."
            raise ValueError(f"{flag} {location}: {reason}") from error
    found = vars(module).get(name)
    if not callable(found):
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        has = f"{file} has no function {name!r}. It has: {', '.join(names) or 'none'}."
        raise ValueError(f"{flag} {location}: {has} Name one of them as {file}:NAME.")
    return found


@contextmanager
def leaving_no_trace(source: str) -> Iterator[None]:
    """Undo changes of gradient mode, default dtype and device, and seeds.

    ``sys.exit()`` in it is a ``ValueError`` naming ``source``. For the thread that trains, before training.
    """
    grad, dtype, device = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(gpus), no_silent_end(source):
            yield
    except SystemExit as error:
        raise ValueError(f"{source}: calls sys.exit() while it is loaded. Take the call out.") from error
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        random.setstate(state)
        np.random.set_state(numpy_state)


@contextmanager
def no_silent_end(source: str) -> Iterator[None]:
    """Turn ``os._exit(0)`` into status 1 and a line that names ``source``.

    It acts in the block, and from then on in all threads but the main one: the code may have started them.
    """
    global _process
    os._exit, _process = _exit_with_a_reason, os.getpid()
    before = vars(_running).copy()
    _running.source = source
    try:
        yield
    finally:
        vars(_running).clear()
        vars(_running).update(before)


def _exit_with_a_reason(status: int) -> NoReturn:
    source = vars(_running).get("source")
    if source is None and threading.current_thread() is not threading.main_thread():
        source = "a thread of a reward function or data file"
    if status % 256 == 0 and source is not None and os.getpid() == _process:  # a child may end as it likes
        os.write(2, f"error: {source} calls os._exit({status}), which ends the run. Take the call out.\n".encode())
        status = 1
    _exit(status)


def copied(value: Any) -> Any:
    """Deep copy of ``value``; an object that cannot be copied itself."""
    try:
        return copy.deepcopy(value)
    except TypeError:
        return value
