"""What every command does while it is put together: logs, trackers, errors that name the flag of a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from openppo.config import flat_dict
from openppo.tracking import Trackers, cut_logs, make_trackers, save_config, set_aside_logs, setup_logging

if TYPE_CHECKING:  # commands that do not train need no DeepSpeed
    from openppo.strategy.deepspeed import DeepspeedStrategy

logger = logging.getLogger("openppo")


def quiet_libraries() -> None:
    """Our log on rank 0; of other libraries only their errors, and no bars for weights that load in a second."""
    setup_logging(int(os.environ.get("RANK", "0")))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # peft loads DeepSpeed, whose search for devices is loud
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def start_trackers(
    config: Any, strategy: DeepspeedStrategy, headline: Sequence[str], total_steps: int, go_on_from: int | None = None
) -> Trackers:
    """Trackers of a command, and its resolved options in ``<save_path>/logs/config.yaml``.

    Logs of a run that goes on from step ``go_on_from`` are continued there; any other logs are set aside.
    """
    if strategy.is_main:
        logs = Path(config.run.save_path) / "logs"
        try:
            if go_on_from is None:
                set_aside_logs(logs)
            else:
                cut_logs(logs, go_on_from)
            save_config(logs, flat_dict(config))
        except OSError as error:
            raise ValueError(
                f"--save_path {config.run.save_path}: cannot be written ({error}); choose another folder."
            ) from error
    return make_trackers(config.run, strategy.comm, headline, total_steps, go_on_from)


def log_dropped(dropped: int, kept: int, flag: str, limit_flag: str) -> None:
    """Say how many rows were too long, if any."""
    if dropped > 0:
        logger.warning("%s: %d rows longer than %s were dropped, %d are kept", flag, dropped, limit_flag, kept)


def check_context(model_config: PreTrainedConfig, name: str, longest_prompt: int, new_tokens: int) -> None:
    """Raise ``ValueError`` if a prompt of so many tokens and its response do not fit ``--pretrain name``."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)  # absent for some models
    if context is not None and longest_prompt + new_tokens > context:
        raise ValueError(
            f"The longest prompt has {longest_prompt} tokens; with --generate_max_len {new_tokens} that exceeds the "
            f"context of {context} tokens of --pretrain {name}. Lower --generate_max_len or --prompt_max_len."
        )


@contextmanager
def naming_model(flag: str, name: str) -> Iterator[None]:
    """Whatever goes wrong while a model is loaded, as a ``ValueError`` that starts with its flag; and a log line."""
    logger.info("loading %s %s", flag, name)
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag} {error}" if str(error).startswith(name) else f"{flag} {name}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{flag} {name}: its weights cannot be read ({error}). Check the folder.") from error
