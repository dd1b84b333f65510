"""Options of the algorithm of train_ppo: loop sizes, advantages, KL, losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from openppo.config.correction import Correction, parse_correction
from openppo.config.fields import (
    Options,
    above,
    at_least,
    file_name,
    inside,
    not_negative,
    one_of_or_file,
    option,
    positive,
)

AdvantageEstimator = Literal[
    "gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "remax"
]
GROUP_ESTIMATORS: tuple[AdvantageEstimator, ...] = (
    "reinforce_baseline",
    "rloo",
    "group_norm",
    "dr_grpo",
)
"""Estimators that compare the responses to one prompt: a single response has advantage 0, or none."""
PolicyLossType = Literal["ppo", "gspo", "cispo", "double_sided", "decoupled"]
PromptOrder = Literal["shuffled", "given"]
LossAggregation = Literal["token_mean", "sequence_mean", "constant"]
OldLogProbs = Literal["auto", "recompute", "rollout"]


@dataclass(frozen=True)
class PPOConfig(Options):
    """The loop: sizes, learning rates, freezing, averaging."""

    num_episodes: int = option(1, at_least(1))
    """Passes over all prompts."""
    max_steps: int | None = option(None, at_least(1))
    """End after this many global steps (default: those of --num_episodes)."""
    prompt_order: str = option("shuffled", one_of_or_file(PromptOrder), resume="must match")
    """Order of the prompts in each pass: shuffled anew, given (that of the data), or your own, path.py:name."""
    rollout_batch_size: int = option(512, at_least(1), resume="must match")
    """Prompts of one rollout batch, over all ranks."""
    micro_rollout_batch_size: int | None = option(None, at_least(1))
    """Largest number of samples in a forward pass that makes experience on one rank; fewer where that saves padding
    (default: --micro_rollout_tokens decides; 8 where no budget fits the memory)."""
    micro_rollout_tokens: int | None = option(None, at_least(1))
    """Tokens in a forward pass that makes experience, padding included, instead of a number of samples (default on
    CPUs: 8192, on GPUs: 32768 or, for small layers, up to 131072; less by the estimate of memory)."""
    micro_train_tokens: int | None = option(None, at_least(1))
    """Tokens of a training micro-batch on one rank, padding included, instead of --micro_train_batch_size samples
    (default on CPUs: 8192, on GPUs: 32768 or, for small layers, up to 131072; less by the estimate of memory)."""
    share_prompts: Literal["auto", "off"] = "auto"
    """Compute the common beginning of several samples, such as their prompt, once per pass, where exact and faster."""
    n_samples_per_prompt: int = option(1, at_least(1), resume="must match")
    """Responses sampled for each prompt."""
    dynamic_sampling: int = option(0, not_negative, resume="must match", alone=10)
    """Drop prompts whose responses all got the same reward, and sample further prompts instead (DAPO), in at most this
    many rollout batches for one global step (the option alone: 10; 0: off)."""
    freezing_actor_steps: int = option(-1, at_least(-1), of_critic=True)
    """Global steps at the start in which only the critic learns (-1: none)."""
    value_pretrain_steps: int = option(0, at_least(0), of_critic=True)
    """Global steps at the start in which only the critic learns, on Monte-Carlo returns and without value clip."""
    actor_learning_rate: float = option(1e-6, not_negative)
    """Peak learning rate of the actor."""
    critic_learning_rate: float = option(9e-6, not_negative)
    """Peak learning rate of the critic."""
    ptx_coef: float = option(0.05, at_least(0))
    """Weight of the language-model loss on --pretrain_data; ptx_coeff is read as this too."""
    offload_idle: bool = False
    """Keep Adam's moments in host memory outside training: more memory for generation, one more copy in each step."""
    ema_beta: float | None = option(None, inside("[0, 1)"), resume="must match")
    """Keep an exponential moving average of the actor's weights, and save it instead of the actor.
    The value is the share of the old average in the new one, at each optimizer step (usual: 0.992)."""

    @property
    def forward_rows(self) -> int:
        """``micro_rollout_batch_size``, or its default."""
        return self.micro_rollout_batch_size or 8

    @property
    def frozen_actor_steps(self) -> int:
        """Global steps at the start in which the actor stays as it is."""
        return max(self.freezing_actor_steps, self.value_pretrain_steps, 0)


@dataclass(frozen=True)
class AdvantageConfig(Options):
    """Computation of advantages from rewards."""

    advantage_estimator: str = option(
        "gae", one_of_or_file(AdvantageEstimator), resume="must match"
    )
    """One of gae, reinforce, reinforce_baseline, rloo, group_norm, dr_grpo and remax, or your own, path.py:name.
    Of ours only gae has a critic; all others but reinforce and remax compare the responses to one prompt."""
    gamma: float = option(1.0, inside("[0, 1]"))
    """Discount per action token."""
    lambd: float = option(0.95, inside("[0, 1]"))
    """Lambda of generalized advantage estimation."""
    lambd_critic: float | None = option(None, inside("[0, 1]"), of_critic=True)
    """Lambda of the critic's targets (default: --lambd)."""
    adaptive_lambd_alpha: float | None = option(
        None, positive, "; None leaves it off", of_critic=True
    )
    """Use lambda = 1 - 1 / (alpha x response length) for the advantages instead of --lambd (VAPO: 0.05)."""
    normalize_advantages: Literal["default", "on", "off"] = "default"
    """Normalize over the action tokens of the whole buffer; default: gae, reinforce, reinforce_baseline, rloo."""


@dataclass(frozen=True)
class KLConfig(Options):
    """The penalty that holds the policy near the reference."""

    init_kl_coef: float = option(0.01, at_least(0))
    """Coefficient of the KL penalty; 0 loads no reference model. init_kl_coeff is read as this too."""
    kl_target: float | None = option(None, positive)
    """Adapt the coefficient so that the KL per action token approaches this value (default: keep it fixed)."""
    kl_horizon: int = option(10000, at_least(1), of_files=True)
    """With --kl_target: samples over which the coefficient adapts."""
    kl_controller: str | None = option(None, file_name, resume="must match")
    """Your own controller of the coefficient, path.py:name (default: fixed, or with --kl_target adaptive)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty: k1 in the reward, k2 or k3 in the loss (Schulman, Approximating KL Divergence)."""
    use_kl_loss: bool = False
    """Put the KL penalty into the policy loss instead of the token rewards (with --kl_estimator k2 or k3)."""

    def problems(self) -> Iterator[str]:
        if self.init_kl_coef == 0 and self.kl_target is not None:
            yield "--kl_target multiplies the coefficient, which --init_kl_coef 0 keeps at 0: use a positive one."
        if self.init_kl_coef == 0 and self.kl_controller is not None:
            yield "--kl_controller: --init_kl_coef 0 loads no reference to measure a KL: use a positive one."
        if self.init_kl_coef == 0 and self.use_kl_loss:
            yield "--use_kl_loss with --init_kl_coef 0 has no effect: give a positive --init_kl_coef."
        if self.use_kl_loss and self.kl_estimator == "k1":
            yield "--use_kl_loss with --kl_estimator k1 has no gradient but noise. Use --kl_estimator k2 or k3."
        if self.init_kl_coef > 0 and not self.use_kl_loss and self.kl_estimator != "k1":
            yield (
                f"--kl_estimator {self.kl_estimator} as a reward drives the policy away from the reference. "
                "Use --kl_estimator k1, or put it into the loss with --use_kl_loss."
            )


@dataclass(frozen=True)
class LossConfig(Options):
    """Policy and value losses."""

    policy_loss_type: str | None = option(None, one_of_or_file(PolicyLossType), resume="must match")
    """Clipped ratios of tokens (ppo) or of sequences (gspo), or log-probs with truncated weights (cispo). For samples
    of older weights: ratios to the engine's log-probs inside the clip range (double_sided), or ppo with recomputed old
    log-probs, weighted by p_actor / p_rollout where that is at most 5 (decoupled). Or your own, path.py:name. Default:
    ppo; with --max_staleness above 0 decoupled."""
    eps_clip: float = option(0.2, positive)
    """Clip range of the policy ratio (gspo: 3e-4, and 4e-4 for --eps_clip_high)."""
    eps_clip_high: float | None = option(None, positive)
    """Upper clip range of the policy ratio (default: --eps_clip; double_sided 0.28). Of cispo: largest weight of a
    token (default: 5)."""
    dual_clip: float | None = option(None, above(1))
    """Bound the loss of tokens with negative advantage by this times the advantage (above 1; usual: 3)."""
    loss_agg: LossAggregation | None = None
    """How token losses add up (default: token_mean; gspo sequence_mean; dr_grpo constant: by --generate_max_len)."""
    entropy_coef: float = option(0.0, not_negative)
    """Weight of the entropy bonus."""
    old_log_probs: OldLogProbs = "auto"
    """Source of the old policy's log-probs: the engine (rollout), another forward (recompute), or auto.
    With auto they are the engine's where those are exact, the training forward's where one step trains on all samples
    of a rollout, else recomputed."""
    rollout_correction: tuple[str, ...] = ()
    """Weight tokens by p_actor / p_rollout: truncated above (tis), or 0 outside a range (mis, icepop).
    More words change it, as in 'mis low=0.5 high=2 level=sequence veto=1e-4'. low and high are the ends of the range
    (default: tis up to 2, mis 0.5 to 2, icepop 0.5 to 5, geometric 0.99 to 1.01). level is sequence, for the product of
    a sequence's ratios, or geometric, for their geometric mean. veto leaves out sequences with a lower ratio."""
    value_clip: float | None = option(0.2, positive, "; None switches it off")
    """Clip range of the value around its old value; 'None' switches it off."""

    @property
    def correction(self) -> Correction:
        """``rollout_correction``, parsed; ``ValueError`` for words without a meaning."""
        return parse_correction(self.rollout_correction)

    @property
    def loss_type(self) -> str:
        """``policy_loss_type``; ppo by default, as this group of options knows no staleness."""
        return self.policy_loss_type or "ppo"

    @property
    def wanted_old_log_probs(self) -> OldLogProbs:
        """``old_log_probs``; for auto the only source that the loss works with, if there is just one."""
        if self.old_log_probs != "auto":
            return self.old_log_probs
        only_sources: dict[str, OldLogProbs] = {"double_sided": "rollout", "decoupled": "recompute"}
        return only_sources.get(self.loss_type, "auto")

    def problems(self) -> Iterator[str]:
        loss = self.loss_type
        correction = self.correction.method
        if self.dual_clip is not None and loss in ("cispo", "double_sided"):
            yield f"--dual_clip bounds a clipped loss, and {loss} has none: leave --dual_clip out."
        if loss == "double_sided" and self.old_log_probs == "recompute":
            yield (
                "--old_log_probs recompute has no effect with --policy_loss_type double_sided, which compares with the "
                "engine's: leave it out, or use --policy_loss_type decoupled."
            )
        if loss == "decoupled" and self.old_log_probs == "rollout":
            yield (
                "--old_log_probs rollout: --policy_loss_type decoupled compares the engine's with recomputed ones. "
                "Leave it out, or use --policy_loss_type double_sided."
            )
        if loss in ("double_sided", "decoupled") and correction != "none":
            yield (
                f"--rollout_correction {correction}: --policy_loss_type {loss} corrects by itself. Leave it out, or "
                "use --policy_loss_type ppo."
            )
        if self.old_log_probs == "rollout" and correction != "none":
            yield (
                f"--rollout_correction {correction} compares the engine's log-probs with recomputed ones, and "
                "--old_log_probs rollout recomputes none: leave one of them out."
            )
