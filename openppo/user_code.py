"""Code of users: loaded without side effects on the run, and called on threads of its own."""

import asyncio
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dis import get_instructions
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from jinja2 import TemplateError

from openppo import logger

TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions that a chat template may raise: it is a program too (``OverflowError``: a loop that is too long)."""
_FOLDERS = set[Path]()  # of files that were loaded


def load_callable(location: str, flag: str, default_name: str | None = None) -> Callable[..., Any]:
    """Load the function or class at ``path.py:name``, or with ``default_name`` also at ``path.py``.

    ``ValueError`` naming ``flag`` if there is none, or if the file cannot be imported.
    """
    return find_callable(location, flag, () if default_name is None else (default_name,)).value


class FoundCallable(NamedTuple):
    """A function or class of a file, and the name that it has there."""

    file: Path
    name: str
    value: Callable[..., Any]


def find_callable(location: str, flag: str, default_names: Sequence[str] = ()) -> FoundCallable:
    """Load the function or class at ``path.py:name``, or the first of ``default_names`` that ``path.py`` has.

    ``ValueError`` as in ``load_callable``.
    """
    file, name = split_location(location, flag, next(iter(default_names), None))
    names = [name] if location.endswith(f":{name}") else list(default_names)
    members = vars(load_module(file, f"{flag} {location}"))
    for name in names:
        if callable(value := members.get(name)):
            return FoundCallable(file, name, value)
    functions = sorted(
        key for key, value in members.items() if callable(value) and not key.startswith("_")
    )
    has = f"{file} has no function {' or '.join(map(repr, names))}. It has: {', '.join(functions) or 'none'}."
    raise ValueError(f"{flag} {location}: {has} Name one of them as {file}:NAME.")


def split_location(location: str, flag: str, default_name: str | None = None) -> tuple[Path, str]:
    """File and name of ``path.py:name``; ``ValueError`` naming ``flag`` for anything else."""
    parts = re.fullmatch(r"(.+\.py)(?::(\w*))?", location)
    name = (parts[2] if parts else None) or default_name
    if parts is None or name is None:
        raise ValueError(f"{flag} {location}: give a Python file and a name in it, path.py:name.")
    return Path(parts[1]).expanduser(), name


def load_module(file: Path, source: str) -> ModuleType:
    """Load a Python file, which may import modules beside it.

    ``ValueError`` naming ``source``, a flag and its value, if it cannot be imported.
    """
    if not file.is_file():
        raise ValueError(f"{source}: no such file {file}. Check the path.")
    flag = source.partition(" ")[0].removeprefix("--")
    spec = spec_from_file_location(f"{flag}_{file.stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = sys.modules[spec.name] = module_from_spec(
        spec
    )  # dataclasses and pickle look it up there
    with leaving_no_trace(source):
        try:
            _import_beside(file.resolve(), source)
            spec.loader.exec_module(module)
        except (ImportError, SyntaxError) as error:
            raise ValueError(
                f"{source}: cannot be imported ({error}). Install what it needs."
            ) from error
    return module


def _import_beside(file: Path, source: str) -> None:
    """Let ``file`` import modules of its folder, at any time, where nothing else has their names.

    Of two folders with a module of one name the second is a ``ValueError``; an installed one goes before, with a
    warning.
    """
    folder = file.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    _FOLDERS.add(folder)
    for name in _names_beside(file):
        homes = _homes(find_spec(name))
        if other := sorted(homes & _FOLDERS - {folder}):
            raise ValueError(
                f"{source}: it imports {name}, which is in {folder} and in {other[0]}. Rename one."
            )
        if folder not in homes:
            logger.warning(
                "%s: it imports %s, which is an installed module and not the file beside it",
                source,
                name,
            )


def _names_beside(file: Path) -> list[str]:
    """Names of the modules and packages in its folder that ``file`` imports, itself or through others of them."""
    names, files = dict[str, None](), [file]
    while files:
        for name in _imported(files.pop()):
            module, package = file.with_name(f"{name}.py"), file.with_name(name)
            if (
                name not in names
                and module != file
                and (module.is_file() or any(package.glob("*.py")))
            ):
                names[name] = None
                files += [each for each in (module, package / "__init__.py") if each.is_file()]
    return list(names)


def source_files(file: Path) -> list[Path]:
    """A Python ``file``, and the modules beside it that it imports, itself or through others of them."""
    files = [file]
    with suppress(SyntaxError, ValueError):  # loading the file says so
        for name in _names_beside(file):
            module, package = file.with_name(f"{name}.py"), file.with_name(name)
            files += [module] if module.is_file() else sorted(package.rglob("*.py"))
    return files


def _imported(file: Path) -> list[str]:
    """First parts of the names of all modules that a file imports, inside functions too."""
    names, codes = list[str](), [compile(file.read_bytes(), str(file), "exec", dont_inherit=True)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        steps = [step for step in get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for place, step in enumerate(steps):
            if (
                step.opname == "IMPORT_NAME" and steps[place - 2].argval == 0
            ):  # the level: no relative import
                names.append(str(step.argval).partition(".")[0])
    return names


def _homes(spec: ModuleSpec | None) -> set[Path]:
    """Folders that a module comes from; several for a package without ``__init__.py``, none for a built-in one."""
    if spec is None:
        return set()
    if spec.submodule_search_locations is not None:
        return {Path(place).resolve().parent for place in spec.submodule_search_locations}
    return {Path(spec.origin).resolve().parent} if spec.has_location and spec.origin else set()


@contextmanager
def leaving_no_trace(source: str) -> Iterator[None]:
    """Undo changes of gradient mode, default dtype and device, and seeds.

    ``sys.exit()`` in it is a ``ValueError`` naming ``source``. For the thread that trains, before training.
    """
    grad = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(gpus):
            yield
    except SystemExit as error:
        raise ValueError(
            f"{source}: calls sys.exit() while it is loaded. Take the call out."
        ) from error
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        random.setstate(state)
        np.random.set_state(numpy_state)


class Worker:
    """One daemon thread for calls in order: a call that hangs does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.last: Future[Any] = Future()
        Thread(target=self._run, name="code of users", daemon=True).start()

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Result of a function; a coroutine is awaited in the event loop."""
        self.last = self.begin(function, *arguments, **named)
        made = await asyncio.wrap_future(self.last)
        return await made if inspect.isawaitable(made) else made

    def begin(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> "Future[Any]":
        """Queue a call."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(function, *arguments, **named)))
        return future

    def end(self) -> None:
        """End the thread after its last call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (begun := self._calls.get()) is not None:
            future, work = begun
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 (raised again where it is awaited)
                    # A coroutine cannot raise StopIteration, and what is no Exception would end the event loop.
                    is_one = isinstance(error, Exception) and not isinstance(error, StopIteration)
                    future.set_exception(
                        error if is_one else RuntimeError(f"{type(error).__name__}: {error}")
                    )


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Result of a coroutine function, or of a plain one, which runs on a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    worker = Worker()
    try:
        return await worker.call(function, *arguments, **named)
    finally:
        worker.end()
