"""Merge a PEFT folder into full weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import MergeLoRAConfig
from openppo.models.disabling import disable_outputs
from openppo.models.loading import load_causal_lm, load_options, model_error_context
from openppo.models.pretrained import (
    adapter_config,
    base_model_of,
    check_model,
    is_peft_folder,
    load_tokenizer,
)
from openppo.models.saved_adapters import HEAD_TASK
from openppo.models.scalar_head import load_classifier
from openppo.overrides import restore_overridden
from openppo.processor_files import copy_processor
from openppo.weight_files import holds_model, set_usual_mode


class LoRAMerge:
    """Merge adapters and base model in float32; ``fit()`` writes the result. ``ValueError`` names the flag."""

    def __init__(self, config: MergeLoRAConfig) -> None:
        self.folder = Path(config.save_path)
        name = config.lora_path
        base = config.pretrain
        trust = config.trust_remote_code

        if not is_peft_folder(name):
            raise ValueError(
                f"--lora_path {name}: this is not a PEFT folder; it has no adapter_config.json."
            )
        if base is None:
            check_model(name, "--lora_path", trust)
        else:
            check_model(base, "--pretrain", trust)
            if is_peft_folder(base):
                raise ValueError(
                    f"--pretrain {base} is a PEFT folder; give a base model with full weights."
                )
        if holds_model(self.folder):
            raise ValueError(f"--save_path {self.folder} holds a model already: choose another.")
        make_folder("--save_path", self.folder)

        self.tokenizer: PreTrainedTokenizerBase | None = None
        try:
            self.tokenizer = load_tokenizer(name, "--lora_path", base, trust_remote_code=trust)
        except ValueError as error:
            logger.warning("no tokenizer is written: %s", error)

        load = load_options(bf16=False, flash_attn=False, trust_remote_code=trust)
        with model_error_context("--lora_path", name):
            if adapter_config(name).get("task_type") == HEAD_TASK:
                self.model, headless = load_classifier(name, base=base, **load)
                if headless:
                    raise ValueError(
                        f"{name}: neither it nor its base model has a scalar head 'score.weight'."
                    )
            else:
                self.model = load_causal_lm(name, base, **load)
        if config.bf16:
            to_bf16(self.model)

    def fit(self) -> None:
        """Write model and tokenizer."""
        # transformers writes a config with output_attentions for eager attention only.
        disable_outputs(self.model)
        self.model.save_pretrained(self.folder)
        set_usual_mode(self.folder.glob("model*.safetensors"))
        restore_overridden(self.folder / "config.json")

        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(self.folder)
            copy_processor(base_model_of(self.model.name_or_path or ""), self.folder)
        logger.info("wrote the full weights to %s", self.folder)

    def close(self) -> None:
        """Do nothing: there is no process group to leave."""


def make_folder(flag: str, folder: Path) -> None:
    """Create ``folder``; ``ValueError`` naming ``flag`` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag} {folder}: cannot be written ({error}).") from error


def to_bf16(model: Any) -> None:
    """Round the weights of a Hugging Face or PEFT model, in place."""
    # Buffers keep their dtype: rotary frequencies must stay float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = torch.bfloat16
