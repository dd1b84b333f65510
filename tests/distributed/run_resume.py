"""Launched by torchrun: ``run_resume.py CASES.json OUT MODE`` runs each case with a fresh trainer, in ``OUT/<name>``.

A case: ``name``, ``command``, ``arguments``, and ``stop_at``, the number of the check at which mode ``first`` stops the
run as a signal would (0: at none). Mode ``whole`` never stops; mode ``rest`` resumes from the checkpoint, with
``own_loop`` in a loop of one's own. ``poison`` makes optimizer steps not finite: ``role``, ``calls`` (from 1),
``rank``, and ``how``.
"""

import gc
import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from run_steps import HANG_AFTER, PARTITION_EVERYTHING, SUPERVISED, leave

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.signals import SignalStop
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.build import build_ppo_trainer
from openppo.trainer.critic_step import CriticStep, OnePassCritic
from openppo.trainer.supervised.trainers import SFTTrainer
from openppo.types import Interrupted

STEPS = {
    "actor": (ActorStep, "train"),
    "critic": (CriticStep, "train"),
    "one-pass critic": (OnePassCritic, "_with_values"),
}


POISON = {"nan": math.nan, "infinite loss": math.inf, "infinite gradient": 3e38}


def poisoned(step_class: type, method: str, poison: dict[str, Any]) -> Any:
    """A patch of ``method`` that spoils one call on one rank, or for ``how`` "left out" trains nothing on any."""
    n_calls, original = 0, getattr(step_class, method)

    def train(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        model = (self.critic_step if method == "_with_values" else self).model
        if n_calls not in poison["calls"]:
            return original(self, *arguments, **named)
        if poison["how"] == "left out":
            engine = mock.patch.multiple(model, backward=mock.Mock(), step=mock.Mock(return_value=math.inf))
            with engine:
                return original(self, *arguments, **named)
        backward = model.backward
        factor = POISON[poison["how"]] if self.comm.rank == poison["rank"] else 1.0
        with mock.patch.object(model, "backward", lambda loss, last: backward(loss * factor, last)):
            return original(self, *arguments, **named)

    return mock.patch.object(step_class, method, train)


def poisoned_loss(poison: dict[str, Any]) -> Any:
    """A patch of the loss of train_sft that spoils some of a rank's micro-batches, counted from 1."""
    n_calls, original = 0, SFTTrainer.loss

    def loss(self: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal n_calls
        n_calls += 1
        spoiled = n_calls in poison["calls"] and self.comm.rank == poison["rank"]
        return original(self, *arguments, **named) * (POISON[poison["how"]] if spoiled else 1.0)

    return mock.patch.object(SFTTrainer, "loss", loss)


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
    spoiled: Any = nullcontext()
    if poison := case.get("poison"):
        spoiled = poisoned(*STEPS[poison["role"]], poison) if ppo else poisoned_loss(poison)
    with (
        mock.patch("openppo.trainer.build.SignalStop", StopAt),
        mock.patch("openppo.trainer.supervised.build.SignalStop", StopAt),
        spoiled,
    ):
        trainer = build(config, strategy)
        if mode == "rest" and case.get("own_loop"):
            with trainer.components.trackers:
                for prompts in trainer.prompt_batches():
                    trainer.report(trainer.step(prompts))
                trainer.save()
        else:
            trainer.fit()
    (folder / "checks").write_text(str(StopAt.n_checks))


def main() -> None:
    """All cases of the file."""
    gc.freeze()  # DeepSpeed collects garbage for each ZeRO-3 engine: a second in all that was imported
    cases, out, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    for case in json.loads(cases.read_text()):
        print(f"case {case['name']}", flush=True)  # shown if it fails
        torch.manual_seed(hash(mode) % 1000)  # a session begins with random numbers of its own
        run(case, out / case["name"], mode)
    leave()


if __name__ == "__main__":
    main()
