"""Merge a PEFT folder into full weights."""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openppo.config import MergeConfig
from openppo.models.adapters import HEAD_TASK
from openppo.models.loading import load_causal_lm
from openppo.models.pretrained import check_model, is_peft_folder, load_tokenizer, task_of
from openppo.models.scalar_head import load_classifier

logger = logging.getLogger("openppo")


class LoRAMerge:
    """Loads adapters and base model; ``fit()`` writes their sum, taken in float32. ``ValueError`` names the flag."""

    def __init__(self, config: MergeConfig) -> None:
        self.config = config
        self.folder = Path(config.save_path)
        if not is_peft_folder(config.lora_path):
            raise ValueError(
                f"--lora_path {config.lora_path}: this is not a PEFT folder; it has no adapter_config.json."
            )
        if config.pretrain is None:
            check_model(config.lora_path, "--lora_path", config.trust_remote_code)
        else:
            check_model(config.pretrain, "--pretrain", config.trust_remote_code)
            if is_peft_folder(config.pretrain):
                raise ValueError(f"--pretrain {config.pretrain} is a PEFT folder; give a base model with full weights.")
        if is_peft_folder(config.save_path):
            raise ValueError(f"--save_path {config.save_path} holds adapters, which would hide it: choose another.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--save_path {config.save_path}: cannot be written ({error}).") from error
        self.tokenizer = self._tokenizer()
        self.model = self._merged()
        if config.bf16:
            to_bf16(self.model)

    def fit(self) -> None:
        """Write model and tokenizer."""
        self.model.save_pretrained(self.folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(self.folder)
        logger.info("wrote the full weights to %s", self.folder)

    def close(self) -> None:
        """There is no process group to leave."""

    def _merged(self) -> PreTrainedModel:
        name, base, trust = self.config.lora_path, self.config.pretrain, self.config.trust_remote_code
        try:
            if task_of(name) != HEAD_TASK:
                return load_causal_lm(name, base, bf16=False, flash_attn=False, trust_remote_code=trust)
            model, headless = load_classifier(name, base=base, dtype=torch.float32, trust_remote_code=trust)
        except (OSError, SafetensorError, ValueError) as error:
            named = str(error) if str(error).startswith(name) else f"{name}: {error}"
            raise ValueError(f"--lora_path {named}") from error
        if headless:
            raise ValueError(f"--lora_path {name}: neither it nor its base model has a scalar head 'score.weight'.")
        return model

    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        try:
            config = self.config
            return load_tokenizer(config.lora_path, "--lora_path", config.pretrain, config.trust_remote_code)
        except ValueError as error:
            logger.warning("no tokenizer is written: %s", error)
            return None


def to_bf16(model: Any) -> None:
    """Round the weights of a Hugging Face or PEFT model, in place."""
    for parameter in model.parameters():  # not the buffers: rotary frequencies must keep float32
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = torch.bfloat16
