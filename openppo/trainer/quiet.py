"""Quiet libraries, for programs with a training loop of their own."""

import os
import warnings

import transformers

from openppo.tracking import setup_logging


def quiet_libraries() -> None:
    """Log as the commands do, and silence other libraries but for errors.

    For loops of your own, called before anything is built. Without it a program has the step lines alone.
    """
    setup_logging(int(os.environ.get("RANK", "0")))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    # peft and transformers warn about each other.
    warnings.filterwarnings("ignore", category=FutureWarning)
    # peft sets this option right before it warns.
    warnings.filterwarnings("ignore", message="fan_in_fan_out", category=UserWarning)
    # An error instead of a question on stdin.
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
