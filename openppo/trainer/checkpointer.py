"""Checkpoints of a whole run: models, averages, random numbers, and the state of the trainer."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from openppo import logger
from openppo.config import TrainPPOConfig, flat_dict
from openppo.config.run import refuse_own_checkpoints
from openppo.config.train_supervised import SupervisedCommand
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
_STATE = "state.json"
_RANDOM = "random.safetensors"
_SLACK_BYTES = 16 * 2**20
"""Room for the small parts of a checkpoint: random state, the trainer's state."""


def stopped(signal: str, step: int, total: int, checkpoint: Path) -> str:
    """Return the message after ``signal``: the checkpoint, and commands for it."""
    return (
        f"stopped by {signal} after {step} of {total} steps. The same command with --load_checkpoint continues from "
        f"{checkpoint}; 'openppo export {shlex.quote(str(checkpoint))} FOLDER' makes a model of it"
    )


def ended_by_failures(failure: NothingTrainedError, checkpoint: Path) -> NothingTrainedError:
    """Return ``failure`` with a remedy in its message."""
    remedy = f"Mend the cause; --load_checkpoint resumes from {checkpoint}."
    return NothingTrainedError(f"{str(failure).rstrip('.')}. {remedy}", failure.failed)


@contextmanager
def ensure_checkpoint_on_save_error(
    checkpointer: Checkpointer, step: int, save_checkpoint: Callable[[], Path]
) -> Iterator[None]:
    """Name a checkpoint of ``step``, or write one, where the block fails to save the model.

    The block must fail on all ranks.
    """
    try:
        yield
    except OSError as error:
        last_step, last_path = checkpointer.last or (None, None)
        kept = last_path if last_path is not None and last_step == step else save_checkpoint()
        raise OSError(
            f"{error}. All that was trained is in {kept}: make room, or choose another --save_path beside "
            f"--ckpt_path {kept.parent}, and the same command with --load_checkpoint writes the model."
        ) from error


class Checkpointer:
    """Saves and loads a run of the command ``kind``. All ranks call every method together.

    ``found`` is the newest checkpoint with ``--load_checkpoint``; ``ValueError`` if options, models or ``data``,
    fingerprints by flag, contradict it. Edits of ``user_files`` are logged, ``facts`` are for cards.
    """

    def __init__(
        self,
        config: TrainPPOConfig | SupervisedCommand,
        strategy: DeepspeedStrategy,
        kind: str,
        data: dict[str, str],
        user_files: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
        resolved: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.options = config.checkpoint
        self.strategy = strategy
        self.comm = strategy.comm
        self.save_path = Path(config.run.save_path).resolve()
        self.saves_critic = isinstance(config, TrainPPOConfig) and config.model.save_value_network
        self.folder = self._open_folder(config, kind)
        self.identity: dict[str, Any] = {
            "kind": kind,
            "options": _options(config, strategy) | dict(resolved),
            "contents": _model_fingerprints(config) | data,
            "user_files": user_files or {},
            "facts": facts,
        }
        self.models: dict[str, TrainableModel] = {}
        self.ema: ParameterAverage | None = None
        self.best: float | None = None
        self.found: Path | None = None
        self.found_step: int | None = None
        """Step that the run resumes from."""
        self.last: tuple[int, Path] | None = None
        """Step and folder that this session has saved or resumed from."""
        self.state: dict[str, Any] = {}
        if self.options.load_checkpoint:
            self._find()

    def _open_folder(
        self, config: TrainPPOConfig | SupervisedCommand, kind: str
    ) -> CheckpointFolder:
        """Open the folder of checkpoints; ``ValueError`` if the run starts from one of them."""
        flag = "--ckpt_path" if self.options.ckpt_path else "--save_path"
        path = Path(self.options.ckpt_path or self.save_path / f"checkpoints_{kind}").resolve()
        collective(self.comm, lambda: refuse_own_checkpoints(config.input_models, flag, path))
        return CheckpointFolder(path, self.comm, self.options.max_ckpt_num, flag=flag)

    def _find(self) -> None:
        """Find the newest checkpoint, and check that this run matches it."""
        newest = self.folder.newest()
        if newest is None and self.evaluates_only:
            raise ValueError(
                f"--val_only: no checkpoint in {self.folder.folder}: leave out --load_checkpoint."
            )
        if newest is None:
            logger.info(
                "--load_checkpoint: no checkpoint in %s, starting from the beginning",
                self.folder.folder,
            )
            return

        self.found = newest
        self.state = json.loads((newest / _STATE).read_text(encoding="utf-8"))
        self.found_step = int(self.state["step"])
        collective(self.comm, lambda: check_compatible(newest, self.state, self.identity))

    def attach(
        self, models: Mapping[str, TrainableModel | None], ema: ParameterAverage | None = None
    ) -> None:
        """Attach the models to save and load, the actor first; ``ValueError`` if the disk is too full."""
        self.models = {role: model for role, model in models.items() if model is not None}
        self.ema = ema
        needed = self._needed_bytes()
        flag = self.folder.flag
        folder = self.folder.folder

        def check() -> None:
            existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
            free = shutil.disk_usage(existing).free
            if free < needed + _SLACK_BYTES:
                sizes = f"a checkpoint takes {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free there"
                raise ValueError(f"{flag} {folder}: {sizes}: make room, or give another {flag}.")

        collective(self.comm, check)

    def _needed_bytes(self) -> int:
        """Bytes of weights and moments in float32, and of the average."""
        trained = []
        for model in self.models.values():
            parameters = [p for p in model.module.parameters() if p.requires_grad]
            trained.append(sum(n_elements(parameter) for parameter in parameters))
        needed = 12 * sum(trained)
        if self.ema is not None:
            needed += 4 * trained[0]
        return needed

    def begin(self, load: Callable[[], None]) -> None:
        """``load`` the checkpoint, or set aside an earlier run's models.

        Call it when the start can no longer fail.
        """
        if self.found is not None:
            load()
            return
        if self.evaluates_only:
            return

        self.folder.set_aside()
        folders = [self.save_path]
        if self.saves_critic:
            folders.append(self.save_path.with_name(self.save_path.name + "_critic"))

        def set_aside() -> None:
            if self.strategy.is_main:
                for folder in folders:
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
        """True with ``--val_only``: nothing is written, and an earlier run's model stays in place."""
        return bool(self.identity["options"].get("val_only"))

    def due(self, step: int, pass_ended: bool) -> bool:
        """True if ``--save_steps`` asks for a checkpoint after ``step``."""
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
        random_states = self.comm.all_gather_object(random_state or get_random_state())
        contents = {
            **self.identity,
            "step": step,
            "models": {role: model_numbers(model) for role, model in self.models.items()},
            "best": self.best,
            "trainer": state,
        }

        def write(folder: Path) -> None:
            if self.options.save_hf_ckpt:
                write_model(folder / MODEL)
            self._write_fragments(folder)
            if self.strategy.is_main:
                save_tensors(_by_rank(random_states), folder / _RANDOM)
                text = json.dumps(contents, default=_as_text)
                (folder / _STATE).write_text(text, encoding="utf-8")

        path = self.folder.save(step, write)
        self.last = step, path
        logger.info("saved a checkpoint of step %d to %s", step, path)
        return path

    def _write_fragments(self, folder: Path) -> None:
        """Write this rank's part of the models and of the average."""
        suffix = f"-{self.comm.rank:05d}.safetensors"
        for role, model in self.models.items():
            # under ZeRO-0 all ranks have the same
            if self.strategy.is_main or model.deepspeed.zero_optimization_stage() > 0:
                write_fragments(folder / (role + suffix), model_fragments(model))
        if self.ema is not None:
            write_fragments(folder / ("ema" + suffix), self.ema.fragments())

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

        self._restore_random_state(self.found / _RANDOM)
        self.last = int(self.state["step"]), self.found
        logger.info("resuming from %s", self.found)
        return dict(self.state["trainer"])

    def _restore_random_state(self, file: Path) -> None:
        """Restore this rank's random state; a rank without one gets a new stream.

        It differs from the stream that the rank has started with.
        """
        prefix = f"{self.comm.rank}/"
        random_state = {
            name.removeprefix(prefix): tensor
            for name, tensor in load_file(file).items()
            if name.startswith(prefix)
        }
        if random_state:
            set_random_state(random_state)
        else:
            seed = self.strategy.config.seed + 1 + self.comm.rank + 1_000_003 * self.state["step"]
            self.strategy.seed_everything(seed)

    def save_if_best(
        self, step: int, metrics: Mapping[str, float], write_model: WriteModel
    ) -> None:
        """Keep the model if its ``metrics`` of an evaluation are the best so far."""
        name = self.options.keep_best
        if name is None:
            return
        if name not in metrics:
            logger.warning(
                "--keep_best %s: the evaluation has no such metric but %s", name, ", ".join(metrics)
            )
            return

        sign = -1 if name.endswith(("loss", "kl")) else 1
        value = metrics[name]
        if math.isnan(value) or (self.best is not None and sign * value <= sign * self.best):
            return
        with phase("saving"):
            self.folder.save_best(step, write_model)
        # only now: a signal during the save must not leave a score without its model
        self.best = value
        logger.info(
            "the best model so far, %s %.4g at step %d, is kept in %s",
            name,
            value,
            step,
            self.folder.folder,
        )


def _options(
    config: TrainPPOConfig | SupervisedCommand, strategy: DeepspeedStrategy
) -> dict[str, Any]:
    """Options as a checkpoint keeps them; "auto" is resolved where it changes rounding."""
    options = flat_dict(config)
    options["compile"] = "on" if strategy.compiles else "off"
    options["fused_kernels"] = "auto" if strategy.fuses else "off"
    return options


def _model_fingerprints(config: TrainPPOConfig | SupervisedCommand) -> dict[str, str]:
    """Fingerprints of the models that the run starts from, by flag."""
    return {
        flag: model_fingerprint(name)
        for flag, name in config.input_models.items()
        if name is not None
    }


def _by_rank(random_states: Sequence[RandomState]) -> dict[str, Tensor]:
    """All ranks' random states, each tensor named ``rank/name``."""
    tensors = {}
    for rank, random_state in enumerate(random_states):
        for name, tensor in random_state.items():
            tensors[f"{rank}/{name}"] = tensor
    return tensors


def _as_text(value: object) -> str:
    """Return text for a value that is no JSON: a save upon a signal must not fail."""
    logger.warning("the checkpoint has %r as text: the state of a callback must be JSON", value)
    return str(value)
