"""Check of ``--lora_path`` before weights are read."""

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from openppo import logger
from openppo.config import LoRAConfig
from openppo.models.pretrained import adapter_config
from openppo.models.saved_adapters import (
    HEAD_TASK,
    TaskType,
    adapter_parameters,
    check_shapes,
    saved_config,
    saved_shapes,
)
from openppo.models.size import without_weights
from openppo.strategy.comm import collective
from openppo.types import Comm


def check_adapters(
    options: LoRAConfig,
    comm: Comm,
    task: TaskType,
    *,
    pretrain: str,
    config: PreTrainedConfig,
    trust_remote_code: bool,
) -> None:
    """Check that the adapters of ``--lora_path``, if there are any, are of ``task`` and fit ``config``. Collective.

    ``config`` is that of ``pretrain``. Logs another base model than the one the adapters were trained on.
    """
    folder = options.lora_path
    if folder is None:
        return

    def check() -> None:
        from peft import get_peft_model  # a heavy import, for LoRA only

        start = f"--lora_path {folder} does not fit --pretrain {pretrain}"
        adapters = saved_config(folder, task)
        model = without_weights(config, task == HEAD_TASK, trust_remote_code)
        with torch.device("meta"):
            try:
                adapted = get_peft_model(model, adapters, autocast_adapter_dtype=False)
            except ValueError as error:
                raise ValueError(f"{start}: {error}") from error
        parameters = adapter_parameters(adapted).items()
        check_shapes({name: tuple(p.shape) for name, p in parameters}, saved_shapes(folder), start)

    collective(comm, check)
    base = adapter_config(folder).get("base_model_name_or_path")
    if base and Path(base).resolve() != Path(pretrain).resolve():
        logger.warning(
            "--lora_path %s was trained on %s, and is put on --pretrain %s", folder, base, pretrain
        )
