"""Quiet libraries, for programs with a training loop of their own."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import transformers

from openppo.tracking import (
    setup_logging,
)

if TYPE_CHECKING:  # commands that do not train need no DeepSpeed
    pass


def quiet_libraries() -> None:
    """Log on rank 0 as the commands do; of other libraries only errors, and no bars for weights that load quickly.

    For loops of your own, called before anything is built. Without it a program has the step lines alone.
    """
    setup_logging(int(os.environ.get("RANK", "0")))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # peft and transformers about each other
    warnings.filterwarnings(
        "ignore", message="fan_in_fan_out", category=UserWarning
    )  # peft has set it right
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = (
        0  # an error instead of a question on stdin
    )
