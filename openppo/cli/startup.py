"""What every training command does before its models load."""

from __future__ import annotations

import os

import transformers

from openppo.tracking import setup_logging


def quiet_libraries() -> None:
    """Our log on rank 0; of other libraries only their errors, and no bars for weights that load in a second."""
    setup_logging(int(os.environ.get("RANK", "0")))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
