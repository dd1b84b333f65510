"""Program of ``answer_process.py``: answers pickled questions until its stdin is closed.

``answer_program.py math`` compares answers, ``answer_program.py regex PATTERN`` searches for matches, and
``answer_program.py function FILE NAME PATH`` calls a function of users, with the folders of PATH to import from.
"""

import logging
import os
import pickle
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import IO, Any

_SECONDS = 2
_MEMORY_BYTES = 4 * 2**30


def read(file: IO[bytes]) -> Any:
    """Read the next object from the other process; ``EOFError`` if that process has ended."""
    return pickle.load(file)  # noqa: S301 (both are this program)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Last match of ``pattern`` in ``text``, or the group in it; None without a match."""
    last = None
    for match in pattern.finditer(text):
        last = match[pattern.groups] or ""
    return last


def is_equal(question: tuple[str, list[str]]) -> bool | None:
    """True if one of the readings equals the label; None for a label without mathematics.

    ``question`` is the label and the readings.
    """
    from math_verify import parse, verify

    label, readings = question
    gold = parse(label, parsing_timeout=_SECONDS)
    if not gold:
        return None
    for reading in readings:
        answer = parse(reading, parsing_timeout=_SECONDS)
        if verify(gold, answer, timeout_seconds=_SECONDS):
            return True
    return False


def load_function(file: str, name: str, path: str) -> Callable[..., Any]:
    """Load the function ``name`` of ``file``, which imports from the folders of ``path``."""
    sys.path[:] = path.split(os.pathsep)
    spec = spec_from_file_location(f"reward_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses and pickle
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def call_function(
    function: Callable[..., Any], arguments: dict[str, Any]
) -> bytes | tuple[str, str]:
    """Call a function; return its pickled result, or repr and traceback of its exception."""
    try:
        result = function(**arguments)
        if isinstance(result, Iterator):
            result = list(result)
        return pickle.dumps(result)
    except BaseException as error:  # noqa: BLE001 (raised again where the answer is read)
        return repr(error), "".join(traceback.format_exception(error))


def restrict() -> None:
    """Bound the memory of this process, and silence its logs."""
    logging.disable(logging.CRITICAL)  # math-verify logs each answer that takes too long
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def main(kind: str, *arguments: str) -> None:
    """Answer questions until stdin is closed."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # so that a function's output is not read as an answer

    answer: Callable[[Any], Any] = is_equal
    if kind == "function":
        answer = partial(call_function, load_function(*arguments))
    else:
        if kind == "regex":
            answer = partial(last_match, re.compile(arguments[0]))
        restrict()
    if kind == "math":
        import math_verify  # noqa: F401 (so that the first answer does not wait for it)

    with suppress(EOFError):
        result = None  # sent once this process is ready
        while True:
            pickle.dump(result, answers)
            answers.flush()
            result = answer(read(questions))


if __name__ == "__main__":
    _, *command = sys.argv
    main(*command)
