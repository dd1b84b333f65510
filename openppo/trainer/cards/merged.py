"""The merge_lora command: full weights of adapters, with a card that repeats how they were trained."""

from pathlib import Path
from typing import Any

from openppo.config import MergeLoRAConfig
from openppo.models.merge_lora import LoRAMerge
from openppo.models.pretrained import base_model_of
from openppo.tracking.card_file import CARD, card_header, is_replaceable, write_card
from openppo.trainer.cards.text import OWN, auto_class_of, model_facts, pipeline_of, use_of

_TRAINING = "## Training\n"


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
