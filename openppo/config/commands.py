"""The config of each command: a tuple of groups, flat on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openppo.config.data import PPODataConfig
from openppo.config.fields import Rules, declared_options, require, rules_of
from openppo.config.models import LoRAConfig, PPOModelConfig, refuse_overwriting
from openppo.config.ppo import (
    AdvantageConfig,
    KLConfig,
    LossConfig,
    PPOConfig,
    PPOLearningRateConfig,
)
from openppo.config.rewards import RewardConfig, RewardShapingConfig
from openppo.config.rollout import EvaluationConfig, GenerationConfig
from openppo.config.run import AdamConfig, BatchConfig, CheckpointConfig, DeepSpeedConfig, RunConfig
from openppo.config.supervised import PreferenceConfig, ProcessConfig, SFTDataConfig, SupervisedConfig
from openppo.config.tracking import TrackingConfig


@dataclass(frozen=True)
class CommandConfig:
    """A tuple of groups of options."""

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option, or pair of options, that cannot work on ``world_size`` ranks."""
        for group in vars(self).values():
            group.validate()


class TrainingConfig(CommandConfig):
    """Options of a command that trains."""

    if TYPE_CHECKING:  # groups of each of them
        batch: BatchConfig
        lora: LoRAConfig
        deepspeed: DeepSpeedConfig
        run: RunConfig
        tracking: TrackingConfig
        checkpoint: CheckpointConfig

    @property
    def input_models(self) -> dict[str, str | None]:
        """Input models by flag; None where an option is not given."""
        raise NotImplementedError

    @property
    def output_models(self) -> dict[str, str]:
        """Folders that receive models, by flag."""
        raise NotImplementedError

    @property
    def held_out(self) -> tuple[str, str | None]:
        """Flag and value of the held-out data."""
        raise NotImplementedError

    def validate(self, world_size: int, own_source: bool = False) -> None:
        """As of ``CommandConfig``; with ``own_source`` a source of the caller's evaluates, and no data is held out."""
        super().validate(world_size)
        ranks, samples = self.run.dry_run_ranks or world_size, self.batch.train_batch_size
        require(
            samples % ranks == 0,
            f"--train_batch_size {samples} does not divide among {ranks} ranks: use a multiple of {ranks}.",
        )
        require(
            not (self.lora.load_in_4bit and self.deepspeed.zero_stage == 3),
            "--load_in_4bit: 4-bit weights cannot be partitioned; use --zero_stage 0, 1 or 2.",
        )
        refuse_overwriting(self.input_models, self.output_models)
        if not own_source:
            self._validate_held_out()

    def _validate_held_out(self) -> None:
        """Refuse options about evaluations that do not take place."""
        (flag, held_out), keep_best = self.held_out, self.checkpoint.keep_best
        require(
            keep_best is None or held_out is not None,
            f"--keep_best {keep_best} compares evaluations: give held-out data with {flag}.",
        )
        for condition in self.run.stop_conditions:
            require(
                held_out is not None or not condition.metric.startswith("eval"),
                f"--stop_when {condition.text!r} looks at evaluations: give held-out data with {flag}.",
            )


@dataclass(frozen=True)
class TrainPPOConfig(TrainingConfig):
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
        """Validate; with ``own_source`` neither prompts nor rewards are required."""
        if not own_source:
            require(
                self.evaluation.eval_data is not None or not self.evaluation.eval_before_training,
                "--eval_before_training needs --eval_data.",
            )
            require(self.data.prompt_data != "", "No prompts are given: pass --prompt_data FILE.")
            self.rewards.require_source()
        super().validate(world_size, own_source)
        best = self.checkpoint.keep_best or ""
        require(
            "pass@" not in best or self.rewards.pass_threshold(self.evaluation.pass_reward) is not None,
            f"--keep_best {best}: which reward of a reward model or server passes? Say so with --pass_reward.",
        )
        self._validate_sizes(self.run.dry_run_ranks or world_size)
        sampling = self.generation
        require(
            self.loss.old_log_probs != "rollout"
            or (sampling.top_p == 1 and sampling.top_k is None and sampling.min_new_tokens == 0),
            "--old_log_probs rollout: with --top_p, --top_k or --min_new_tokens the engine's log-probs are not the "
            "policy's; leave one of them out.",
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
            "--ref_pretrain: --init_kl_coef 0 uses no reference model; leave one of them out.",
        )
        verified = {"exact_match", "math"} & set(self.rewards.verifiable_reward)
        require(
            not verified or self.data.label_key is not None or self.data.input_key is None,
            f"--verifiable_reward {' '.join(sorted(verified))} compares with a label: name its column with "
            "--label_key.",
        )

    @property
    def input_models(self) -> dict[str, str | None]:
        return {
            "--pretrain": self.model.pretrain,
            "--ref_pretrain": self.model.ref_pretrain,
            "--critic_pretrain": self.model.critic_pretrain,
            "--reward_pretrain": self.rewards.reward_pretrain,
            "--prm_pretrain": self.rewards.prm_pretrain,
        }

    @property
    def output_models(self) -> dict[str, str]:
        critic = {"--save_value_network: the critic's folder": f"{os.path.realpath(self.run.save_path)}_critic"}
        return {"--save_path": self.run.save_path} | (critic if self.model.save_value_network else {})

    @property
    def held_out(self) -> tuple[str, str | None]:
        return "--eval_data", self.evaluation.eval_data

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
class SupervisedCommand(TrainingConfig):
    """Options of openppo.cli.train_sft, train_rm and train_prm; each adds the group ``data``."""

    supervised: SupervisedConfig
    batch: BatchConfig = field(default_factory=BatchConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def input_models(self) -> dict[str, str | None]:
        return {"--pretrain": self.supervised.pretrain}

    @property
    def output_models(self) -> dict[str, str]:
        return {"--save_path": self.run.save_path}

    @property
    def held_out(self) -> tuple[str, str | None]:
        return "--eval_dataset", self.supervised.eval_dataset


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


TRAINING_COMMANDS: tuple[type[TrainingConfig], ...] = (TrainPPOConfig, TrainSFTConfig, TrainRMConfig, TrainPRMConfig)


def training_options(holds: Callable[[Rules], object]) -> list[str]:
    """Names of the options of ``TRAINING_COMMANDS`` whose rules fulfil ``holds``."""
    options = {name: declared for command in TRAINING_COMMANDS for name, declared in declared_options(command).items()}
    return [name for name, declared in options.items() if holds(rules_of(declared))]
