"""What a model from elsewhere may not do here: run code while it is loaded."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager


class RefusedError(ValueError):
    """A model or tokenizer that would run code of its own."""


@contextmanager
def refusing_code(name: str) -> Iterator[None]:
    """Around every ``from_pretrained``: ``RefusedError`` for code in ``name``, and for pickles of more than tensors.

    transformers and PEFT read pickles with ``weights_only``, so nothing in them has run.
    """
    try:
        yield
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise  # not about a file
        raise RefusedError(
            f"{name}: its weights are a pickle file that holds more than tensors, which could run code, or is damaged. "
            "It was refused, and nothing in it was run. Use weights in safetensors, from a source that you trust."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise RefusedError(
            f"{name}: it brings Python code of its own (auto_map in its config), which would run here with all your "
            "rights. Read that code; if you trust it, pass --trust_remote_code."
        ) from error
