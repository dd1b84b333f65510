"""Prompts, held-out prompts and documents of a PPO run."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.datasets import TokenExample, load_documents, load_prompts, load_rows, require_column
from openppo.trainer.startup import log_dropped
from openppo.types import Prompt


@dataclass(frozen=True)
class PPOData:
    """``held_out`` is empty without ``--eval_data``, ``documents`` without ``--pretrain_data``."""

    prompts: list[Prompt]
    held_out: list[Prompt]
    documents: list[TokenExample]
