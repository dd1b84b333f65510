"""Launched by torchrun: ``run_callbacks.py OUT ARGUMENTS`` trains three times with callbacks and writes what they saw.

``OUT/early.json`` is of a run that ``EarlyStopping`` ends, ``OUT/one_rank.json`` of one that a single rank ends,
``OUT/again.json`` of the first one resumed from its last checkpoint, as after a kill while its model was saved.
"""

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.strategy import DeepspeedStrategy
from openppo.trainer import PPOTrainer, build_ppo_trainer
from openppo.trainer.callbacks import Callback, EarlyStopping


class Recorder(Callback):
    """Notes every call, and the numbers that came with it; ``stop_after`` ends the run from rank 1 alone."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.calls: list[list[Any]] = []
        self.stop_after = stop_after

    def on_fit_start(self, trainer: PPOTrainer) -> None:
        self.calls.append(["on_fit_start"])

    def on_step_end(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        self.calls.append(["on_step_end", trainer.global_step, metrics["reward"]])
        if trainer.global_step == self.stop_after and trainer.comm.rank == 1:
            trainer.should_stop = True

    def on_evaluate(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        self.calls.append(["on_evaluate", trainer.global_step, metrics["eval_reward"]])

    def on_save(self, trainer: PPOTrainer, folder: Path) -> None:
        self.calls.append(["on_save", str(folder), (folder / "config.json").is_file()])

    def on_fit_end(self, trainer: PPOTrainer) -> None:
        self.calls.append(["on_fit_end"])


def main() -> None:
    """All runs."""
    out = Path(sys.argv[1])
    runs = {
        "early": ([Recorder(), EarlyStopping("eval_reward", patience=2)], ["--save_path", f"{out}/early"]),
        "one_rank": ([Recorder(stop_after=1)], ["--save_path", f"{out}/one_rank"]),
        "again": (
            [Recorder(), EarlyStopping("eval_reward", patience=2)],
            ["--save_path", f"{out}/early", "--load_checkpoint"],
        ),
    }
    for name, (callbacks, more) in runs.items():
        config = parse_options(TrainPPOConfig, [*sys.argv[2:], *more])
        trainer = build_ppo_trainer(config, DeepspeedStrategy(config.deepspeed, timedelta(seconds=100)), callbacks)
        trainer.fit()
        of_ranks = trainer.comm.all_gather_object(callbacks[0].calls)  # type: ignore[attr-defined]
        if trainer.comm.rank == 0:
            (out / f"{name}.json").write_text(json.dumps(of_ranks))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that frees a tensor while Python shuts down may abort the process


if __name__ == "__main__":
    main()
