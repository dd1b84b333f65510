"""Models and adapters on disk, gathered tensor by tensor."""

import copy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor

from openppo.overrides import restore_overridden
from openppo.processor_files import copy_processor
from openppo.weight_files import set_usual_mode

_CONFIG_BESIDE_ADAPTERS = "model_config.json"
"""File name of the model's config in a PEFT folder; beside a config.json transformers expects full weights."""


def save_model(model: Any, folder: Path, is_main: bool) -> None:
    """Write a Hugging Face model, or the adapters of a PEFT model, to ``folder``; called on all ranks."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    is_peft = hasattr(model, "peft_config")
    weights = _gather(_of_adapters(model, tensors) if is_peft else tensors, keep=is_main)
    if not is_main:
        return

    if is_peft:
        # peft would rewrite a README.md that a person wrote.
        vars(model)["create_or_update_model_card"] = lambda _: None
        model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        # The config may hold more than that of the base model: the PAD id, a reward model's mean and std.
        config = copy.deepcopy(model.config)
        # Quantization of the frozen weights is for training only.
        vars(config).pop("quantization_config", None)
        config.to_json_file(folder / _CONFIG_BESIDE_ADAPTERS)
    else:
        model.save_pretrained(folder, state_dict=weights)

    restore_overridden(folder / (_CONFIG_BESIDE_ADAPTERS if is_peft else "config.json"))
    set_usual_mode(folder.glob("adapter_model.safetensors" if is_peft else "model*.safetensors"))


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer, and the image processor of its model if there is one, to ``folder``.

    The tokenizer's own writer raises no ``OSError`` on a full disk, so it writes to a temporary folder, which is then
    copied.
    """
    copy_processor(tokenizer.name_or_path, folder)
    with tempfile.TemporaryDirectory() as written:
        tokenizer.save_pretrained(written)
        for file in Path(written).rglob("*"):
            if not file.is_file():
                continue
            # Copy contents only, so that files and folders do not take the modes of the temporary ones.
            target = folder / file.relative_to(written)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _gather(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Return copies on the CPU of the whole tensors; empty without ``keep``.

    Tied tensors share one copy, so that transformers writes them once.
    """
    copies: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        with GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            assert tensor.numel() > 0, f"{name} has no elements: it would be saved empty"
            if keep and id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to("cpu", copy=True)

    if not keep:
        return {}
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _of_adapters(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a PEFT folder: adapters, and heads that are trained whole."""
    from peft import get_peft_model_state_dict  # a PEFT model exists, so peft is imported already

    wanted = get_peft_model_state_dict(model, state_dict=tensors, save_embedding_layers=False)
    ids = {id(tensor) for tensor in wanted.values()}
    return {name: tensor for name, tensor in tensors.items() if id(tensor) in ids}
