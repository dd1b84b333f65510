"""Checkpoints of a whole run: models, averages, random numbers, and the state of the trainer."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from openppo import logger
from openppo.config import TrainPPOConfig, flat_dict
from openppo.config.commands import SupervisedCommand
from openppo.config.run import refuse_own_checkpoints
from openppo.models.size import n_elements
from openppo.rollout.failures import NothingTrainedError
from openppo.strategy.checkpoint.folder import MODEL, CheckpointFolder
from openppo.strategy.checkpoint.model_state import (
    FragmentReader,
    load_model_state,
    model_fragments,
    model_numbers,
    write_fragments,
)
from openppo.strategy.checkpoint.random_state import RandomState, get_random_state, set_random_state
from openppo.strategy.comm import collective
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import set_aside_model
from openppo.tracking.phase import phase
from openppo.trainer.resume.compatible import (
    check_compatible,
    measured_otherwise,
    model_fingerprint,
)
from openppo.weight_files import save_tensors

WriteModel = Callable[[Path], None]
_STATE, _RANDOM = "state.json", "random.safetensors"
_SLACK_BYTES = 16 * 2**20  # for what is small: random numbers, the trainer's state


def stopped(signal: str, step: int, total: int, checkpoint: Path) -> str:
    """Message after ``signal``: the checkpoint, and commands for it."""
    return (
        f"stopped by {signal} after {step} of {total} steps. The same command with --load_checkpoint continues from "
        f"{checkpoint}; 'openppo export {shlex.quote(str(checkpoint))} FOLDER' makes a model of it"
    )


def ended_by_failures(failure: NothingTrainedError, checkpoint: Path) -> NothingTrainedError:
    """The same ``failure`` with what to do about it."""
    remedy = f"Mend the cause; --load_checkpoint resumes from {checkpoint}."
    return NothingTrainedError(f"{str(failure).rstrip('.')}. {remedy}", failure.failed)


@contextmanager
def ensure_checkpoint_on_save_error(
    checkpointer: Checkpointer, step: int, save_checkpoint: Callable[[], Path]
) -> Iterator[None]:
    """If the block fails to save the model (on all ranks), name a checkpoint of ``step``, written now if need be."""
    try:
        yield
    except OSError as error:
        last = checkpointer.last
        kept = last[1] if last is not None and last[0] == step else save_checkpoint()
        raise OSError(
            f"{error}. All that was trained is in {kept}: make room, or choose another --save_path beside "
            f"--ckpt_path {kept.parent}, and the same command with --load_checkpoint writes the model."
        ) from error


class Checkpointer:
    """Saves and loads a run of the command ``kind``. All ranks call every method together.

    ``found`` is the newest checkpoint with ``--load_checkpoint``; ``ValueError`` if options, models or ``data``,
    fingerprints by flag, contradict it. Edits of ``user_files`` are logged.
    """

    def __init__(
        self,
        config: TrainPPOConfig | SupervisedCommand,
        strategy: DeepspeedStrategy,
        kind: str,
        data: dict[str, str],
        user_files: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = config.checkpoint
        self.strategy = strategy
        self.comm = strategy.comm
        self.save_path, given = Path(config.run.save_path).resolve(), self.options.ckpt_path
        folder = (
            Path(given).resolve() if given else (self.save_path / f"checkpoints_{kind}").resolve()
        )
        flag = "--ckpt_path" if given else "--save_path"
        collective(self.comm, lambda: refuse_own_checkpoints(config.input_models, flag, folder))
        self.folder = CheckpointFolder(folder, self.comm, self.options.max_ckpt_num, flag=flag)
        contents = {
            flag: model_fingerprint(name)
            for flag, name in config.input_models.items()
            if name is not None
        }
        options = flat_dict(config)
        # Not auto: both change rounding.
        options |= {"compile": "on" if strategy.compiles else "off"}
        options |= {"fused_kernels": "auto" if strategy.fuses else "off"}
        self.identity: dict[str, Any] = {
            "kind": kind,
            "options": options,
            "contents": contents | data,
        }
        self.identity["user_files"] = user_files or {}
        self.models: dict[str, TrainableModel] = {}
        self.ema: ParameterAverage | None = None
        self.best: float | None = None
        self.found: Path | None = None
        self.found_step: int | None = None  # that the run resumes from
        self.last: tuple[int, Path] | None = (
            None  # step and folder that this session has saved or resumed from
        )
        self.saves_critic = isinstance(config, TrainPPOConfig) and config.model.save_value_network
        self.state: dict[str, Any] = {}
        if not self.options.load_checkpoint:
            return
        self.found = found = self.folder.newest()
        if found is None and self.evaluates_only:
            raise ValueError(
                f"--val_only: no checkpoint in {self.folder.folder}: leave out --load_checkpoint."
            )
        if found is None:
            logger.info(
                "--load_checkpoint: no checkpoint in %s, starting from the beginning",
                self.folder.folder,
            )
        else:
            self.state = json.loads((found / _STATE).read_text(encoding="utf-8"))
            self.found_step = int(self.state["step"])
            collective(self.comm, lambda: check_compatible(found, self.state, self.identity))

    def attach(
        self, models: Mapping[str, TrainableModel | None], ema: ParameterAverage | None = None
    ) -> None:
        """Name what to save and load; ``ValueError`` if the disk has no room for a checkpoint."""
        self.models, self.ema = (
            {role: model for role, model in models.items() if model is not None},
            ema,
        )
        of_models = [
            model.module.parameters() for model in self.models.values()
        ]  # of the actor first
        trained = [
            sum(n_elements(p) for p in parameters if p.requires_grad) for parameters in of_models
        ]
        needed = 12 * sum(trained) + 4 * trained[0] * (ema is not None)
        flag, folder = self.folder.flag, self.folder.folder

        def check() -> None:
            place = next(parent for parent in (folder, *folder.parents) if parent.exists())
            if (free := shutil.disk_usage(place).free) < needed + _SLACK_BYTES:
                sizes = f"a checkpoint takes {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free there"
                raise ValueError(f"{flag} {folder}: {sizes}: make room, or give another {flag}.")

        collective(self.comm, check)

    def begin(self, load: Callable[[], None]) -> None:
        """``load`` what is found, else move what an earlier run has saved: once the start can no longer fail."""
        if self.found is not None:
            load()
        if self.found is not None or self.evaluates_only:
            return
        self.folder.set_aside()
        beside = (
            [self.save_path.with_name(self.save_path.name + "_critic")] if self.saves_critic else []
        )

        def set_aside() -> None:
            for folder in (self.save_path, *beside) if self.strategy.is_main else ():
                set_aside_model(folder)

        failure = "--save_path: an earlier run's model cannot be set aside ({})."
        collective(
            self.comm,
            set_aside,
            OSError,
            raised=lambda message: ValueError(failure.format(message)),
        )

    @property
    def evaluates_only(self) -> bool:
        """Whether nothing is written, so that what an earlier run has saved stays where it is."""
        return bool(self.identity["options"].get("val_only"))

    def due(self, step: int, pass_ended: bool) -> bool:
        """Whether ``--save_steps`` asks for a checkpoint after ``step``."""
        every = self.options.save_steps
        return pass_ended if every == -1 else every > 0 and step % every == 0

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        write_model: WriteModel,
        random_state: RandomState | None = None,
    ) -> Path:
        """Write a checkpoint of ``step``; ``CheckpointError`` on all ranks if one of them cannot.

        ``state`` is JSON, the same on all ranks; ``write_model`` writes the model of ``--save_hf_ckpt``;
        ``random_state`` replaces the current one.
        """
        numbers = {role: model_numbers(model) for role, model in self.models.items()}
        everyones = self.comm.all_gather_object(random_state or get_random_state())
        whole = {
            **self.identity,
            "step": step,
            "models": numbers,
            "best": self.best,
            "trainer": state,
        }

        def write(folder: Path) -> None:
            if self.options.save_hf_ckpt:
                write_model(folder / MODEL)
            for role, model in self.models.items():
                if (
                    self.strategy.is_main or model.deepspeed.zero_optimization_stage() > 0
                ):  # else all have the same
                    write_fragments(
                        folder / f"{role}-{self.comm.rank:05d}.safetensors", model_fragments(model)
                    )
            if self.ema is not None:
                write_fragments(
                    folder / f"ema-{self.comm.rank:05d}.safetensors", self.ema.fragments()
                )
            if self.strategy.is_main:
                randoms = {
                    f"{rank}/{name}": t
                    for rank, each in enumerate(everyones)
                    for name, t in each.items()
                }
                save_tensors(randoms, folder / _RANDOM)
                (folder / _STATE).write_text(json.dumps(whole, default=_as_text), encoding="utf-8")

        path = self.folder.save(step, write)
        self.last = step, path
        logger.info("saved a checkpoint of step %d to %s", step, path)
        return path

    def load(self) -> dict[str, Any]:
        """Restore ``found`` and return the trainer's state; ``ValueError`` if it does not fit this run's models."""
        assert self.found is not None, "nothing was found"
        for role, model in self.models.items():
            with FragmentReader(self.found.glob(f"{role}-*.safetensors")) as reader:
                load_model_state(model, reader, self.state["models"][role])
        if self.ema is not None:
            with FragmentReader(self.found.glob("ema-*.safetensors")) as reader:
                for name, fragment in self.ema.fragments().items():
                    reader.read_into(name, fragment)
        changed = measured_otherwise(self.state, self.identity)
        self.best = None if changed else self.state["best"]
        if changed and self.options.keep_best is not None:
            logger.warning("the best model is looked for anew: --%s changed", ", --".join(changed))
        prefix = f"{self.comm.rank}/"
        randoms = load_file(self.found / _RANDOM).items()
        if mine := {
            name.removeprefix(prefix): each for name, each in randoms if name.startswith(prefix)
        }:
            set_random_state(mine)
        else:  # a rank that was not there: a stream of its own, not the one that it would have begun with
            seed = self.strategy.config.seed + 1 + self.comm.rank + 1_000_003 * self.state["step"]
            self.strategy.seed_everything(seed)
        self.last = int(self.state["step"]), self.found
        logger.info("resuming from %s", self.found)
        return dict(self.state["trainer"])

    def save_if_best(
        self, step: int, metrics: Mapping[str, float], write_model: WriteModel
    ) -> None:
        """Keep the model as the best one if ``metrics`` of an evaluation say so."""
        name = self.options.keep_best
        if name is None:
            return
        if name not in metrics:
            logger.warning(
                "--keep_best %s: the evaluation has no such metric but %s", name, ", ".join(metrics)
            )
            return
        sign, value = -1 if name.endswith("loss") else 1, metrics[name]
        if math.isnan(value) or (self.best is not None and sign * value <= sign * self.best):
            return
        with phase("saving"):
            self.folder.save_best(step, write_model)
        self.best = (
            value  # now: a signal while it was written must not leave the score without its model
        )
        logger.info(
            "the best model so far, %s %.4g at step %d, is kept in %s",
            name,
            value,
            step,
            self.folder.folder,
        )


def _as_text(value: object) -> str:
    """In place of what is no JSON, in a callback's state say: a save upon a signal must not fail for it."""
    logger.warning("the checkpoint has %r as text: the state of a callback must be JSON", value)
    return str(value)
