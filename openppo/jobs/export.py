"""Export of a checkpoint as a Hugging Face folder."""

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from openppo import logger
from openppo.build.policy_inputs import load_policy_tokenizer
from openppo.build.roles import critic_lora, critic_start, load_actor, load_critic
from openppo.build.supervised_model import load_model
from openppo.config import (
    ExportConfig,
    MergeLoRAConfig,
    TrainPPOConfig,
    TrainPRMConfig,
    TrainRMConfig,
    TrainSFTConfig,
    from_options,
)
from openppo.config.models import refuse_overwriting
from openppo.config.train_supervised import SupervisedCommand
from openppo.jobs.merge_lora import LoRAMerge, make_folder
from openppo.models.merge_lora import to_bf16
from openppo.models.pretrained import check_model
from openppo.strategy.checkpoint.folder import MANIFEST, damage_of, of_steps
from openppo.strategy.checkpoint.model_state import Fragment, FragmentReader
from openppo.strategy.saving import save_model, save_tokenizer
from openppo.tracking.card_file import write_card
from openppo.trainer.cards.run_card import facts_of
from openppo.trainer.cards.text import CardText
from openppo.trainer.resume.compatible import model_fingerprint
from openppo.weight_files import holds_model

_KINDS: dict[str, type] = {
    "ppo": TrainPPOConfig,
    "sft": TrainSFTConfig,
    "rm": TrainRMConfig,
    "prm": TrainPRMConfig,
}
_OF_FOLDER = re.compile("[0-9a-f]{64}")
"""Fingerprint of a local folder; that of a name on the hub ends with a commit."""


class Export:
    """Read a checkpoint when made, and write its model in ``fit()``.

    With ``--ema_beta`` that is the average, as at the end of a run. ``ValueError`` names the flag to change.
    """

    def __init__(self, options: ExportConfig) -> None:
        self.options = options
        self.folder = Path(options.folder)
        self.checkpoint = find_checkpoint(Path(options.checkpoint))
        state = (self.checkpoint / "state.json").read_text(encoding="utf-8")
        self.state: dict[str, Any] = json.loads(state)
        self.run, critic_flag = self._run()
        self.is_supervised = isinstance(self.run, SupervisedCommand)
        rows = self.run.supervised if self.is_supervised else self.run.data
        pretrain = self.run.supervised.pretrain if self.is_supervised else self.run.model.pretrain
        self.start = pretrain
        self._check_start("--pretrain", pretrain, "--pretrain")

        lora = self.run.lora
        start = critic_start(self.run) if options.role == "critic" else None
        if start is not None:
            _, self.start = start
            lora = critic_lora(self.run)
            self._check_start(critic_flag, self.start, "--critic_pretrain")
        if options.merge and lora.lora_rank == 0:
            raise ValueError(
                "--merge: the run trained all weights, which are written as they are; leave it out."
            )

        self._check_folder()
        make_folder("FOLDER", self.folder)
        self.tokenizer = load_policy_tokenizer(pretrain, options.trust_remote_code, rows)
        self.module = self._module()
        self._fill()

    def fit(self) -> None:
        """Write model and tokenizer; weights are merged by ``LoRAMerge``."""
        options = self.options
        model = self.module.model
        if options.bf16 and not options.merge:
            to_bf16(model)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".adapters_") as adapters:
            written = Path(adapters) if options.merge else self.folder
            save_model(model, written, is_main=True)
            save_tokenizer(self.tokenizer, written)
            if options.merge:
                config = MergeLoRAConfig(
                    adapters,
                    options.folder,
                    pretrain=self.start,
                    bf16=options.bf16,
                    trust_remote_code=options.trust_remote_code,
                )
                LoRAMerge(config).fit()
        self._write_card()
        logger.info(
            "wrote the model of step %d of %s to %s",
            self.state["step"],
            self.checkpoint,
            self.folder,
        )

    def close(self) -> None:
        """Do nothing: there is no process group to leave."""

    def _write_card(self) -> None:
        """Write the card of the run at this step; an earlier version's checkpoint has its options alone."""
        trainer = self.state["trainer"]
        step = int(self.state["step"])
        facts = self.state.get("facts") or facts_of(self.run, self.start)
        samples = step * self.run.batch.train_batch_size
        if not self.is_supervised:
            samples = trainer["state"]["consumed_samples"]
        evaluations = trainer.get("evaluations", [])
        text = CardText(facts, self.folder, step, samples=samples, evaluations=evaluations)
        write_card(self.folder, text.header(), text.body())

    def _run(self) -> tuple[Any, str]:
        """Return the run's options with present paths of models, and the flag of its critic's start."""
        options = self.options
        kind = self.state["kind"]
        try:
            run: Any = from_options(_KINDS[kind], **self.state["options"])
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"CHECKPOINT {self.checkpoint} is of another version of OpenPPO: {error}"
            ) from error

        critic = critic_start(run) if kind == "ppo" else None
        if options.role == "critic" and critic is None:
            raise ValueError(f"--role critic: the run of {self.checkpoint} had none; leave it out.")

        present: dict[str, Any] = {
            "flash_attn": False,
            "load_in_4bit": False,
            "trust_remote_code": options.trust_remote_code,
        }
        if options.pretrain:
            present["pretrain"] = options.pretrain
        if options.critic_pretrain:
            present["critic_pretrain"] = options.critic_pretrain
        critic_flag, _ = critic or ("", None)
        return from_options(_KINDS[kind], **self.state["options"] | present), critic_flag

    def _check_start(self, flag: str, name: str, remedy: str) -> None:
        """Refuse a missing or changed model that the run started from."""
        refuse_overwriting({flag: name}, {"FOLDER": self.options.folder})
        try:
            check_model(name, flag, self.options.trust_remote_code)
        except ValueError as error:
            problem = " ".join(str(error).split())
            raise ValueError(
                f"{problem} The run started from it: say where it is now with {remedy}."
            ) from error

        before = str(self.state["contents"].get(flag))
        is_compared = Path(name).is_dir() and _OF_FOLDER.fullmatch(before)
        if is_compared and model_fingerprint(name) != before:
            raise ValueError(
                f"{flag} {name} is not what the run started from: say where that is with {remedy}."
            )

    def _check_folder(self) -> None:
        """Refuse a folder that holds a model, or lies where runs remove folders."""
        if self.checkpoint.parent in self.folder.resolve().parents:
            raise ValueError(
                f"FOLDER {self.folder} lies among the checkpoints, which runs remove: choose another."
            )
        if holds_model(self.folder):
            raise ValueError(f"FOLDER {self.folder} holds a model already: choose another.")

    def _module(self) -> Any:
        """Load the model as it was before training."""
        if not self.is_supervised:
            return load_critic(self.run) if self.options.role == "critic" else load_actor(self.run)

        module: Any = load_model(self.run, self.tokenizer)
        if isinstance(self.run, TrainRMConfig):
            for name in ("mean", "std"):  # of the scores of the model that it started from
                module.model.config.__dict__.pop(name, None)
            logger.warning(
                "mean and std of its scores, for --normalize_reward, are not in a checkpoint: left out"
            )
        return module

    @torch.no_grad()
    def _fill(self) -> None:
        """Load the checkpoint's weights into the trained parameters."""
        role: str = "model" if self.is_supervised else self.options.role
        prefix = "weight/"
        if role == "actor" and self.run.ppo.ema_beta is not None:
            role, prefix = "ema", ""
        trained = {
            f"{prefix}{name}": parameter
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }
        files = sorted(self.checkpoint.glob(f"{role}-*.safetensors"))
        try:
            with FragmentReader(files) as reader:
                _check_sizes(trained, reader.sizes(), prefix)
                for name, parameter in trained.items():
                    values = torch.empty(parameter.numel())
                    reader.read_into(name, Fragment(0, values))
                    parameter.copy_(values.view_as(parameter))
        except (ValueError, SafetensorError) as error:
            raise ValueError(
                f"CHECKPOINT {self.checkpoint} does not fit {self.start}: {error}"
            ) from error


def _check_sizes(trained: Mapping[str, Tensor], sizes: Mapping[str, int], prefix: str) -> None:
    """Raise ``ValueError`` for the first trained parameter whose size in the checkpoint differs."""
    saved = {name: size for name, size in sizes.items() if name.startswith(prefix)}
    needed = {name: parameter.numel() for name, parameter in trained.items()}
    mismatches = sorted(name for name, _ in saved.items() ^ needed.items())
    if mismatches:
        raise ValueError(
            f"{mismatches[0].removeprefix(prefix)} is missing in one of them, or of another size"
        )


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at ``path``, or the newest in that folder; ``ValueError`` if it is damaged."""
    checkpoints = [path] if (path / MANIFEST).is_file() else of_steps(path)
    if not checkpoints:
        near = min(
            path.glob("checkpoints_*"),
            default="a folder step_... of one, or the folder that holds them",
        )
        raise ValueError(
            f"CHECKPOINT {path}: there is no checkpoint of a training command; give {near}."
        )

    newest = checkpoints[-1].resolve()
    damage = damage_of(newest, "CHECKPOINT")
    if damage is not None:
        raise ValueError(f"CHECKPOINT {newest} is damaged ({damage}): give another.")
    return newest
