"""The program of ``answer_process.py``, which answers pickled questions until its stdin is closed.

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
    """What the other process wrote next; ``EOFError`` if that has ended."""
    return pickle.load(file)  # noqa: S301 (both are this program)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match of ``pattern`` in ``text``, or the group in it; None without a match."""
    found = None
    for match in pattern.finditer(text):
        found = match[pattern.groups] or ""
    return found


def is_equal(question: tuple[str, list[str]]) -> bool | None:
    """Whether one of the readings equals the label (both in ``question``); None for a label without mathematics."""
    from math_verify import parse, verify

    label, readings = question
    gold = parse(label, parsing_timeout=_SECONDS)
    if not gold:
        return None
    read = (parse(reading, parsing_timeout=_SECONDS) for reading in readings)
    return any(verify(gold, found, timeout_seconds=_SECONDS) for found in read)


def load_function(file: str, name: str, path: str) -> Callable[..., Any]:
    """The function ``name`` of ``file``, which imports from the folders of ``path``."""
    sys.path[:] = path.split(os.pathsep)
    spec = spec_from_file_location(f"reward_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = sys.modules[spec.name] = module_from_spec(
        spec
    )  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def call_function(
    function: Callable[..., Any], arguments: dict[str, Any]
) -> bytes | tuple[str, str]:
    """Its pickled result, or repr and traceback of what it raised."""
    try:
        result = function(**arguments)
        return pickle.dumps(list(result) if isinstance(result, Iterator) else result)
    except BaseException as error:  # noqa: BLE001 (raised again where the answer is read)
        return repr(error), "".join(traceback.format_exception(error))


def main(kind: str, *arguments: str) -> None:
    """Answer questions until stdin is closed."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a function prints is no answer
    answer: Callable[[Any], Any]
    if kind == "function":
        answer = partial(call_function, load_function(*arguments))
    else:
        answer = partial(last_match, re.compile(arguments[0])) if kind == "regex" else is_equal
        logging.disable(logging.CRITICAL)  # math-verify logs each answer that takes too long
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    if kind == "math":
        import math_verify  # noqa: F401 (its seconds are not the first answer's)
    with suppress(EOFError):
        send = None
        while True:
            pickle.dump(send, answers)
            answers.flush()
            send = answer(read(questions))


if __name__ == "__main__":
    main(*sys.argv[1:])
