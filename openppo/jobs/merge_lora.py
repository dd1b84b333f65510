"""The merge_lora command: full weights of adapters, with a card that repeats how they were trained."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import MergeLoRAConfig
from openppo.models.disabling import disable_outputs
from openppo.models.loading import load_causal_lm, load_options, model_error_context
from openppo.models.merge_lora import to_bf16
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
from openppo.tracking.card_file import CARD, card_header, is_replaceable, write_card
from openppo.trainer.cards.text import OWN, auto_class_of, model_facts, pipeline_of, use_of
from openppo.weight_files import holds_model, set_usual_mode

_TRAINING = "## Training\n"


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


class MergeJob:
    """Merge adapters, and describe the result; ``ValueError`` names the flag."""

    def __init__(self, config: MergeLoRAConfig) -> None:
        self.config = config
        self.merge = LoRAMerge(config)

    def fit(self) -> None:
        """Write model, tokenizer and card."""
        self.merge.fit()
        folder = Path(self.config.save_path)
        adapters = Path(self.config.lora_path)
        base = model_facts(self.config.pretrain or base_model_of(self.config.lora_path))
        write_card(folder, _header(adapters, folder, base), _body(adapters, folder, base))

    def close(self) -> None:
        """Do nothing: there is no process group to leave."""


def _header(adapters: Path, folder: Path, base: dict[str, str]) -> dict[str, Any]:
    """Return the header of the adapters' card, for a model of transformers."""
    known = card_header(adapters)
    header: dict[str, Any] = {"library_name": "transformers"}
    if "license" in known or "license" in base:
        header["license"] = known.get("license", base.get("license"))
    if "hub" in base:
        header["base_model"] = base["hub"]
    if "datasets" in known:
        header["datasets"] = known["datasets"]
    header["pipeline_tag"] = pipeline_of(auto_class_of(folder))
    header["tags"] = known.get("tags", ["openppo"])
    return header


def _body(adapters: Path, folder: Path, base: dict[str, str]) -> str:
    """Return the Markdown; how the adapters were trained is repeated from their card, if it is ours."""
    name = adapters.resolve().name
    title = f"# {base['name']} with adapters {name}"
    about = f"The adapters (LoRA) `{name}`, merged into the weights of `{base['name']}` by OpenPPO."
    auto_class = auto_class_of(folder)
    writes = auto_class == "AutoModelForCausalLM"
    parts = [title, about, use_of(auto_class, has_adapters=False, writes=writes)]

    file = adapters / CARD
    text = file.read_text(encoding="utf-8") if file.is_file() and is_replaceable(file) else ""
    _, heading, training = text.partition(_TRAINING)
    parts.append((heading + training).strip() if heading else OWN)
    return "\n\n".join(parts) + "\n"
