"""GPU settings of all commands, made before a model is loaded."""

from __future__ import annotations

import logging

import torch
import transformers
from packaging.version import Version

logger = logging.getLogger("openppo")

_TRANSFORMERS = "5.23"


def set_up_gpu(bf16: bool) -> None:
    """Switch cuDNN attention off, and log on a GPU that float32 is slow.

    cuDNN builds a plan for each new shape, up to a second each, and its gradients under a mask may be NaN (pytorch
    issue 196678).
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available() and not bf16:
        logger.info("float32 is slow on a GPU and takes twice the memory of bfloat16: --bf16 computes in bfloat16.")


def check_transformers() -> None:
    """Refuse a transformers too old for decoding on GPUs."""
    if torch.cuda.is_available() and Version(transformers.__version__) < Version(_TRANSFORMERS):
        raise ValueError(
            f"transformers {transformers.__version__} copies keys and values for each head in each decode step, which "
            f"is slow on a GPU: pip install 'transformers>={_TRANSFORMERS}', or set CUDA_VISIBLE_DEVICES= to run on "
            "CPUs."
        )
