"""Checks of a command's options, alike on all ranks."""

from pathlib import Path
from typing import Any

import torch
import transformers

from openppo import __version__
from openppo.config import flat_dict
from openppo.config.fields import declared_options, rules_of
from openppo.models.lengths import decide_alike, lengths_are_exact
from openppo.strategy.comm import collective, name_ranks
from openppo.tracking import check_run_folder, check_trackers
from openppo.trainer.callbacks import check_metric
from openppo.types import Comm


def check_options(config: Any, comm: Comm, **run_facts: bool | None) -> None:
    """Validate ``config`` on all ranks, which must have the same options and versions.

    ``run_facts`` are passed to ``config.validate()``. Raises ``ValueError``: ranks with different seeds or batch sizes
    would train different models or deadlock.
    """
    _check_alike(config, comm)
    if config.deepspeed.bf16:
        decide_alike(comm.all_gather_object(lengths_are_exact()))

    def check() -> None:
        # On each rank: folders may differ, and validation looks into some.
        config.validate(comm.world_size, **run_facts)
        for condition in config.run.stop_conditions:
            check_metric(condition.metric, f"--stop_when {condition.text!r}")
        if comm.rank == 0:
            check_run_folder(Path(config.run.save_path), config.output_models)
            check_trackers(config.tracking)

    collective(comm, check)


def _check_alike(config: Any, comm: Comm) -> None:
    """Raise ``ValueError`` if ranks have different options or versions."""
    settings_by_rank = comm.all_gather_object(_settings(config))
    differences = []
    for name, value in settings_by_rank[0].items():
        others = [rank for rank, settings in enumerate(settings_by_rank) if settings[name] != value]
        if others:
            other_value = settings_by_rank[others[0]][name]
            differences.append(
                f"{name} is {value} on rank 0 and {other_value} on {name_ranks(comm, others)}"
            )
    if differences:
        raise ValueError(f"{'; '.join(differences)}: start all ranks alike.")


def _settings(config: Any) -> dict[str, str]:
    """Versions and options of this rank as texts; places are only "given" or "not given"."""
    settings = {
        "openppo": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "CUDA": "available" if torch.cuda.is_available() else "not available",
    }
    declared = declared_options(type(config))
    places = {name for name, option in declared.items() if rules_of(option).place}
    for name, value in flat_dict(config).items():
        text = str(value)
        if name in places:
            text = "not given" if value is None else "given"
        settings[f"--{name}"] = text
    return settings
