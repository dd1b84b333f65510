"""Program of ``answer_process.py``: answers pickled questions until its pipe is closed.

The first argument is the file descriptor of the pipe. Then ``math`` compares answers, ``regex PATTERN`` searches for
matches, and ``function FILE NAME PATH`` calls a function of users, with the folders of PATH to import from.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SECONDS = 2
_MEMORY_BYTES = 4 * 2**30


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


def load_function(file: str, name: str, path: str) -> Callable[[dict[str, Any]], Any]:
    """Load the function ``name`` of ``file``, which imports from the folders of ``path``.

    It is called with a dict of its arguments.
    """
    sys.path[:] = path.split(os.pathsep)
    spec = spec_from_file_location(f"reward_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses and pickle
    spec.loader.exec_module(module)
    function = getattr(module, name)
    return lambda arguments: function(**arguments)


def reply(answer: Callable[[Any], Any], question: Any) -> bytes:
    """Pickle the answer and None, or None with repr and traceback of an exception."""
    try:
        result = answer(question)
        if isinstance(result, Iterator):
            result = list(result)
        return pickle.dumps((result, None))
    except BaseException as error:  # noqa: BLE001 (raised again where the answer is read)
        failure = repr(error), "".join(traceback.format_exception(error))
        return pickle.dumps((None, failure))


def main(descriptor: int, kind: str, *arguments: str) -> None:
    """Answer questions until the pipe is closed."""
    pipe = Connection(descriptor)
    os.set_inheritable(descriptor, False)

    answer: Callable[[Any], Any] = is_equal
    if kind == "function":
        answer = load_function(*arguments)
    else:
        logging.disable(logging.CRITICAL)  # math-verify logs each answer that takes too long
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    if kind == "regex":
        answer = partial(last_match, re.compile(arguments[0]))
    elif kind == "math":
        import math_verify  # noqa: F401 (so that the first answer does not wait for it)

    pipe.send_bytes(b"")  # it is ready
    with suppress(EOFError, ConnectionError):
        while True:
            question = pickle.loads(pipe.recv_bytes())  # noqa: S301 (from this run)
            pipe.send_bytes(reply(answer, question))


if __name__ == "__main__":
    _, descriptor, *command = sys.argv
    main(int(descriptor), *command)
