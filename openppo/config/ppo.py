"""The algorithm of train_ppo: loop sizes, advantages, KL, losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openppo.config.shared import require

AdvantageEstimator = Literal["gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "remax"]
PolicyLossType = Literal["ppo", "gspo", "cispo"]
LossAggregation = Literal["token_mean", "sequence_mean", "constant"]
RolloutCorrection = Literal["none", "tis", "mis", "icepop"]
OldLogProbs = Literal["auto", "recompute", "rollout"]
OldLogProbsFrom = Literal["recompute", "rollout", "training"]


@dataclass(frozen=True)
class PPOConfig:
    """The loop: sizes, what is frozen when, what is averaged."""

    num_episodes: int = 1
    """Passes over all prompts."""
    max_steps: int | None = None
    """End after this many global steps (default: those of --num_episodes)."""
    rollout_batch_size: int = 512
    """Prompts of one rollout batch, over all ranks."""
    micro_rollout_batch_size: int = 8
    """Samples of one forward pass while experience is made, on one rank, at most: fewer where that saves padding."""
    micro_rollout_tokens: int | None = None
    """Tokens of such a pass of actor, reference and critic, padding included, instead of a number of samples."""
    micro_train_tokens: int | None = None
    """Tokens of a training micro-batch on one rank, padding included, instead of --micro_train_batch_size samples."""
    n_samples_per_prompt: int = 1
    """Responses sampled for each prompt."""
    dynamic_sampling: bool = False
    """Drop prompts whose responses all got the same reward, and sample further prompts instead (DAPO)."""
    dynamic_sampling_max_batches: int = 10
    """With --dynamic_sampling: rollout batches sampled for one global step at most."""
    freezing_actor_steps: int = -1
    """Global steps at the start in which only the critic learns (-1: none)."""
    value_pretrain_steps: int = 0
    """Global steps at the start in which only the critic learns, on Monte-Carlo returns and without value clip."""
    ptx_coef: float = 0.05
    """Weight of the language-model loss on --pretrain_data."""
    buffer_limit: int = 0
    """Largest number of samples in the replay buffer of one rank; the oldest leave first (0: no limit)."""
    buffer_cpu_offload: bool = True
    """Keep the replay buffer in CPU memory."""
    offload_idle: bool = False
    """Keep Adam's moments in host memory while nothing is trained: more of a GPU's memory for generation, at the price
    of a copy there and back in each step."""
    enable_ema: bool = False
    """Keep an exponential moving average of the actor's weights, and save it instead of the actor."""
    ema_beta: float = 0.992
    """Share of the old average in the new one, at each optimizer step."""

    @property
    def frozen_actor_steps(self) -> int:
        """Global steps at the start in which the actor stays as it is."""
        return max(self.freezing_actor_steps, self.value_pretrain_steps, 0)

    def validate(self) -> None:
        for name, value, least in (
            ("num_episodes", self.num_episodes, 1),
            ("rollout_batch_size", self.rollout_batch_size, 1),
            ("micro_rollout_batch_size", self.micro_rollout_batch_size, 1),
            ("n_samples_per_prompt", self.n_samples_per_prompt, 1),
            ("dynamic_sampling_max_batches", self.dynamic_sampling_max_batches, 1),
            ("freezing_actor_steps", self.freezing_actor_steps, -1),
            ("value_pretrain_steps", self.value_pretrain_steps, 0),
            ("ptx_coef", self.ptx_coef, 0),
            ("buffer_limit", self.buffer_limit, 0),
        ):
            require(value >= least, f"--{name} must be at least {least}, got {value}.")
        for name, tokens in (
            ("micro_rollout_tokens", self.micro_rollout_tokens),
            ("micro_train_tokens", self.micro_train_tokens),
        ):
            require(tokens is None or tokens >= 1, f"--{name} must be at least 1, got {tokens}.")
        steps = self.max_steps
        require(steps is None or steps >= 1, f"--max_steps must be at least 1, got {steps}.")
        require(0 <= self.ema_beta < 1, f"--ema_beta must lie in [0, 1), got {self.ema_beta}.")


@dataclass(frozen=True)
class AdvantageConfig:
    """From rewards to advantages."""

    advantage_estimator: AdvantageEstimator = "gae"
    """Only gae has a critic; all others but reinforce and remax compare the responses to one prompt."""
    gamma: float = 1.0
    """Discount per action token."""
    lambd: float = 0.95
    """Lambda of generalized advantage estimation."""
    lambd_critic: float | None = None
    """Lambda of the critic's targets (default: --lambd)."""
    adaptive_lambd_alpha: float | None = None
    """Use lambda = 1 - 1 / (alpha x response length) for the advantages instead of --lambd (VAPO: 0.05)."""
    normalize_advantages: Literal["default", "on", "off"] = "default"
    """Normalize over the action tokens of the whole buffer; default: gae, reinforce, reinforce_baseline, rloo."""

    def validate(self) -> None:
        for name, share in (("gamma", self.gamma), ("lambd", self.lambd), ("lambd_critic", self.lambd_critic)):
            require(share is None or 0 <= share <= 1, f"--{name} must lie in [0, 1], got {share}.")
        alpha = self.adaptive_lambd_alpha
        require(alpha is None or alpha > 0, f"--adaptive_lambd_alpha must be positive or None, got {alpha}.")


@dataclass(frozen=True)
class KLConfig:
    """How the policy is held near the reference."""

    init_kl_coef: float = 0.01
    """Coefficient of the KL penalty; 0 loads no reference model."""
    kl_target: float | None = None
    """Adapt the coefficient so that the KL per action token comes near this (default: keep it fixed)."""
    kl_horizon: int = 10000
    """With --kl_target: samples over which the coefficient adapts."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty (Schulman, Approximating KL Divergence)."""
    use_kl_loss: bool = False
    """Put the KL penalty into the policy loss instead of the token rewards (with --kl_estimator k2 or k3)."""

    def validate(self) -> None:
        require(self.init_kl_coef >= 0, f"--init_kl_coef must be at least 0, got {self.init_kl_coef}.")
        require(self.kl_horizon >= 1, f"--kl_horizon must be at least 1, got {self.kl_horizon}.")
        require(self.kl_target is None or self.kl_target > 0, f"--kl_target must be positive, got {self.kl_target}.")
        require(
            self.kl_target is None or self.init_kl_coef > 0,
            "--kl_target multiplies the coefficient, which --init_kl_coef 0 keeps at 0: start from a positive one.",
        )
        require(
            not (self.use_kl_loss and self.init_kl_coef == 0),
            "--use_kl_loss with --init_kl_coef 0 has no effect: give a positive --init_kl_coef.",
        )
        require(
            not (self.use_kl_loss and self.kl_estimator == "k1"),
            "--use_kl_loss with --kl_estimator k1 would be noise: the expected gradient of k1 as a loss is zero. "
            "Use --kl_estimator k2 or k3.",
        )


@dataclass(frozen=True)
class LossConfig:
    """Policy and value losses."""

    policy_loss_type: PolicyLossType = "ppo"
    """Clipped ratios of tokens (ppo) or of sequences (gspo), or log-probs with truncated weights (cispo)."""
    eps_clip: float = 0.2
    """Clip range of the policy ratio (gspo: 3e-4, and 4e-4 for --eps_clip_high)."""
    eps_clip_high: float | None = None
    """Upper clip range of the policy ratio (default: --eps_clip)."""
    dual_clip: float | None = None
    """Bound the loss of tokens with negative advantage by this times the advantage (above 1; usual: 3)."""
    cispo_eps_max: float = 5.0
    """With --policy_loss_type cispo: largest weight of a token."""
    loss_agg: LossAggregation | None = None
    """Mean over tokens, over sequences' token means, or tokens over sequences x --generate_max_len. By default
    token_mean; sequence_mean for gspo, constant for dr_grpo."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    old_log_probs: OldLogProbs = "auto"
    """Log-probs of the old policy: the engine's (rollout), or those of another forward (recompute). By default the
    engine's where both are the same but for rounding: --rollout_engine hf in float32, without --top_p, --top_k and
    --rollout_correction. With --bf16 in place of float32, those of the training forward where one optimizer step trains
    on all samples of a rollout, once, without --lora_dropout."""
    rollout_correction: RolloutCorrection = "none"
    """Weight tokens by p_actor / p_rollout: truncated above (tis), or 0 outside a range (mis, icepop)."""
    rollout_correction_low: float | None = None
    """Lower end of the range (default: mis and icepop 0.5)."""
    rollout_correction_high: float | None = None
    """Upper end of the range (default: tis and mis 2, icepop 5)."""
    value_clip: float | None = 0.2
    """Clip range of the value around its old value; 'None' switches it off."""

    def validate(self) -> None:
        for name, value in (
            ("eps_clip", self.eps_clip),
            ("eps_clip_high", self.eps_clip_high),
            ("cispo_eps_max", self.cispo_eps_max),
            ("rollout_correction_high", self.rollout_correction_high),
        ):
            require(value is None or value > 0, f"--{name} must be positive, got {value}.")
        require(
            self.value_clip is None or self.value_clip > 0,
            f"--value_clip must be positive or None, got {self.value_clip}.",
        )
        require(self.dual_clip is None or self.dual_clip > 1, f"--dual_clip must be above 1, got {self.dual_clip}.")
        require(
            self.dual_clip is None or self.policy_loss_type != "cispo",
            "--dual_clip bounds a clipped loss, and cispo has none: leave --dual_clip out.",
        )
        require(self.entropy_coef >= 0, f"--entropy_coef must not be negative, got {self.entropy_coef}.")
        low, high = self.rollout_correction_low, self.rollout_correction_high
        require(low is None or low >= 0, f"--rollout_correction_low must not be negative, got {low}.")
        require(
            low is None or high is None or low < high,
            f"--rollout_correction_low {low} must be below --rollout_correction_high {high}.",
        )
        require(
            self.old_log_probs != "rollout" or self.rollout_correction == "none",
            f"--rollout_correction {self.rollout_correction} compares the engine's log-probs with recomputed ones, and "
            "--old_log_probs rollout recomputes none: leave one of them out.",
        )
        given = [flag for flag, value in (("low", low), ("high", high)) if value is not None]
        require(
            not given or self.rollout_correction != "none",
            f"--rollout_correction_{given[0] if given else ''} has no effect without --rollout_correction: choose "
            "tis, mis or icepop.",
        )
        require(
            low is None or self.rollout_correction != "tis",
            "--rollout_correction_low has no effect with --rollout_correction tis: use mis or icepop.",
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
            require(rate >= 0, f"--{name}_learning_rate must not be negative, got {rate}.")
