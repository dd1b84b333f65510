"""Every option of every command, declared once.

A field is a flag of the same name: ``PPOConfig.eps_clip`` is ``--eps_clip`` and reaches the code as
``config.ppo.eps_clip``. Fields are grouped by the part of the library that owns them; a command's config
(``TrainPPOConfig``, ``TrainSFTConfig``, ``TrainRMConfig``) is a tuple of groups, flat on the command line.

``validate()`` raises ``ValueError`` with a message that names the flag and the remedy. Only the standard
library is imported here, so ``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class RunConfig:
    """Where results go and how often they are reported."""

    save_path: str = "./ckpt"
    """Folder that receives the trained model in Hugging Face format; logs go to its subfolder 'logs'."""
    logging_steps: int = 1
    """Write metrics every this many steps."""
    use_tensorboard: str | None = None
    """Folder for TensorBoard event files (off when not given)."""

    def validate(self) -> None:
        _require(self.logging_steps >= 1, f"--logging_steps must be at least 1, got {self.logging_steps}.")


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
    seed: int = 42
    """Seed of data order, initialization and sampling."""

    def validate(self) -> None:
        _require(self.zero_stage in (0, 1, 2, 3), f"--zero_stage must be 0, 1, 2 or 3, got {self.zero_stage}.")
        _require(self.seed >= 0, f"--seed must not be negative, got {self.seed}.")
        _require(self.max_norm >= 0, f"--max_norm must not be negative, got {self.max_norm}; 0 switches clipping off.")
        _require(
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
    """Share of all optimizer steps in which the learning rate rises from zero to its peak."""

    def validate(self) -> None:
        _require(
            all(0 <= beta < 1 for beta in self.adam_betas),
            f"--adam_betas must lie in [0, 1), got {' '.join(map(str, self.adam_betas))}.",
        )
        _require(0 <= self.lr_warmup_ratio <= 1, f"--lr_warmup_ratio must lie in [0, 1], got {self.lr_warmup_ratio}.")
        _require(self.l2 >= 0, f"--l2 must not be negative, got {self.l2}.")


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
            _require(value >= 1, f"--{name} must be at least 1, got {value}.")


@dataclass(frozen=True)
class PPOConfig:
    """The algorithm: loop sizes, losses, KL, advantages."""

    num_episodes: int = 1
    """Passes over all prompts."""
    rollout_batch_size: int = 512
    """Prompts of one rollout batch, over all ranks."""
    micro_rollout_batch_size: int = 8
    """Samples of one forward pass while experience is made, on one rank."""
    n_samples_per_prompt: int = 1
    """Responses sampled for each prompt."""
    eps_clip: float = 0.2
    """Clip range of the policy ratio."""
    value_clip: float | None = 0.2
    """Clip range of the value around its old value; 'None' switches it off."""
    init_kl_coef: float = 0.01
    """Coefficient of the KL penalty in the token rewards; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty (Schulman, Approximating KL Divergence)."""
    reward_clip_range: tuple[float, float] = (-10.0, 10.0)
    """Scores are clipped to this range before they enter the token rewards."""
    gamma: float = 1.0
    """Discount per action token."""
    lambd: float = 0.95
    """Lambda of generalized advantage estimation."""
    ptx_coef: float = 0.05
    """Weight of the language-model loss on --pretrain_data."""
    buffer_limit: int = 0
    """Largest number of samples in the replay buffer of one rank; the oldest leave first (0: no limit)."""
    buffer_cpu_offload: bool = True
    """Keep the replay buffer in CPU memory."""

    def validate(self) -> None:
        for name, value, least in (
            ("num_episodes", self.num_episodes, 1),
            ("rollout_batch_size", self.rollout_batch_size, 1),
            ("micro_rollout_batch_size", self.micro_rollout_batch_size, 1),
            ("n_samples_per_prompt", self.n_samples_per_prompt, 1),
            ("init_kl_coef", self.init_kl_coef, 0),
            ("ptx_coef", self.ptx_coef, 0),
            ("buffer_limit", self.buffer_limit, 0),
        ):
            _require(value >= least, f"--{name} must be at least {least}, got {value}.")
        _require(self.eps_clip > 0, f"--eps_clip must be positive, got {self.eps_clip}.")
        _require(
            self.value_clip is None or self.value_clip > 0,
            f"--value_clip must be positive or None, got {self.value_clip}.",
        )
        for name, share in (("gamma", self.gamma), ("lambd", self.lambd)):
            _require(0 <= share <= 1, f"--{name} must lie in [0, 1], got {share}.")
        low, high = self.reward_clip_range
        _require(low < high, f"--reward_clip_range needs two rising numbers, got {low} {high}.")


@dataclass(frozen=True)
class PPOModelConfig:
    """Which models play which role."""

    pretrain: str
    """Causal language model to train: a local folder or a hub name. Also the reference model."""
    reward_pretrain: str | None = None
    """Reward model: a sequence-classification checkpoint with one label."""
    reward_fn: str | None = None
    """Python reward function, path.py or path.py:name; called as reward_fn(prompts, responses, labels)."""
    critic_pretrain: str | None = None
    """Model that the critic starts from (default: the reward model, else the actor)."""
    value_head_prefix: str = "score"
    """Name of the scalar head in critic and reward checkpoints."""
    flash_attn: bool = False
    """Use FlashAttention-2 (must be installed) instead of PyTorch's SDPA."""
    save_value_network: bool = False
    """Also save the critic, in a folder beside --save_path with '_critic' at the end."""

    def validate(self) -> None:
        _require(
            self.reward_pretrain is not None or self.reward_fn is not None,
            "No reward is given: pass --reward_pretrain MODEL or --reward_fn FILE.py[:name].",
        )
        _require(
            self.reward_pretrain is None or self.reward_fn is None,
            "--reward_pretrain and --reward_fn are both given: pass one of them.",
        )


@dataclass(frozen=True)
class PPOLearningRateConfig:
    """Peak learning rates of the two optimizers."""

    actor_learning_rate: float = 1e-6
    """Peak learning rate of the actor."""
    critic_learning_rate: float = 9e-6
    """Peak learning rate of the critic."""

    def validate(self) -> None:
        for name, rate in (("actor", self.actor_learning_rate), ("critic", self.critic_learning_rate)):
            _require(rate >= 0, f"--{name}_learning_rate must not be negative, got {rate}.")


@dataclass(frozen=True)
class PPODataConfig:
    """Prompts, and documents for the PTX loss."""

    prompt_data: str
    """Prompts: a JSONL, JSON, CSV or Parquet file, a folder saved by 'datasets', or a hub name."""
    prompt_split: str = "train"
    """Split of --prompt_data."""
    pretrain_data: str | None = None
    """Documents for the PTX loss, in any format of --prompt_data (off when not given)."""
    pretrain_split: str = "train"
    """Split of --pretrain_data."""
    pretrain_key: str | None = None
    """Column of --pretrain_data that holds the text (default: --input_key)."""
    input_key: str = "input"
    """Column of --prompt_data that holds the prompt: a text, or a list of chat messages."""
    label_key: str | None = None
    """Column of --prompt_data that is passed to the reward function as label."""
    input_template: str | None = None
    """Text around each prompt, with {} where the prompt goes."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    max_samples: int | None = None
    """Use only the first this many rows of each data set."""
    prompt_max_len: int = 1024
    """Prompts with more tokens are dropped, with a count in the log."""

    def validate(self) -> None:
        _validate_data(self.input_template, self.max_samples)
        _require(self.prompt_max_len >= 1, f"--prompt_max_len must be at least 1, got {self.prompt_max_len}.")


@dataclass(frozen=True)
class GenerationConfig:
    """How responses are sampled."""

    generate_max_len: int = 1024
    """Largest number of sampled tokens per response."""
    temperature: float = 1.0
    """Sampling temperature, applied wherever log-probs are taken."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    top_k: int | None = None
    """Sample from the this many likeliest tokens."""

    def validate(self) -> None:
        _require(self.generate_max_len >= 1, f"--generate_max_len must be at least 1, got {self.generate_max_len}.")
        _require(self.temperature > 0, f"--temperature must be positive, got {self.temperature}.")
        _require(0 < self.top_p <= 1, f"--top_p must lie in (0, 1], got {self.top_p}.")
        _require(self.top_k is None or self.top_k >= 1, f"--top_k must be at least 1, got {self.top_k}.")


@dataclass(frozen=True)
class SupervisedConfig:
    """What SFT and reward-model training have in common."""

    pretrain: str
    """Model to start from: a local folder or a hub name."""
    dataset: str
    """Training data: a JSONL, JSON, CSV or Parquet file, a folder saved by 'datasets', or a hub name."""
    dataset_split: str = "train"
    """Split of --dataset."""
    eval_dataset: str | None = None
    """Held-out data, in any format of --dataset."""
    eval_split: str = "test"
    """Split of --eval_dataset when it has splits."""
    eval_steps: int = -1
    """Evaluate every this many optimizer steps (-1: after each epoch)."""
    max_steps: int = -1
    """Stop after this many optimizer steps (-1: after --max_epochs)."""
    learning_rate: float = 5e-6
    """Peak learning rate."""
    input_template: str | None = None
    """Text around each prompt, with {} where the prompt goes."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    max_samples: int | None = None
    """Use only the first this many rows of each data set."""
    max_len: int = 512
    """Longer samples are dropped, with a count in the log."""
    flash_attn: bool = False
    """Use FlashAttention-2 (must be installed) instead of PyTorch's SDPA."""

    def validate(self) -> None:
        _validate_data(self.input_template, self.max_samples)
        _require(self.max_len >= 2, f"--max_len must be at least 2, got {self.max_len}.")
        _require(self.learning_rate >= 0, f"--learning_rate must not be negative, got {self.learning_rate}.")
        for name, value in (("eval_steps", self.eval_steps), ("max_steps", self.max_steps)):
            _require(value == -1 or value >= 1, f"--{name} must be -1 or at least 1, got {value}.")


@dataclass(frozen=True)
class SFTDataConfig:
    """Columns of supervised fine-tuning data."""

    input_key: str = "input"
    """Column with the prompt (text or chat messages); no loss on it."""
    output_key: str | None = "output"
    """Column with the response; 'None' trains on all tokens of --input_key."""

    def validate(self) -> None:
        """Nothing to check: any column name may occur."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Columns of preference data, and the loss on them."""

    prompt_key: str | None = None
    """Column with the prompt, when chosen and rejected do not contain it."""
    chosen_key: str = "chosen"
    """Column with the better response."""
    rejected_key: str = "rejected"
    """Column with the worse response."""
    margin_key: str | None = None
    """Column with the margin by which chosen must win (only with --loss sigmoid)."""
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """Pairwise loss."""
    value_head_prefix: str = "score"
    """Name of the scalar head."""

    def validate(self) -> None:
        _require(
            self.margin_key is None or self.loss == "sigmoid",
            "--margin_key works with --loss sigmoid only: log-exp has no margin.",
        )


def _validate_data(input_template: str | None, max_samples: int | None) -> None:
    _require(
        input_template is None or input_template.count("{}") == 1,
        f"--input_template must contain {{}} once, where the prompt goes; got {input_template!r}.",
    )
    _require(max_samples is None or max_samples >= 1, f"--max_samples must be at least 1, got {max_samples}.")


def _validate_groups(config: TrainPPOConfig | TrainSFTConfig | TrainRMConfig) -> None:
    for group in vars(config).values():
        group.validate()


@dataclass(frozen=True)
class TrainPPOConfig:
    """Options of openppo.cli.train_ppo."""

    model: PPOModelConfig
    data: PPODataConfig
    ppo: PPOConfig = field(default_factory=PPOConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    learning_rate: PPOLearningRateConfig = field(default_factory=PPOLearningRateConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option, or pair of options, that cannot work on ``world_size`` ranks."""
        _validate_groups(self)
        _validate_train_batch(self.batch, world_size)
        prompts, samples = self.ppo.rollout_batch_size, self.ppo.n_samples_per_prompt
        _require(
            prompts % world_size == 0,
            f"--rollout_batch_size {prompts} does not divide among {world_size} ranks: use a multiple of {world_size}.",
        )
        _require(
            prompts * samples % self.batch.train_batch_size == 0,
            f"--rollout_batch_size {prompts} x --n_samples_per_prompt {samples} = {prompts * samples} samples do not "
            f"divide into optimizer steps of --train_batch_size {self.batch.train_batch_size}: make "
            "--train_batch_size a divisor of that number.",
        )
        _require(
            not (0 < self.ppo.buffer_limit * world_size < self.batch.train_batch_size),
            f"--buffer_limit {self.ppo.buffer_limit} on {world_size} ranks holds fewer samples than "
            f"--train_batch_size {self.batch.train_batch_size}: raise it, or use 0 for no limit.",
        )


@dataclass(frozen=True)
class TrainSFTConfig:
    """Options of openppo.cli.train_sft."""

    supervised: SupervisedConfig
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option, or pair of options, that cannot work on ``world_size`` ranks."""
        _validate_groups(self)
        _validate_train_batch(self.batch, world_size)


@dataclass(frozen=True)
class TrainRMConfig:
    """Options of openppo.cli.train_rm."""

    supervised: SupervisedConfig
    data: PreferenceConfig = field(default_factory=PreferenceConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    adam: AdamConfig = field(default_factory=AdamConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option, or pair of options, that cannot work on ``world_size`` ranks."""
        _validate_groups(self)
        _validate_train_batch(self.batch, world_size)


def _validate_train_batch(batch: BatchConfig, world_size: int) -> None:
    _require(
        batch.train_batch_size % world_size == 0,
        f"--train_batch_size {batch.train_batch_size} does not divide among {world_size} ranks: "
        f"use a multiple of {world_size}.",
    )


def flat_dict(config: TrainPPOConfig | TrainSFTConfig | TrainRMConfig) -> dict[str, object]:
    """All options of a command by flag name, in the order of the groups; reads back through ``--config``."""
    return {
        field.name: value
        for group in vars(config).values()
        for field, value in zip(dataclasses.fields(group), dataclasses.astuple(group), strict=True)
    }
