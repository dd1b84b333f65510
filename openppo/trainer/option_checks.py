"""Checks of a command's options, alike on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from openppo import __version__
from openppo.config import flat_dict
from openppo.config.fields import declared_options, rules_of
from openppo.models.lengths import decide_alike, lengths_are_exact
from openppo.strategy.comm import collective, name_ranks
from openppo.tracking import (
    check_run_folder,
    check_trackers,
)
from openppo.trainer.callbacks import check_metric
from openppo.types import Comm

if TYPE_CHECKING:  # commands that do not train need no DeepSpeed
    pass


def check_options(config: Any, comm: Comm, **given: bool | None) -> None:
    """``config.validate()`` with ``given``, and ``ValueError`` if ranks have different options or versions.

    Ranks with another seed or batch size would train different models or deadlock.
    """
    mine = {
        "openppo": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    mine["CUDA"] = "available" if torch.cuda.is_available() else "not available"
    places = {
        name
        for name, declared in declared_options(type(config)).items()
        if rules_of(declared).place
    }
    for name, value in flat_dict(config).items():
        mine[f"--{name}"] = (
            ("not given" if value is None else "given") if name in places else str(value)
        )
    everyones, differences = comm.all_gather_object(mine), []
    for name, value in everyones[0].items():
        if others := [rank for rank, theirs in enumerate(everyones) if theirs[name] != value]:
            theirs = f"{everyones[others[0]][name]} on {name_ranks(comm, others)}"
            differences.append(f"{name} is {value} on rank 0 and {theirs}")
    if differences:
        raise ValueError(f"{'; '.join(differences)}: start all ranks alike.")
    if config.deepspeed.bf16:
        decide_alike(comm.all_gather_object(lengths_are_exact()))

    def check() -> None:
        config.validate(comm.world_size, **given)  # folders may differ, of which it sees some
        for condition in config.run.stop_conditions:
            check_metric(condition.metric, f"--stop_when {condition.text!r}")
        if comm.rank == 0:
            check_run_folder(Path(config.run.save_path), config.output_models)
            check_trackers(config.tracking)

    collective(comm, check)
