"""Launched by torchrun: ``run_resume.py CASES.json OUT MODE`` runs each case with a fresh trainer, in ``OUT/<name>``.

A case: ``name``, ``command``, ``arguments``, and ``stop_at``, the number of the check at which mode ``first`` stops the
run as a signal would (0: at none). Mode ``whole`` never stops; mode ``rest`` goes on from the checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from run_steps import HANG_AFTER, PARTITION_EVERYTHING, SUPERVISED, leave

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.strategy import DeepspeedStrategy
from openppo.trainer.build import build_ppo_trainer
from openppo.trainer.resume.stop import SignalStop
from openppo.types import Interrupted


class StopAt(SignalStop):
    """Stops all ranks at the check number ``at``."""

    at = 0
    n_checks = 0

    def __call__(self) -> None:
        StopAt.n_checks += 1
        if StopAt.n_checks == StopAt.at:
            raise Interrupted("the test")


def run(case: dict[str, Any], folder: Path, mode: str) -> None:
    """One case; its number of checks goes to ``checks``."""
    arguments = [*case["arguments"], "--save_path", str(folder / "model")]
    if mode == "rest":
        arguments.append("--load_checkpoint")
    ppo = case["command"] == "train_ppo"
    config_type, build = (TrainPPOConfig, build_ppo_trainer) if ppo else SUPERVISED[case["command"]]
    config = parse_options(config_type, arguments)
    strategy = DeepspeedStrategy(config.deepspeed, HANG_AFTER, PARTITION_EVERYTHING)
    StopAt.at, StopAt.n_checks = case["stop_at"] if mode == "first" else 0, 0
    with (
        mock.patch("openppo.trainer.build.SignalStop", StopAt),
        mock.patch("openppo.trainer.supervised.build.SignalStop", StopAt),
    ):
        build(config, strategy).fit()
    (folder / "checks").write_text(str(StopAt.n_checks))


def main() -> None:
    """All cases of the file."""
    cases, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    for case in json.loads(cases.read_text()):
        print(f"case {case['name']}", flush=True)  # shown if it fails
        torch.manual_seed(hash(mode) % 1000)  # a session begins with random numbers of its own
        run(case, out / case["name"], mode)
    leave()


if __name__ == "__main__":
    main()
