"""Export of a checkpoint as a Hugging Face folder."""

import dataclasses
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedTokenizerBase

from openppo.config import (
    CheckpointModelConfig,
    MergeConfig,
    TrainPPOConfig,
    TrainPRMConfig,
    TrainRMConfig,
    TrainSFTConfig,
    from_options,
)
from openppo.config.commands import SupervisedCommand
from openppo.config.models import refuse_overwriting
from openppo.experience.estimators import ESTIMATORS
from openppo.models.merge_lora import LoRAMerge, to_bf16
from openppo.models.pretrained import check_model, load_tokenizer
from openppo.strategy.checkpoint.folder import MANIFEST, UnreadableError, damage_of
from openppo.strategy.checkpoint.model_state import Fragment, FragmentReader
from openppo.strategy.saving import save_model, save_tokenizer
from openppo.tracking.run_folder import holds_model
from openppo.trainer.build import critic_start, load_actor, load_critic
from openppo.trainer.resume.compatible import model_fingerprint
from openppo.trainer.supervised.build import load_language_model, load_reward_model

logger = logging.getLogger("openppo")

_KINDS: dict[str, type] = {"ppo": TrainPPOConfig, "sft": TrainSFTConfig, "rm": TrainRMConfig, "prm": TrainPRMConfig}
_OF_FOLDER = re.compile("[0-9a-f]{64}")
"""A fingerprint of what lies in a local folder; that of a name on the hub names a commit."""
_STEP = re.compile(r"step_(\d+)")
_WEIGHT = "weight/"


class Export:
    """Export job: reads a checkpoint when made, writes in ``fit()``.

    With ``--enable_ema`` that is the average, as at the end of a run. ``ValueError`` names what cannot work.
    """

    def __init__(self, options: CheckpointModelConfig) -> None:
        self.options = options
        self.folder = Path(options.folder)
        self.checkpoint = find_checkpoint(Path(options.checkpoint))
        self.state: dict[str, Any] = json.loads((self.checkpoint / "state.json").read_text(encoding="utf-8"))
        self.saved = self._saved()
        self.run = self._run()
        self._check_starts()
        self.is_adapted = self._lora_rank() > 0
        if options.merge and not self.is_adapted:
            raise ValueError("--merge: the run trained all weights, which are written as they are; leave it out.")
        if self.checkpoint.parent in self.folder.resolve().parents:
            raise ValueError(f"FOLDER {self.folder} lies among the checkpoints, which runs remove: choose another.")
        if holds_model(self.folder):
            raise ValueError(f"FOLDER {self.folder} holds a model already: choose another.")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"FOLDER {self.folder}: cannot be written ({error}).") from error
        name, trust = self._pretrain(), options.trust_remote_code
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(name, "--pretrain", trust_remote_code=trust)
        self.module = self._module()
        self._fill()

    def fit(self) -> None:
        """Write model and tokenizer."""
        model: Any = self.module.model
        if self.options.merge:
            self._write_merged(model)
        else:
            if self.options.bf16:
                to_bf16(model)
            self._write(model, self.folder)
        logger.info("wrote the model of step %d of %s to %s", self.state["step"], self.checkpoint, self.folder)

    def close(self) -> None:
        """There is no process group to leave."""

    def _saved(self) -> Any:
        """The options of the run."""
        if self.state["kind"] not in _KINDS:
            raise ValueError(f"CHECKPOINT {self.checkpoint} is of train_{self.state['kind']}, unknown to this version.")
        try:
            run: Any = from_options(_KINDS[self.state["kind"]], **self.state["options"])
        except ValueError as error:
            raise ValueError(f"CHECKPOINT {self.checkpoint} is of another version of OpenPPO: {error}") from error
        if self.options.role == "critic" and not _has_critic(run):
            raise ValueError(f"--role critic: the run of {self.checkpoint} had none; leave it out.")
        return dataclasses.replace(run, lora=dataclasses.replace(run.lora, load_in_4bit=False))

    def _run(self) -> Any:
        """Options of the run with the models' present paths."""
        run, base, critic = self.saved, self.options.pretrain, self.options.critic_pretrain
        now: dict[str, Any] = {"trust_remote_code": self.options.trust_remote_code, "flash_attn": False}
        if isinstance(run, SupervisedCommand):
            supervised = dataclasses.replace(run.supervised, pretrain=base or run.supervised.pretrain, **now)
            return dataclasses.replace(run, supervised=supervised)
        now |= {"pretrain": base or run.model.pretrain, "critic_pretrain": critic or run.model.critic_pretrain}
        return dataclasses.replace(run, model=dataclasses.replace(run.model, **now))

    def _pretrain(self) -> str:
        return str(self.run.supervised.pretrain if isinstance(self.run, SupervisedCommand) else self.run.model.pretrain)

    def _start(self) -> str:
        """The model that the exported one started from."""
        return critic_start(self.run)[1] if self.options.role == "critic" else self._pretrain()

    def _check_starts(self) -> None:
        """Refuse missing or changed models that the run started from."""
        starts = [("--pretrain", self._pretrain(), "--pretrain")]
        if self.options.role == "critic":
            starts.append((critic_start(self.saved)[0], self._start(), "--critic_pretrain"))
        for flag, name, remedy in starts:
            refuse_overwriting({flag: name}, {"FOLDER": self.options.folder})
            try:
                check_model(name, flag, self.options.trust_remote_code)
            except ValueError as error:
                raise ValueError(f"{error} The run started from it: say where it is now with {remedy}.") from error
            before = str(self.state["contents"].get(flag))
            if Path(name).is_dir() and _OF_FOLDER.fullmatch(before) and model_fingerprint(name) != before:
                raise ValueError(f"{flag} {name} is not what the run started from: say where that is with {remedy}.")

    def _lora_rank(self) -> int:
        rank: int = self.run.lora.lora_rank
        if self.options.role == "critic" and self.run.model.critic_lora_rank is not None:
            return int(self.run.model.critic_lora_rank)
        return rank

    def _module(self) -> nn.Module:
        run = self.run
        if isinstance(run, TrainPPOConfig):
            return load_critic(run) if self.options.role == "critic" else load_actor(run)
        if isinstance(run, TrainRMConfig):
            model = load_reward_model(run, self.tokenizer)
            for name in ("mean", "std"):  # of another model's scores, where it has some
                model.model.config.__dict__.pop(name, None)
            logger.warning("mean and std of its scores, for --normalize_reward, are not in a checkpoint: left out")
            return model
        return load_language_model(run)

    @torch.no_grad()
    def _fill(self) -> None:
        """Load the checkpoint's weights into the trained parameters."""
        role = "model" if isinstance(self.run, SupervisedCommand) else self.options.role
        averaged = role == "actor" and self.run.ppo.enable_ema
        files = sorted(self.checkpoint.glob(f"{'ema' if averaged else role}-*.safetensors"))
        prefix = "" if averaged else _WEIGHT
        trained = {f"{prefix}{name}": p for name, p in self.module.named_parameters() if p.requires_grad}
        try:
            with FragmentReader(files) as reader:
                found = {name for name in reader.names() if name.startswith(prefix)}
                sizes = {name: parameter.numel() for name, parameter in trained.items()}
                if odd := [name for name in sorted(found | sizes.keys()) if not _fits(reader, name, sizes)]:
                    raise ValueError(f"{odd[0].removeprefix(prefix)} is missing in one of them, or of another size")
                for name, parameter in trained.items():
                    values = torch.empty(parameter.numel())
                    reader.read_into(name, Fragment(0, values))
                    parameter.copy_(values.view_as(parameter))
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"CHECKPOINT {self.checkpoint} does not fit {self._start()}: {error}") from error

    def _write(self, model: Any, folder: Path) -> None:
        save_model(model, folder, is_main=True)
        save_tokenizer(self.tokenizer, folder)

    def _write_merged(self, model: Any) -> None:
        """Write merged weights by way of merge_lora."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".adapters_") as adapters:
            self._write(model, Path(adapters))
            base, trust = self._start(), self.options.trust_remote_code
            bf16, folder = self.options.bf16, str(self.folder)
            LoRAMerge(MergeConfig(adapters, folder, pretrain=base, bf16=bf16, trust_remote_code=trust)).fit()


def find_checkpoint(given: Path) -> Path:
    """Checkpoint at ``given``, or the newest in that folder."""
    steps = {int(match[1]): path for path in given.glob("step_*") if (match := _STEP.fullmatch(path.name))}
    if not (given / MANIFEST).is_file() and not steps:
        near = next((path for path in sorted(given.glob("checkpoints_*")) if path.is_dir()), None)
        hint = "give a folder step_... of one, or the folder that holds them" if near is None else f"give {near}"
        raise ValueError(f"CHECKPOINT {given}: there is no checkpoint of a training command; {hint}.")
    found = (given if (given / MANIFEST).is_file() else steps[max(steps)]).resolve()
    try:
        damage = damage_of(found)
    except UnreadableError as error:
        raise ValueError(f"CHECKPOINT {found}: {error}") from error
    if damage is not None:
        raise ValueError(f"CHECKPOINT {found} is damaged ({damage}): give another.")
    return found


def _has_critic(run: Any) -> bool:
    return isinstance(run, TrainPPOConfig) and ESTIMATORS[run.advantage.advantage_estimator].uses_critic


def _fits(reader: FragmentReader, name: str, sizes: dict[str, int]) -> bool:
    return name in reader.names() and sizes.get(name) == reader.size(name)
