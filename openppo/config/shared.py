"""Options that several commands have: where results go, ZeRO, Adam, batch sizes, LoRA."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from openppo.config.conditions import Condition, parse_condition


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def validate_groups(command: Any) -> None:
    """Validate each group of options of a command by itself."""
    for group in vars(command).values():
        group.validate()
        _require_finite(group)


def _require_finite(group: Any) -> None:
    """Refuse nan everywhere, and inf unless the field's metadata says ``may_be_infinite``."""
    for option in dataclasses.fields(group):
        value, infinite = vars(group)[option.name], option.metadata.get("may_be_infinite", False)
        numbers = [number for number in (value if isinstance(value, tuple) else (value,)) if isinstance(number, float)]
        require(
            all(math.isfinite(number) or (infinite and not math.isnan(number)) for number in numbers),
            f"--{option.name} must be a {'' if infinite else 'finite '}number, got {' '.join(map(str, numbers))}.",
        )


def mask_credentials(text: str) -> str:
    """``text`` with stars for what URLs in it may hold of secrets: user and password, values of the query."""
    text = re.sub(r"(\w://)[^\s/]+@", r"\1***@", text)
    return re.sub(r"(\w://[^\s?]*\?)[^\s,]+", r"\1***", text)


def refuse_home(name: str, path: str | None) -> None:
    """Raise ``ValueError`` for a path that begins with ~, which would become a folder of that name."""
    require(
        path is None or not path.startswith("~"),
        f"--{name} {path}: no shell has put a home folder in place of ~ here (in a file, or behind =): write it out.",
    )


@dataclass(frozen=True)
class RunConfig:
    """Where results go and how often they are reported."""

    save_path: str = "./ckpt"
    """Folder that receives the trained model in Hugging Face format; logs go to its subfolder 'logs'."""
    logging_steps: int = 1
    """Write metrics every this many steps."""
    heartbeat_timeout: float = 45.0
    """A rank that gives no sign of life for this many seconds is lost; all ranks end within 15 s of knowing it."""
    stall_timeout: float = 2700.0
    """End the run when a rank makes no progress for this many seconds, in a reward function say (0: wait for ever)."""
    max_skipped_steps: int = 10
    """Stop after this many optimizer steps in a row whose loss or gradient was not finite; each of them is skipped."""
    stop_when: tuple[str, ...] = ()
    """End the run, with its model saved, after a step at which one of these holds: 'kl > 0.2' 'eval_reward > 0.9'."""
    dry_run: bool = False
    """Check options, configs, tokenizer and data, print estimated memory and communication, and end without loading
    a model."""
    dry_run_ranks: int | None = None
    """With --dry_run: estimate for this many ranks (default: those that were started)."""
    dry_run_memory: float | None = None
    """With --dry_run: estimate for GPUs of this many GiB (default: the devices of this machine)."""

    def validate(self) -> None:
        require(self.save_path != "", "--save_path is empty: name the folder that receives the trained model.")
        refuse_home("save_path", self.save_path)
        require(self.logging_steps >= 1, f"--logging_steps must be at least 1, got {self.logging_steps}.")
        require(self.max_skipped_steps >= 1, f"--max_skipped_steps must be at least 1, got {self.max_skipped_steps}.")
        ranks, memory = self.dry_run_ranks, self.dry_run_memory
        require(ranks is None or ranks >= 1, f"--dry_run_ranks must be at least 1, got {ranks}.")
        require(memory is None or memory > 0, f"--dry_run_memory must be positive, got {memory}.")
        for name, value in (("dry_run_ranks", ranks), ("dry_run_memory", memory)):
            require(self.dry_run or value is None, f"--{name} has an effect with --dry_run only: add it.")
        require(
            5 <= self.heartbeat_timeout <= 3600,
            f"--heartbeat_timeout must lie between 5 and 3600 seconds, got {self.heartbeat_timeout:g}.",
        )
        require(
            self.stall_timeout >= 0,
            f"--stall_timeout must not be negative, got {self.stall_timeout:g}; 0 waits for ever.",
        )

    @property
    def stop_conditions(self) -> list[Condition]:
        """Parsed ``--stop_when``; ``ValueError`` for anything but conditions."""
        return [parse_condition(text, "--stop_when") for text in self.stop_when]


@dataclass(frozen=True)
class CheckpointConfig:
    """What a run can go on from after it was stopped."""

    ckpt_path: str | None = None
    """Folder of checkpoints (default: a subfolder of --save_path, such as 'checkpoints_ppo')."""
    save_steps: int = -1
    """Save a checkpoint every this many steps (-1: at the end of each pass over the data, 0: only when stopped)."""
    max_ckpt_num: int = 3
    """Keep so many of the newest checkpoints."""
    load_checkpoint: bool = False
    """Go on from the newest checkpoint in --ckpt_path; without any there, start from the beginning."""
    save_hf_ckpt: bool = False
    """Put the model in Hugging Face format into each checkpoint (its subfolder 'model')."""
    keep_best: str | None = None
    """Metric of evaluation, such as eval_reward or eval_loss, whose best model is kept as 'best' in --ckpt_path."""

    def validate(self) -> None:
        refuse_home("ckpt_path", self.ckpt_path)
        require(self.save_steps >= -1, f"--save_steps must be -1, 0 or more, got {self.save_steps}.")
        require(self.max_ckpt_num >= 1, f"--max_ckpt_num must be at least 1, got {self.max_ckpt_num}.")
        require(
            self.keep_best is None or self.keep_best.startswith("eval"),
            f"--keep_best {self.keep_best} is no metric of evaluation: those begin with 'eval', as eval_reward does.",
        )


@dataclass(frozen=True)
class DeepSpeedConfig:
    """How the models share the processes: ZeRO, precision of training, memory savers, seed."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage: 0 none, 1 optimizer states, 2 and gradients, 3 and parameters are partitioned over the ranks."""
    bf16: bool = False
    """Compute in bfloat16 and keep float32 master weights in the optimizer."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    adam_offload: bool = False
    """Keep optimizer states and the optimizer step on the CPU (needs --zero_stage 1, 2 or 3)."""
    max_norm: float = 1.0
    """Clip the gradient to this L2 norm (0: no clipping)."""
    zpg: int = 1
    """ZeRO-3 only: keep a second copy of the weights partitioned over groups of this many ranks (ZeRO++)."""
    compile: bool = False
    """Compile the layers of trained models with torch.compile: faster passes after a minute of compiling (not with
    --zero_stage 3; on CPUs it needs a C++ compiler)."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass goes on (more memory; --zero_stage 3 does it anyway)."""
    seed: int = 42
    """Seed of data order, initialization and sampling."""

    def validate(self) -> None:
        require(self.zero_stage in (0, 1, 2, 3), f"--zero_stage must be 0, 1, 2 or 3, got {self.zero_stage}.")
        require(self.seed >= 0, f"--seed must not be negative, got {self.seed}.")
        require(self.max_norm >= 0, f"--max_norm must not be negative, got {self.max_norm}; 0 switches clipping off.")
        require(self.zpg >= 1, f"--zpg must be at least 1, got {self.zpg}.")
        require(
            self.zpg == 1 or self.zero_stage == 3,
            f"--zpg {self.zpg} partitions weights, which --zero_stage {self.zero_stage} does not: use --zero_stage 3.",
        )
        require(
            not (self.compile and self.zero_stage == 3),
            "--compile with --zero_stage 3: DeepSpeed gathers weights in hooks that torch.compile does not see; use "
            "--zero_stage 0, 1 or 2, or leave --compile out.",
        )
        require(
            not (self.adam_offload and self.zero_stage == 0),
            "--adam_offload needs partitioned optimizer states: use --zero_stage 1, 2 or 3.",
        )


@dataclass(frozen=True)
class AdamConfig:
    """What the optimizers of a command have in common."""

    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's running means."""
    l2: float = 0.0
    """Decoupled weight decay (AdamW)."""
    lr_scheduler: Literal["cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup"] = (
        "cosine_with_min_lr"
    )
    """Learning-rate schedule; cosine_with_min_lr ends at 10 % of the peak."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps in which the learning rate rises to its peak: of n steps the first has 1/n of it."""

    def validate(self) -> None:
        require(
            all(0 <= beta < 1 for beta in self.adam_betas),
            f"--adam_betas must lie in [0, 1), got {' '.join(map(str, self.adam_betas))}.",
        )
        require(0 <= self.lr_warmup_ratio <= 1, f"--lr_warmup_ratio must lie in [0, 1], got {self.lr_warmup_ratio}.")
        require(self.l2 >= 0, f"--l2 must not be negative, got {self.l2}.")


@dataclass(frozen=True)
class BatchConfig:
    """Sizes of an optimizer step."""

    train_batch_size: int = 128
    """Samples of one optimizer step, over all ranks and micro-batches."""
    micro_train_batch_size: int = 4
    """Samples of one forward and backward pass on one rank; changes memory and speed, never the gradient."""
    max_epochs: int = 1
    """Passes over the data (for train_ppo: over each rollout batch)."""

    def validate(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, f"--{name} must be at least 1, got {value}.")


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters instead of training all weights."""

    lora_rank: int = 0
    """Rank of the adapters (0: no LoRA, all weights are trained)."""
    lora_alpha: int = 16
    """Adapters are scaled by this over their rank."""
    lora_dropout: float = 0.0
    """Dropout on the adapters' input while training; old log-probs are taken without, so ratios start around 1."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get an adapter; 'all-linear' takes all but the head."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (NF4; needs bitsandbytes, --lora_rank and --zero_stage 0, 1 or 2)."""

    def validate(self) -> None:
        require(self.lora_rank >= 0, f"--lora_rank must not be negative, got {self.lora_rank}; 0 switches LoRA off.")
        require(self.lora_alpha >= 1, f"--lora_alpha must be at least 1, got {self.lora_alpha}.")
        require(0 <= self.lora_dropout < 1, f"--lora_dropout must lie in [0, 1), got {self.lora_dropout}.")
        require(len(self.target_modules) > 0, "--target_modules needs at least one name, or 'all-linear'.")
        require(
            self.lora_rank > 0 or not self.load_in_4bit,
            "--load_in_4bit keeps the weights frozen: give --lora_rank, so that there is something to train.",
        )


def validate_lora(lora: LoRAConfig, deepspeed: DeepSpeedConfig) -> None:
    """What no group can check alone."""
    require(
        not (lora.load_in_4bit and deepspeed.zero_stage == 3),
        "--load_in_4bit: 4-bit weights cannot be partitioned; use --zero_stage 0, 1 or 2.",
    )
