"""User code: loaded without side effects on the run, and called on threads of its own."""

import asyncio
import inspect
import random
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
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
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jinja2 import TemplateError

from openppo import logger

T = TypeVar("T")

TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions of a chat template, which is a program too (``OverflowError``: a loop that is too long)."""
_FOLDERS = set[Path]()
"""Folders of the files loaded so far."""


def load_callable(location: str, flag: str, default_name: str | None = None) -> Callable[..., Any]:
    """Load the function or class at ``path.py:name``, or with ``default_name`` also at ``path.py``.

    ``ValueError`` naming ``flag`` if there is none, or if the file cannot be imported.
    """
    default_names = () if default_name is None else (default_name,)
    return find_callable(location, flag, default_names).value


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
        value = members.get(name)
        if callable(value):
            return FoundCallable(file, name, value)

    missing = " or ".join(map(repr, names))
    callables = [name for name, value in members.items() if callable(value)]
    public = sorted(name for name in callables if not name.startswith("_"))
    raise ValueError(
        f"{flag} {location}: {file} has no function {missing}. It has: {', '.join(public) or 'none'}. "
        f"Name one of them as {file}:NAME."
    )


def find_object(location: str, flag: str, kind: type[T]) -> T:
    """Load the object of class ``kind`` at ``path.py:name``; ``ValueError`` naming ``flag`` if there is none."""
    file, name = split_location(location, flag)
    members = vars(load_module(file, f"{flag} {location}"))
    value = members.get(name)
    if isinstance(value, kind):
        return value

    names = [name for name, member in members.items() if isinstance(member, kind)]
    there = f", but a {type(value).__name__} of that name" if name in members else ""
    raise ValueError(
        f"{flag} {location}: {file} has no {kind.__name__} {name!r}{there}. It has: {', '.join(names) or 'none'}. "
        f"Make one, {name} = {kind.__name__}(...), and name it as {file}:NAME."
    )


def parameters_among(function: Callable[..., Any], known: Collection[str], where: str) -> list[str]:
    """Names among ``known`` of the values that ``function`` takes by its parameters; all with ``**kwargs``.

    ``ValueError`` beginning with ``where``, the flag and its value, for a parameter without a value.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(known)

    names = []
    for parameter in parameters:
        has_value = parameter.name in known and parameter.kind is not parameter.POSITIONAL_ONLY
        is_needed = parameter.default is parameter.empty
        if has_value:
            names.append(parameter.name)
        elif is_needed and parameter.kind is not parameter.VAR_POSITIONAL:
            raise ValueError(
                f"{where}: its parameter {parameter.name!r} has no value; known are {', '.join(known)}. Rename it, or "
                "give it a default."
            )
    return names


@contextmanager
def errors_of(where: str, doing: str) -> Iterator[None]:
    """Turn any exception of a user's code into a ``ValueError``: ``where`` raised it while ``doing`` something.

    ``ValueError`` of ours, which begins with ``where``, passes.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(where):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        line = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name})"
        raise ValueError(f"{where} raised {error!r}{line} {doing}.") from error


def split_location(location: str, flag: str, default_name: str | None = None) -> tuple[Path, str]:
    """Return file and name of ``path.py:name``; ``ValueError`` naming ``flag`` for anything else."""
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

    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
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

    If two folders have a module of one name, the second is a ``ValueError``. An installed module takes precedence over
    one in the folder, with a warning.
    """
    folder = file.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    _FOLDERS.add(folder)

    for name in _names_beside(file):
        homes = _homes(find_spec(name))
        other_folders = sorted(homes & _FOLDERS - {folder})
        if other_folders:
            raise ValueError(
                f"{source}: it imports {name}, which is in {folder} and in {other_folders[0]}. Rename one."
            )
        if folder not in homes:
            logger.warning(
                "%s: it imports %s, which is an installed module and not the file beside it",
                source,
                name,
            )


def _names_beside(file: Path) -> list[str]:
    """Modules and packages in the folder of ``file`` that it imports, directly or through each other."""
    names = dict[str, None]()
    to_read = [file]
    while to_read:
        for name in _imported(to_read.pop()):
            module = file.with_name(f"{name}.py")
            package = file.with_name(name)
            if name in names or module == file:
                continue
            if not module.is_file() and not any(package.glob("*.py")):
                continue

            names[name] = None
            sources = (module, package / "__init__.py")
            to_read += [source for source in sources if source.is_file()]
    return list(names)


def source_files(file: Path) -> list[Path]:
    """A Python ``file``, and the modules beside it that it imports, directly or through each other."""
    files = [file]
    with suppress(SyntaxError, ValueError):  # loading the file reports them
        for name in _names_beside(file):
            module = file.with_name(f"{name}.py")
            package = file.with_name(name)
            files += [module] if module.is_file() else sorted(package.rglob("*.py"))
    return files


def _imported(file: Path) -> list[str]:
    """Top-level names of all modules that a file imports, inside functions too."""
    names = list[str]()
    codes = [compile(file.read_bytes(), str(file), "exec", dont_inherit=True)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]

        instructions = [each for each in get_instructions(code) if each.opname != "EXTENDED_ARG"]
        for place, instruction in enumerate(instructions):
            if instruction.opname != "IMPORT_NAME":
                continue
            is_absolute = instructions[place - 2].argval == 0  # the level of the import
            if is_absolute:
                names.append(str(instruction.argval).partition(".")[0])
    return names


def _homes(spec: ModuleSpec | None) -> set[Path]:
    """Folders of a module: several for a package without ``__init__.py``, none for a built-in one."""
    if spec is None:
        return set()
    if spec.submodule_search_locations is not None:
        return {Path(folder).resolve().parent for folder in spec.submodule_search_locations}
    if spec.has_location and spec.origin:
        return {Path(spec.origin).resolve().parent}
    return set()


@contextmanager
def leaving_no_trace(source: str) -> Iterator[None]:
    """Restore gradient mode, default dtype and device, and seeds at the end.

    ``sys.exit()`` in it is a ``ValueError`` naming ``source``. For the thread that trains, before training.
    """
    grad = torch.is_grad_enabled()
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    state = random.getstate()
    numpy_state = np.random.get_state()
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


class CallThread:
    """One daemon thread for calls in order: a call that hangs does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.last: Future[Any] = Future()
        Thread(target=self._run, name="code of users", daemon=True).start()

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return the result of a function; a coroutine is awaited in the event loop."""
        self.last = self.begin(function, *arguments, **named)
        result = await asyncio.wrap_future(self.last)
        return await result if inspect.isawaitable(result) else result

    def begin(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> "Future[Any]":
        """Queue a call."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(function, *arguments, **named)))
        return future

    def end(self) -> None:
        """End the thread after its last call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            future, work = queued
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (raised again where it is awaited)
                # A coroutine cannot raise StopIteration; a BaseException would end the event loop.
                if isinstance(error, Exception) and not isinstance(error, StopIteration):
                    future.set_exception(error)
                else:
                    future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a coroutine function, or of a plain one, run on a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)

    thread = CallThread()
    try:
        return await thread.call(function, *arguments, **named)
    finally:
        thread.end()
