"""Program of ``function_process.py``: calls a function of a file, for each dict of arguments that a pipe brings.

Its arguments are the file descriptor of the pipe, the file, the name, and the folders to import from.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def load(file: str, name: str) -> Callable[..., Any]:
    """Load the function ``name`` of ``file``."""
    spec = spec_from_file_location(f"reward_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses and pickle
    spec.loader.exec_module(module)
    return getattr(module, name)


def reply(function: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    """Pickle the result and None, or None with repr and traceback of an exception."""
    try:
        result = function(**arguments)
        if isinstance(result, Iterator):
            result = list(result)
        return pickle.dumps((result, None))
    except BaseException as error:  # noqa: BLE001 (raised again where the result is read)
        failure = repr(error), "".join(traceback.format_exception(error))
        return pickle.dumps((None, failure))


if __name__ == "__main__":
    _, descriptor, file, name, folders = sys.argv
    os.set_inheritable(int(descriptor), False)
    sys.path[:] = folders.split(os.pathsep)
    function = load(file, name)

    pipe = Connection(int(descriptor))
    pipe.send_bytes(b"")  # it is ready
    with suppress(EOFError, ConnectionError):  # the pipe is closed
        while True:
            arguments = pickle.loads(pipe.recv_bytes())  # noqa: S301 (from this run)
            pipe.send_bytes(reply(function, arguments))
