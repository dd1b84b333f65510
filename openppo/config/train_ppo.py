"""The config of train_ppo, and which of its options cannot work together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from openppo.config.agents import AgentConfig
from openppo.config.asynchronous import async_problems
from openppo.config.data import PPODataConfig
from openppo.config.distillation import problems_of_own_rewards, problems_without_reward
from openppo.config.models import PPOModelConfig
from openppo.config.orchestrator import OrchestratorConfig
from openppo.config.ppo import (
    GROUP_ESTIMATORS,
    AdvantageConfig,
    KLConfig,
    LossConfig,
    PPOConfig,
)
from openppo.config.rewards import ENVIRONMENT_REWARDS, NO_REWARD, RewardConfig, RewardShapingConfig
from openppo.config.rollout import EvaluationConfig, GenerationConfig
from openppo.config.run import DumpConfig
from openppo.config.training import TrainingConfig


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
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    agents: AgentConfig = field(default_factory=AgentConfig)
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    dump: DumpConfig = field(default_factory=DumpConfig)

    def __post_init__(self) -> None:
        # The resolved loss is shown, saved and compared on resume.
        if self.loss.policy_loss_type is None:
            kind = "decoupled" if self.orchestrator.max_staleness > 0 else "ppo"
            object.__setattr__(self, "loss", replace(self.loss, policy_loss_type=kind))

    def training_ranks(self, world_size: int) -> int:
        """Return the number of ranks that train; ``ValueError`` if those that only sample leave none."""
        sampling = self.orchestrator.rollout_ranks
        if sampling >= world_size:
            ranks = f"{world_size} ranks" if world_size > 1 else f"{world_size} rank"
            raise ValueError(
                f"--rollout_ranks {sampling} of {ranks} leaves none to train: start more, or use fewer."
            )
        return world_size - sampling

    @property
    def eval_rewards(self) -> RewardConfig:
        """Rewards of evaluations; those of ``--eval_reward_fn`` have no weights."""
        function = self.evaluation.eval_reward_fn
        if function is None:
            return self.rewards
        return RewardConfig(
            reward_fn=function,
            reward_error_value=self.rewards.reward_error_value,
            step_separator=self.rewards.step_separator,
            reward_workers=self.rewards.reward_workers,
            reward_timeout=self.rewards.reward_timeout,
        )

    @property
    def measures_held_out_kl(self) -> bool:
        """True if evaluations estimate the KL to the reference, in place of a reward."""
        same_temperature = self.evaluation.eval_temperature == self.generation.temperature
        return self.rewards.are_none and same_temperature

    @property
    def prompts_per_step(self) -> int:
        """Prompts, or seeds of an environment, of one global step over all ranks."""
        return self.agents.n_envs or self.ppo.rollout_batch_size

    @property
    def logged_path(self) -> str:
        """Folder of the logs: ``--save_path``, or one beside it with ``--val_only``."""
        return self._beside_with_val_only(self.run.save_path)

    @property
    def dumped_path(self) -> str | None:
        """Folder of ``--dump_rollouts``, or one beside it with ``--val_only``; None without the option."""
        folder = self.dump.dump_rollouts
        return self._beside_with_val_only(folder) if folder else folder

    def _beside_with_val_only(self, folder: str) -> str:
        if not self.evaluation.val_only:
            return folder
        return f"{os.path.realpath(folder)}_val_only"

    @property
    def output_models(self) -> dict[str, str]:
        if self.evaluation.val_only:
            return {}
        models = super().output_models
        if self.model.save_value_network:
            folder = f"{os.path.realpath(self.run.save_path)}_critic"
            models |= {"--save_value_network: the critic's folder": folder}
        return models

    @property
    def nothing_held_out(self) -> bool:
        """True if no held-out prompts or seeds are given."""
        return self.evaluation.eval_data is None and self.agents.eval_n_envs == 0

    def missing_inputs(self, own_rewards: bool | None = None) -> Iterator[str]:
        if self.orchestrator.tasks is not None:
            return

        for flag in ("eval_before_training", "val_only"):
            if self.nothing_held_out and vars(self.evaluation)[flag]:
                yield f"--{flag} needs --eval_data."
        if self.nothing_held_out and self.evaluation.eval_reward_fn is not None:
            yield "--eval_reward_fn scores evaluations: give held-out prompts with --eval_data."

        has_environment = self.agents.environment is not None
        if self.data.prompt_data == "":
            has_no_end = self.agents.n_envs is None or self.ppo.max_steps is None
            if not has_environment:
                yield "No prompts are given: pass --prompt_data FILE."
            elif has_no_end:
                yield "--environment without --prompt_data has no rows to count: give --n_envs and --max_steps."

            if self.ppo.prompt_order != "shuffled":
                yield "--prompt_order orders the rows of --prompt_data, and none are given: leave it out."

        if has_environment and self.rewards.names():
            yield ENVIRONMENT_REWARDS
        yield from problems_of_own_rewards(self, own_rewards)
        if own_rewards is None:
            own_rewards = self.agents.may_give_rewards
        if not own_rewards:  # an agent names its rewards as it likes
            yield from self.rewards.unknown_weights()
            yield from self.eval_rewards.unknown_names("--pass_on", self.evaluation.pass_on)
        if not (self.rewards.are_none or self.rewards.names() or own_rewards):
            yield self.agents.why_no_reward + NO_REWARD
        yield from super().missing_inputs()

    def problems_on(self, ranks: int) -> Iterator[str]:
        yield from super().problems_on(ranks)
        yield from problems_without_reward(self)
        yield from self._sampling_problems(ranks)

        if self.ppo.offload_idle and self.deepspeed.adam_offload:
            yield "--offload_idle: --adam_offload has all of Adam on the host already; leave one of them out."
        if self.model.ref_pretrain is not None and self.kl.init_kl_coef == 0:
            yield "--ref_pretrain: --init_kl_coef 0 uses no reference model; leave one of them out."

        yield from self._count_problems(ranks)
        yield from async_problems(self)

        buffer = self.shaping.overlong_buffer_len
        longest = self.generation.generate_max_len
        if buffer is not None and buffer > longest:
            yield f"--overlong_buffer_len {buffer} is longer than --generate_max_len {longest}: make it shorter."

        if self.orchestrator.tasks is None:  # else each task has a size of its own
            yield from self.group_problems()
        yield from self._reward_problems()

    def _sampling_problems(self, ranks: int) -> Iterator[str]:
        sampling = self.generation
        is_cut = sampling.top_p < 1 or sampling.top_k is not None or sampling.min_new_tokens > 0
        if self.loss.old_log_probs == "rollout" and is_cut:
            yield "--old_log_probs rollout: with --top_p, --top_k or --min_new_tokens it is not exact; leave one out."
        pieces = sampling.vllm_tensor_parallel_size
        if ranks % pieces != 0:
            yield f"--vllm_tensor_parallel_size {pieces} does not divide the {ranks} ranks: use a divisor."
        if self.lora.load_in_4bit and sampling.rollout_engine == "vllm":
            yield "--rollout_engine vllm takes whole weights, and --load_in_4bit keeps none: leave one of them out."

    def _count_problems(self, ranks: int) -> Iterator[str]:
        batch = self.batch.train_batch_size
        prompts = self.prompts_per_step
        n = self.ppo.n_samples_per_prompt
        is_size_set = self.ppo.rollout_batch_size != PPOConfig.rollout_batch_size
        if self.agents.n_envs is not None and is_size_set:
            yield "--n_envs says how many seeds a step has, and so does --rollout_batch_size: leave one of them out."
        flag = "--n_envs" if self.agents.n_envs else "--rollout_batch_size"
        if prompts % ranks != 0:
            yield f"{flag} {prompts} does not divide among {ranks} ranks: use a multiple of {ranks}."
        if prompts * n % batch != 0:
            yield (
                f"{flag} {prompts} x --n_samples_per_prompt {n} = {prompts * n} samples do not divide into "
                f"optimizer steps of --train_batch_size {batch}: make it a divisor of that number."
            )

        if self.agents.form is not None:
            yield from self.data.unread_by_agents()
        adapts = self.kl.kl_target is not None and self.kl.kl_controller is None
        if adapts and 5 * self.kl.kl_horizon <= prompts * n:
            yield f"kl_horizon {self.kl.kl_horizon} is too short for a step of {prompts * n} samples: raise it."

    def _reward_problems(self) -> Iterator[str]:
        best = self.checkpoint.keep_best or ""
        pass_reward = self.evaluation.pass_reward
        pass_on = self.evaluation.pass_on
        yield from self.eval_rewards.pass_problems(pass_reward, pass_on)
        if "pass@" in best and self.eval_rewards.pass_threshold(pass_reward, pass_on) is None:
            yield f"--keep_best {best}: which reward of a reward model or server passes? Say so with --pass_reward."

        normalizer = self.shaping.normalize_reward
        if normalizer == "model" and self.rewards.reward_pretrain is None:
            yield "--normalize_reward: no --reward_pretrain has mean and std: use --normalize_reward running."
        if normalizer == "group":
            estimator = self.advantage.advantage_estimator
            reasons = {"group_norm": "does the same", "remax": "compares with a greedy response"}
            if estimator in reasons:
                yield (
                    f"--normalize_reward group: --advantage_estimator {estimator} {reasons[estimator]}: use another, "
                    "or leave out normalization."
                )

        verified = " ".join(sorted({"exact_match", "math"} & set(self.rewards.verifiers())))
        if verified and self.data.label_key is None and self.data.input_key is not None:
            yield f"--verifiable_reward {verified} compares with a label: name its column with --label_key."

    def group_problems(self) -> Iterator[str]:
        """Yield messages about options that compare the responses to one prompt, if there is a single response."""
        if self.ppo.n_samples_per_prompt > 1:
            return
        estimator = self.advantage.advantage_estimator
        comparing = {
            f"--advantage_estimator {estimator}": estimator in GROUP_ESTIMATORS,
            "--dynamic_sampling": self.ppo.dynamic_sampling,
            "--normalize_reward group": self.shaping.normalize_reward == "group",
        }
        for flag, compares in comparing.items():
            if compares:
                yield f"{flag} compares the responses to one prompt: use --n_samples_per_prompt of at least 2."
