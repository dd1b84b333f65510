"""The config of each command: a tuple of groups, flat on the command line."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from openppo.config.folders import refuse_overwriting
from openppo.config.ppo import (
    AdvantageConfig,
    KLConfig,
    LossConfig,
    OldLogProbsFrom,
    PPOConfig,
    PPOLearningRateConfig,
)
from openppo.config.rewards import RewardConfig, RewardShapingConfig
from openppo.config.roles import EvaluationConfig, GenerationConfig, PPODataConfig, PPOModelConfig
from openppo.config.shared import (
    AdamConfig,
    BatchConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    LoRAConfig,
    RunConfig,
    mask_credentials,
    require,
    validate_groups,
    validate_lora,
)
from openppo.config.supervised import PreferenceConfig, ProcessConfig, SFTDataConfig, SupervisedConfig
from openppo.config.tracking import KEY_FROM_ELSEWHERE, TrackingConfig


@dataclass(frozen=True)
class TrainPPOConfig:
    """Options of openppo.cli.train_ppo."""

    model: PPOModelConfig
    data: PPODataConfig = field(default_factory=PPODataConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    learning_rate: PPOLearningRateConfig = field(default_factory=PPOLearningRateConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def validate(self, world_size: int, own_source: bool = False) -> None:
        """Raise ``ValueError`` for the first option, or pair of options, that cannot work on ``world_size`` ranks.

        With a source of trajectories of the caller's no prompts and rewards are needed.
        """
        require(
            own_source or self.data.prompt_data is not None,
            "No prompts are given: pass --prompt_data FILE.",
        )
        if not own_source:
            self.rewards.require_source()
        validate_groups(self)
        world_size = self.run.dry_run_ranks or world_size
        _validate_train_batch(self.batch, world_size)
        validate_lora(self.lora, self.deepspeed)
        refuse_overwriting(self.input_models, self.output_models)
        _validate_keep_best(self.checkpoint, self.evaluation.eval_data, "--eval_data")
        _validate_stop_when(self.run, self.evaluation.eval_data, "--eval_data")
        best = self.checkpoint.keep_best or ""
        require(
            "pass@" not in best or self.rewards.passing(self.evaluation.pass_reward) is not None,
            f"--keep_best {best}: which reward of a reward model or server passes? Say so with --pass_reward.",
        )
        self._validate_sizes(world_size)
        require(
            self.loss.old_log_probs != "rollout" or (self.generation.top_p == 1 and self.generation.top_k is None),
            "--old_log_probs rollout: with --top_p or --top_k the engine's log-probs are not the policy's; leave one "
            "of them out.",
        )
        require(
            self.generation.rollout_engine == "hf" or not self.lora.load_in_4bit,
            "--rollout_engine vllm takes whole weights, and --load_in_4bit keeps none: leave one of them out.",
        )
        require(
            not (self.ppo.offload_idle and self.deepspeed.adam_offload),
            "--offload_idle: --adam_offload has all of Adam on the host already; leave one of them out.",
        )
        buffer, longest = self.shaping.overlong_buffer_len, self.generation.generate_max_len
        require(
            buffer is None or buffer <= longest,
            f"--overlong_buffer_len {buffer} is longer than --generate_max_len {longest}: make it shorter.",
        )
        require(
            not self.ppo.dynamic_sampling or self.ppo.n_samples_per_prompt > 1,
            "--dynamic_sampling compares the responses to one prompt: use --n_samples_per_prompt of at least 2.",
        )
        require(
            self.rewards.reward_pretrain is not None
            or not (self.shaping.normalize_reward and self.shaping.reward_normalizer == "model"),
            "--normalize_reward takes mean and std from a reward model, and there is no --reward_pretrain: use "
            "--reward_normalizer running.",
        )
        require(
            self.model.ref_pretrain is None or self.kl.init_kl_coef > 0,
            "--ref_pretrain: --init_kl_coef 0 wants no reference model; leave one of them out.",
        )
        verified = {"exact_match", "math"} & set(self.rewards.verifiable_reward)
        require(
            not verified or self.data.label_key is not None or self.data.input_key is None,
            f"--verifiable_reward {' '.join(sorted(verified))} compares with a label: name its column with "
            "--label_key.",
        )

    @property
    def input_models(self) -> dict[str, str | None]:
        """Input models by flag; None where an option is not given."""
        return {
            "--pretrain": self.model.pretrain,
            "--ref_pretrain": self.model.ref_pretrain,
            "--critic_pretrain": self.model.critic_pretrain,
            "--reward_pretrain": self.rewards.reward_pretrain,
            "--prm_pretrain": self.rewards.prm_pretrain,
        }

    @property
    def output_models(self) -> dict[str, str]:
        """Folders that receive models, by flag."""
        critic = {"--save_value_network: the critic's folder": f"{os.path.realpath(self.run.save_path)}_critic"}
        return {"--save_path": self.run.save_path} | (critic if self.model.save_value_network else {})

    def old_log_probs_from(self, at_once: bool) -> OldLogProbsFrom:
        """Where those of the old policy come from, see ``--old_log_probs``; "training": the forward that is trained on.

        ``at_once`` says that one optimizer step trains the actor on all samples, with the weights that sampled them.
        """
        if self.loss.old_log_probs != "auto":
            return self.loss.old_log_probs
        cut = self.generation.top_p < 1 or self.generation.top_k is not None
        if cut or self.generation.rollout_engine != "hf" or self.loss.rollout_correction != "none":
            return "recompute"
        if not self.deepspeed.bf16:
            return "rollout"
        samples = self.ppo.rollout_batch_size * self.ppo.n_samples_per_prompt
        always = samples <= self.batch.train_batch_size and self.batch.max_epochs == 1  # or metrics would change sides
        return "training" if at_once and always and self.lora.lora_dropout == 0 else "recompute"

    def _validate_sizes(self, world_size: int) -> None:
        prompts, samples = self.ppo.rollout_batch_size, self.ppo.n_samples_per_prompt
        require(
            prompts % world_size == 0,
            f"--rollout_batch_size {prompts} does not divide among {world_size} ranks: use a multiple of {world_size}.",
        )
        require(
            prompts * samples % self.batch.train_batch_size == 0,
            f"--rollout_batch_size {prompts} x --n_samples_per_prompt {samples} = {prompts * samples} samples do not "
            f"divide into optimizer steps of --train_batch_size {self.batch.train_batch_size}: make "
            "--train_batch_size a divisor of that number.",
        )
        require(
            self.kl.kl_target is None or 5 * self.kl.kl_horizon > prompts * samples,
            f"--kl_horizon {self.kl.kl_horizon} is too short for the {prompts * samples} samples of a step: the "
            "coefficient would change its sign. Make it larger than a fifth of them.",
        )
        require(
            not (0 < self.ppo.buffer_limit * world_size < self.batch.train_batch_size),
            f"--buffer_limit {self.ppo.buffer_limit} on {world_size} ranks holds fewer samples than "
            f"--train_batch_size {self.batch.train_batch_size}: raise it, or use 0 for no limit.",
        )


@dataclass(frozen=True)
class SupervisedCommand:
    """Options of openppo.cli.train_sft, train_rm and train_prm; each adds the group ``data``."""

    supervised: SupervisedConfig
    batch: BatchConfig = field(default_factory=BatchConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option, or pair of options, that cannot work on ``world_size`` ranks."""
        validate_groups(self)
        world_size = self.run.dry_run_ranks or world_size
        _validate_train_batch(self.batch, world_size)
        validate_lora(self.lora, self.deepspeed)
        refuse_overwriting(self.input_models, self.output_models)
        _validate_keep_best(self.checkpoint, self.supervised.eval_dataset, "--eval_dataset")
        _validate_stop_when(self.run, self.supervised.eval_dataset, "--eval_dataset")

    @property
    def input_models(self) -> dict[str, str | None]:
        """As of ``TrainPPOConfig``."""
        return {"--pretrain": self.supervised.pretrain}

    @property
    def output_models(self) -> dict[str, str]:
        """As of ``TrainPPOConfig``."""
        return {"--save_path": self.run.save_path}


@dataclass(frozen=True)
class TrainSFTConfig(SupervisedCommand):
    """Options of openppo.cli.train_sft."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)


@dataclass(frozen=True)
class TrainRMConfig(SupervisedCommand):
    """Options of openppo.cli.train_rm."""

    data: PreferenceConfig = field(default_factory=PreferenceConfig)


@dataclass(frozen=True)
class TrainPRMConfig(SupervisedCommand):
    """Options of openppo.cli.train_prm."""

    data: ProcessConfig = field(default_factory=ProcessConfig)


Command = TypeVar("Command")


def _validate_train_batch(batch: BatchConfig, world_size: int) -> None:
    require(
        batch.train_batch_size % world_size == 0,
        f"--train_batch_size {batch.train_batch_size} does not divide among {world_size} ranks: "
        f"use a multiple of {world_size}.",
    )


def _validate_keep_best(checkpoint: CheckpointConfig, held_out: str | None, flag: str) -> None:
    require(
        checkpoint.keep_best is None or held_out is not None,
        f"--keep_best {checkpoint.keep_best} compares evaluations: give held-out data with {flag}.",
    )


def _validate_stop_when(run: RunConfig, held_out: str | None, flag: str) -> None:
    for condition in run.stop_conditions:
        require(
            held_out is not None or not condition.metric.startswith("eval"),
            f"--stop_when {condition.text!r} looks at evaluations: give held-out data with {flag}.",
        )


def flat_dict(config: Any) -> dict[str, object]:
    """All options of a command by flag name, in the order of the groups; reads back through ``--config``.

    For files and logs: secrets in URLs are masked, and a key of --use_wandb is left out.
    """
    return {
        field.name: _without_secrets(field.name, value)
        for group in vars(config).values()
        for field, value in zip(dataclasses.fields(group), dataclasses.astuple(group), strict=True)
    }


def _without_secrets(name: str, value: Any) -> Any:
    if name == "use_wandb" and value is not None:
        return KEY_FROM_ELSEWHERE
    return mask_credentials(value) if isinstance(value, str) else value


def from_options(command: type[Command], **options: Any) -> Command:
    """The config of a command from its options by name, the inverse of ``flat_dict``.

    Lists, and one text for several, may stand for tuples, and paths for texts. Raises ``ValueError`` for an option that
    the command does not have or a value of another type, and ``TypeError`` if a required option is missing.
    """
    made = {}
    for name, group in typing.get_type_hints(command).items():
        hints = typing.get_type_hints(group)
        mine = sorted(hints.keys() & options.keys())
        made[name] = group(**{option: _of_type(hints[option], option, options.pop(option)) for option in mine})
    if options:
        raise ValueError(f"{command.__name__} has no option {', '.join(sorted(options))}; see --help for all options.")
    return command(**made)


def _of_type(hint: Any, option: str, value: Any) -> Any:
    """``value`` of an option, as the command line would give it."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif isinstance(value, list):
        value = tuple(value)
    elif isinstance(value, str) and typing.get_args(hint)[1:] == (...,):
        value = (value,)
    if not _fits(value, hint):
        wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        raise ValueError(f"{option}={value!r}: must be {wanted}, not {type(value).__name__}.")
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of the type ``hint``, one of those that options have."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is typing.Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if kind is tuple and isinstance(value, tuple):
        each = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(value) == len(each) and all(map(_fits, value, each))
    if kind is tuple or isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)
