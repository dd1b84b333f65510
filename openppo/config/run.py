"""Options of every training run: places, limits, batches, Adam, DeepSpeed, checkpoints, trackers."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openppo.config.fields import (
    KEY_FROM_ELSEWHERE,
    NUMBER,
    Bound,
    Options,
    a_path,
    at_least,
    inside,
    not_empty,
    not_negative,
    option,
    positive,
)

_HERE = "here"
"""Value of a plain ``--dry_run``: estimates for the ranks and devices of this run."""
_MACHINE = r"(?P<ranks>[1-9]\d*)?x(?P<memory>\d+(?:\.\d+)?)?"
_machine = Bound(
    "must stand alone, or name ranks and GiB of each GPU as 8x80, 8x or x80",
    lambda value: value == _HERE or (value != "x" and re.fullmatch(_MACHINE, value) is not None),
    {"anyOf": [{"const": _HERE}, {"pattern": r"^([1-9]\d*)?x(\d+(\.\d+)?)?$"}]},
)
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Condition:
    """A metric compared with a finite number, such as ``kl > 0.2``; ``text`` is the option as written."""

    text: str
    metric: str
    comparison: str
    bound: float

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """True if ``metrics`` fulfil the condition; never for NaN."""
        if self.metric not in metrics:
            return False
        compare = _COMPARE[self.comparison]
        return bool(compare(metrics[self.metric], self.bound))


@dataclass(frozen=True)
class RunConfig(Options):
    """Folder of results, limits of a run, and dry runs."""

    save_path: str = option("./ckpt", a_path, place=True)
    """Folder that receives the trained model in Hugging Face format; logs go to its subfolder 'logs'."""
    logging_steps: int = option(1, at_least(1))
    """Write metrics every this many steps."""
    heartbeat_timeout: float = option(45.0, inside("[5, 3600]"))
    """A rank without a sign of life for this many seconds is lost; all ranks then end within 15 s."""
    stall_timeout: float = option(2700.0, not_negative, "; 0 waits for ever")
    """End the run when a rank makes no progress for this many seconds (0: wait forever).
    A reward function that never returns is a common cause."""
    max_skipped_steps: int = option(10, at_least(1), of_files=True)
    """Stop after this many optimizer steps in a row whose loss or gradient was not finite; each is skipped."""
    stop_when: tuple[str, ...] = ()
    """End the run, with its model saved, after a step at which one holds: 'kl > 0.2' 'eval_reward > 0.9'."""
    dry_run: str | None = option(None, _machine, alone=_HERE)
    """Check options, configs, tokenizer, data, score three rows without models, print estimated memory, and end.
    '--dry_run 8x80' estimates for 8 ranks on GPUs of 80 GiB; '8x' or 'x80' for the devices or ranks of this run."""

    @property
    def dry_run_ranks(self) -> int | None:
        """Ranks that ``--dry_run 8x80`` names, here 8; None without."""
        match = re.fullmatch(_MACHINE, self.dry_run or "")
        return int(match["ranks"]) if match is not None and match["ranks"] else None

    @property
    def dry_run_memory(self) -> float | None:
        """GiB of each GPU that ``--dry_run 8x80`` names, here 80; None without."""
        match = re.fullmatch(_MACHINE, self.dry_run or "")
        return float(match["memory"]) if match is not None and match["memory"] else None

    @property
    def stop_conditions(self) -> list[Condition]:
        """Conditions of ``--stop_when``; ``ValueError`` for anything else."""
        conditions = []
        for text in self.stop_when:
            match = re.fullmatch(rf"\s*([^<>=]*[^<>=\s])\s*(>=|<=|>|<)\s*({NUMBER})\s*", text)
            if match is None:
                raise ValueError(
                    f"--stop_when {text!r}: write a metric, one of > >= < <=, and a number: 'kl > 0.2'."
                )

            metric, comparison, bound = match.groups()
            conditions.append(Condition(text, metric, comparison, bound=float(bound)))
        return conditions


@dataclass(frozen=True)
class CheckpointConfig(Options):
    """Checkpoints, from which a stopped run can resume."""

    ckpt_path: str | None = option(None, a_path, place=True)
    """Folder of checkpoints (default: a subfolder of --save_path, such as 'checkpoints_ppo')."""
    save_steps: int = option(-1, at_least(-1))
    """Save a checkpoint every this many steps (-1: after each pass over the data, 0: only when stopped)."""
    max_ckpt_num: int = option(3, at_least(1))
    """Number of newest checkpoints to keep."""
    load_checkpoint: bool = False
    """Resume from the newest checkpoint in --ckpt_path; without any there, start from the beginning."""
    save_hf_ckpt: bool = False
    """Put the model in Hugging Face format into each checkpoint (its subfolder 'model')."""
    keep_best: str | None = option(None, measures=True)
    """Metric of evaluation, such as eval_reward or eval_loss, whose best model is kept as 'best' in --ckpt_path.
    Of metrics that end in 'loss' or 'kl' the lowest is best."""

    def problems(self) -> Iterator[str]:
        if self.keep_best is not None and not self.keep_best.startswith("eval"):
            yield f"--keep_best {self.keep_best} is not an evaluation metric; use one that starts with 'eval'."


@dataclass(frozen=True)
class DeepSpeedConfig(Options):
    """Distribution of training over the processes: ZeRO, precision, memory savers, seed."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage; partitioned over the ranks are 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights."""
    bf16: bool = False
    """Compute in bfloat16 and keep float32 master weights in the optimizer."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    adam_offload: bool = False
    """Keep optimizer states and the optimizer step on the CPU (needs --zero_stage 1, 2 or 3)."""
    max_norm: float = option(1.0, not_negative, "; 0 switches clipping off")
    """Clip the gradient to this L2 norm (0: no clipping)."""
    zpg: int = option(1, at_least(1), of_files=True)
    """ZeRO-3 only: keep a second copy of the weights partitioned over groups of this many ranks (ZeRO++)."""
    compile: Literal["auto", "on", "off"] = option("auto", alone="on")
    """Compile trained models' layers with torch.compile (auto: on GPUs; not with --zero_stage 3).
    It needs a C compiler, on CPUs C++."""
    fused_kernels: Literal["auto", "off"] = "auto"
    """Norms, rotary embeddings and gated MLPs in one kernel each (auto: on GPUs, with liger-kernel installed)."""
    overlap_comm: Literal["auto", "on", "off"] = option("auto", alone="on", of_files=True)
    """Reduce gradients during the backward pass, in one more bucket of memory (auto: several GPUs or ZeRO-3)."""
    deterministic: bool = False
    """Add gradients on a GPU in a fixed order, which is slower; CPUs always do.
    Equal runs, and resumed ones, are then equal bit for bit."""
    seed: int = option(
        42, not_negative, resume="must match", rows_of=("prompt_data", "pretrain_data", "dataset")
    )
    """Seed of data order, initialization and sampling."""

    def problems(self) -> Iterator[str]:
        zero = self.zero_stage
        if self.zpg > 1 and zero != 3:
            yield f"zpg {self.zpg} partitions weights, which --zero_stage {zero} does not: use --zero_stage 3."
        if self.compile == "on" and zero == 3:
            yield "--compile does not see how --zero_stage 3 gathers weights: use stage 0, 1 or 2, or leave it out."
        if self.adam_offload and zero == 0:
            yield "--adam_offload needs partitioned optimizer states: use --zero_stage 1, 2 or 3."


@dataclass(frozen=True)
class AdamConfig(Options):
    """Common options of the optimizers of a command."""

    adam_betas: tuple[float, float] = option((0.9, 0.95), inside("[0, 1)"))
    """Decay rates of Adam's running means."""
    l2: float = option(0.0, not_negative)
    """Decoupled weight decay (AdamW)."""
    lr_scheduler: Literal[
        "cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup"
    ] = "cosine_with_min_lr"
    """Learning-rate schedule; cosine_with_min_lr ends at 10 % of the peak."""
    lr_warmup_ratio: float = option(0.03, inside("[0, 1]"))
    """Share of all optimizer steps in which the learning rate rises to its peak.
    The first of n such steps has 1/n of the peak."""


@dataclass(frozen=True)
class BatchConfig(Options):
    """Sizes of an optimizer step."""

    train_batch_size: int = option(128, at_least(1), resume="must match")
    """Samples of one optimizer step, over all ranks and micro-batches."""
    micro_train_batch_size: int | None = option(None, at_least(1))
    """Samples of one forward and backward pass on one rank (default: 4; for train_ppo --micro_train_tokens).
    They change memory and speed, never the gradient."""
    max_epochs: int = option(1, at_least(1))
    """Passes over the data (for train_ppo: over each rollout batch)."""

    @property
    def micro_rows(self) -> int:
        """``micro_train_batch_size``, or its default."""
        return self.micro_train_batch_size or 4


@dataclass(frozen=True)
class TrackingConfig(Options):
    """Destinations of metrics, samples and profiles."""

    use_tensorboard: str | None = option(None, place=True)
    """Folder for TensorBoard event files (off when not given); each run gets a subfolder, named as with --use_wandb."""
    use_wandb: str | None = option(
        None,
        not_empty,
        ": give it alone, with an API key, or not at all",
        place=True,
        alone=KEY_FROM_ELSEWHERE,
    )
    """Log to Weights & Biases; the key is optional (better keep it in WANDB_API_KEY). Needs 'wandb', which reads
    WANDB_PROJECT, WANDB_NAME, WANDB_RUN_GROUP, WANDB_ENTITY and WANDB_MODE."""
    log_samples_every: int = option(10, not_negative, "; 0 prints none")
    """Print a sample every this many steps (0: never)."""
    self_check: bool = option(True, of_files=True)
    """Before training on the first batch print two samples of it token by token, with what is trained on."""
    profile_steps: str | None = None
    """Steps to record with torch.profiler, such as 3 or 2-4,10: a trace of each rank in <save_path>/logs/profile."""

    def problems(self) -> Iterator[str]:
        self.profiled_steps()
        return super().problems()

    @property
    def shows_histograms(self) -> bool:
        """True if a tracker shows distributions."""
        return self.use_tensorboard is not None or self.use_wandb is not None

    def profiled_steps(self) -> set[int]:
        """Parse ``--profile_steps`` into steps from 1; ``ValueError`` for anything but steps and rising ranges."""
        if self.profile_steps is None:
            return set()

        steps: set[int] = set()
        for part in self.profile_steps.split(","):
            match = re.fullmatch(r"\s*([1-9]\d*)(?:-(\d+))?\s*", part)
            named = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
            if not named:
                form = "give steps from 1 and rising ranges, with commas, such as 3 or 2-4,10"
                raise ValueError(f"--profile_steps {self.profile_steps}: {form}.")
            steps.update(named)
        return steps


@dataclass(frozen=True)
class DumpConfig(Options):
    """Files of all samples."""

    dump_rollouts: str | None = option(None, a_path, place=True)
    """Folder that receives every sample that is trained on or evaluated, as JSON lines with its token ids, action
    mask and log-probs (off when not given)."""
    dump_max_mib: float = option(256.0, positive, needs="dump_rollouts", of_files=True)
    """With --dump_rollouts: begin another file when one has this many MiB."""


def refuse_own_checkpoints(inputs: Mapping[str, str | None], flag: str, folder: Path) -> None:
    """Refuse input models inside the run's own checkpoints in ``folder``."""
    for input_flag, name in inputs.items():
        if not name:
            continue
        model = Path(os.path.realpath(name))
        if folder not in model.parents:
            continue

        subfolder, *_ = model.relative_to(folder).parts
        if subfolder.startswith(("step_", "best_step_")):
            where = f"{input_flag} {name} lies in a checkpoint in {folder}"
            raise ValueError(f"{where}, where this run would replace it: choose another {flag}.")
