"""Export of a checkpoint as a Hugging Face folder."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from openppo import logger
from openppo.config import (
    ExportConfig,
    MergeLoRAConfig,
    TrainPPOConfig,
    TrainPRMConfig,
    TrainRMConfig,
    TrainSFTConfig,
    from_options,
)
from openppo.config.commands import SupervisedCommand
from openppo.config.models import refuse_overwriting
from openppo.models.merge_lora import LoRAMerge, make_folder, to_bf16
from openppo.models.pretrained import check_model
from openppo.strategy.checkpoint.folder import MANIFEST, damage_of, of_steps
from openppo.strategy.checkpoint.model_state import Fragment, FragmentReader
from openppo.strategy.saving import save_model, save_tokenizer
from openppo.trainer.policy_inputs import load_policy_tokenizer
from openppo.trainer.resume.compatible import model_fingerprint
from openppo.trainer.roles import critic_lora, critic_start, load_actor, load_critic
from openppo.trainer.supervised.model import load_model
from openppo.weight_files import holds_model

_KINDS: dict[str, type] = {
    "ppo": TrainPPOConfig,
    "sft": TrainSFTConfig,
    "rm": TrainRMConfig,
    "prm": TrainPRMConfig,
}
_OF_FOLDER = re.compile("[0-9a-f]{64}")  # a fingerprint; that of a name on the hub names a commit


class Export:
    """Export job: reads a checkpoint when made, writes in ``fit()``.

    With ``--enable_ema`` that is the average, as at the end of a run. ``ValueError`` names what cannot work.
    """

    def __init__(self, options: ExportConfig) -> None:
        self.options, self.folder = options, Path(options.folder)
        self.checkpoint = find_checkpoint(Path(options.checkpoint))
        self.state: dict[str, Any] = json.loads(
            (self.checkpoint / "state.json").read_text(encoding="utf-8")
        )
        self.run, critic_flag = self._run()
        self.is_supervised = isinstance(self.run, SupervisedCommand)
        pretrain = self.start = (
            self.run.supervised.pretrain if self.is_supervised else self.run.model.pretrain
        )
        self._check_start("--pretrain", pretrain, "--pretrain")
        lora = self.run.lora
        if options.role == "critic" and (start := critic_start(self.run)) is not None:
            self.start, lora = start[1], critic_lora(self.run)
            self._check_start(critic_flag, self.start, "--critic_pretrain")
        if options.merge and lora.lora_rank == 0:
            raise ValueError(
                "--merge: the run trained all weights, which are written as they are; leave it out."
            )
        if self.checkpoint.parent in self.folder.resolve().parents:
            raise ValueError(
                f"FOLDER {self.folder} lies among the checkpoints, which runs remove: choose another."
            )
        if holds_model(self.folder):
            raise ValueError(f"FOLDER {self.folder} holds a model already: choose another.")
        make_folder("FOLDER", self.folder)
        rows = self.run.supervised if self.is_supervised else self.run.data
        self.tokenizer = load_policy_tokenizer(pretrain, options.trust_remote_code, rows)
        self.module = self._module()
        self._fill()

    def fit(self) -> None:
        """Write model and tokenizer; merged weights by way of merge_lora."""
        options, model = self.options, self.module.model
        if options.bf16 and not options.merge:
            to_bf16(model)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".adapters_") as adapters:
            written = Path(adapters) if options.merge else self.folder
            save_model(model, written, is_main=True)
            save_tokenizer(self.tokenizer, written)
            if options.merge:
                more = {"bf16": options.bf16, "trust_remote_code": options.trust_remote_code}
                LoRAMerge(
                    MergeLoRAConfig(adapters, options.folder, pretrain=self.start, **more)
                ).fit()
        logger.info(
            "wrote the model of step %d of %s to %s",
            self.state["step"],
            self.checkpoint,
            self.folder,
        )

    def close(self) -> None:
        """There is no process group to leave."""

    def _run(self) -> tuple[Any, str]:
        """Options of the run with the models' present paths, and the flag that named its critic's start."""
        kind, given = self.state["kind"], self.options
        try:
            run: Any = from_options(_KINDS[kind], **self.state["options"])
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"CHECKPOINT {self.checkpoint} is of another version of OpenPPO: {error}"
            ) from error
        critic = critic_start(run) if kind == "ppo" else None
        if given.role == "critic" and critic is None:
            raise ValueError(f"--role critic: the run of {self.checkpoint} had none; leave it out.")
        now: dict[str, Any] = {
            "flash_attn": False,
            "load_in_4bit": False,
            "trust_remote_code": given.trust_remote_code,
        }
        moved = {"pretrain": given.pretrain, "critic_pretrain": given.critic_pretrain}
        now |= {name: path for name, path in moved.items() if path}
        return from_options(_KINDS[kind], **self.state["options"] | now), critic[
            0
        ] if critic else ""

    def _check_start(self, flag: str, name: str, remedy: str) -> None:
        """Refuse a missing or changed model that the run started from."""
        refuse_overwriting({flag: name}, {"FOLDER": self.options.folder})
        try:
            check_model(name, flag, self.options.trust_remote_code)
        except ValueError as error:
            said = " ".join(str(error).split())
            raise ValueError(
                f"{said} The run started from it: say where it is now with {remedy}."
            ) from error
        before = str(self.state["contents"].get(flag))
        if (
            Path(name).is_dir()
            and _OF_FOLDER.fullmatch(before)
            and model_fingerprint(name) != before
        ):
            raise ValueError(
                f"{flag} {name} is not what the run started from: say where that is with {remedy}."
            )

    def _module(self) -> Any:
        """The model as it was before training."""
        if not self.is_supervised:
            return load_critic(self.run) if self.options.role == "critic" else load_actor(self.run)
        module: Any = load_model(self.run, self.tokenizer)
        if isinstance(self.run, TrainRMConfig):
            for name in ("mean", "std"):  # of another model's scores, where it has some
                module.model.config.__dict__.pop(name, None)
            logger.warning(
                "mean and std of its scores, for --normalize_reward, are not in a checkpoint: left out"
            )
        return module

    @torch.no_grad()
    def _fill(self) -> None:
        """Load the checkpoint's weights into the trained parameters."""
        role = "model" if self.is_supervised else self.options.role
        averaged = role == "actor" and self.run.ppo.enable_ema
        files, prefix = (
            f"{'ema' if averaged else role}-*.safetensors",
            "" if averaged else "weight/",
        )
        trained = {
            f"{prefix}{name}": p for name, p in self.module.named_parameters() if p.requires_grad
        }
        try:
            with FragmentReader(sorted(self.checkpoint.glob(files))) as reader:
                found = {
                    name: size for name, size in reader.sizes().items() if name.startswith(prefix)
                }
                sizes = {name: parameter.numel() for name, parameter in trained.items()}
                if odd := sorted(name for name, _ in found.items() ^ sizes.items()):
                    raise ValueError(
                        f"{odd[0].removeprefix(prefix)} is missing in one of them, or of another size"
                    )
                for name, parameter in trained.items():
                    values = torch.empty(parameter.numel())
                    reader.read_into(name, Fragment(0, values))
                    parameter.copy_(values.view_as(parameter))
        except (ValueError, SafetensorError) as error:
            raise ValueError(
                f"CHECKPOINT {self.checkpoint} does not fit {self.start}: {error}"
            ) from error


def find_checkpoint(given: Path) -> Path:
    """Checkpoint at ``given``, or the newest in that folder."""
    found = [given] if (given / MANIFEST).is_file() else of_steps(given)
    if not found:
        near = min(
            given.glob("checkpoints_*"),
            default="a folder step_... of one, or the folder that holds them",
        )
        raise ValueError(
            f"CHECKPOINT {given}: there is no checkpoint of a training command; give {near}."
        )
    newest = found[-1].resolve()
    if (damage := damage_of(newest, "CHECKPOINT")) is not None:
        raise ValueError(f"CHECKPOINT {newest} is damaged ({damage}): give another.")
    return newest
