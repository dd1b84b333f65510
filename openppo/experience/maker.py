"""ExperienceMaker: trajectories to experience with log-probs, values, rewards and advantages."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openppo.config import TrainPPOConfig
from openppo.experience.estimators import ESTIMATORS, group_moments
from openppo.experience.measure import (
    measure_experience,
    measure_scores,
    measure_signal,
    measure_sources,
    measure_staleness,
    measure_tasks,
    staleness,
)
from openppo.experience.replay_buffer import collate, split_rows
from openppo.experience.reward_names import RewardNames
from openppo.experience.token_rewards import (
    AdaptiveKLController,
    EpisodeParts,
    FixedKLController,
    RunningMoments,
    StepRewards,
    check_rewarded,
    collect_step_rewards,
    compute_reward,
    overlong_mask,
    shape_scores,
)
from openppo.media import Media, distinct_ids
from openppo.models.batching import Deal, MicroBatchSize, equal_batches, split_overhead
from openppo.models.log_probs import compute_approx_kl
from openppo.models.padding import on_device, pad_right
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.rollout.rollout import Rollout, by_episode, episode_reward, wait_for_scores, whole_rewards
from openppo.tracking import Metrics, PhaseTimer, progress_bar
from openppo.tracking.phase import timed
from openppo.types import Comm, Experience, StopCheck, Trajectory

Model = Callable[..., Any]
OldLogProbsFrom = Literal["recompute", "rollout", "training"]
_STATEFUL = ("kl_controller", "moments")


@dataclass(frozen=True)
class Hooks:
    """What a run wants around the work of its maker, the names of the data ``sources`` of its prompts, and the ids
    that its policy can sample."""

    timer: PhaseTimer = field(default_factory=PhaseTimer)
    stop: StopCheck = field(default_factory=StopCheck)
    uncompiled: Callable[[], AbstractContextManager[None]] = nullcontext  # opened around forwards that train nothing
    sources: Mapping[str, str] = field(default_factory=dict)
    sampled_ids: SampledIds = ALL_IDS


@dataclass(eq=False)
class ExperienceMaker:
    """Runs the models over trajectories and computes what the losses need; ``make`` does all of it.

    ``actor`` and ``reference`` (None without a KL) are called like ``Actor.forward``, ``critic`` (None for estimators
    without one) like a ``ScalarHeadModel``. All ranks call every method together, groups being whole on a rank.
    """

    actor: Model
    critic: Model | None
    reference: Model | None
    config: TrainPPOConfig
    comm: Comm
    device: torch.device
    pad_token_id: int
    hooks: Hooks = field(default_factory=Hooks)

    def __post_init__(self) -> None:
        self.frozen_steps = self.config.ppo.frozen_actor_steps
        self.estimator = ESTIMATORS[self.config.advantage.advantage_estimator]
        self.weights = self.config.rewards.weights()
        evaluation = self.config.evaluation
        pass_on = evaluation.pass_on if evaluation.eval_reward_fn is None else None
        self.reward_names = RewardNames(self.weights, self.comm, pass_on)
        self.moments = RunningMoments()
        coef, target, horizon = self.config.kl.init_kl_coef, self.config.kl.kl_target, self.config.kl.kl_horizon
        fixed = FixedKLController(coef)
        self.kl_controller = fixed if target is None else AdaptiveKLController(coef, target, horizon)

    def make(self, trajectories: Sequence[Trajectory], metrics: Metrics, n_done: int = 0) -> list[Experience]:
        """One experience per trajectory, in their order, on this maker's device (``buffer_cpu_offload``: the host).

        Runs the models, then waits for scores still under way (or for a signal: ``Interrupted`` on all ranks).
        ``n_done`` global steps have been trained before, which is the policy's version.
        """
        batch = self._rewarded(trajectories, metrics, n_done)
        measure_staleness(trajectories, n_done, metrics)
        return self._completed(batch, trajectories, metrics, n_done)

    def count(self, samples: Sequence[object]) -> int:
        """Number of samples over all ranks."""
        return int(self.comm.all_reduce(torch.tensor(len(samples))))

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes, as JSON."""
        return {name: getattr(self, name).state_dict() for name in _STATEFUL}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the KL coefficient and the statistics of rewards."""
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])

    def _rewarded(
        self, trajectories: Sequence[Trajectory], metrics: Metrics, n_done: int, values: bool = True
    ) -> Experience | None:
        """One batch with token rewards; None on a rank without trajectories. Without ``values`` no critic runs."""
        unscored = trajectories.unscored if isinstance(trajectories, Rollout) else trajectories
        timer, shaping = self.hooks.timer, self.config.shaping
        if self.hooks.sampled_ids.left_out:
            check_sampled(unscored, self.hooks.sampled_ids, self.comm)
        with timer.phase("experience"):
            source, is_stale = self._old_log_probs_from(trajectories, unscored, n_done)
            batch = self._run_models(unscored, source, values)
            if is_stale and batch is not None:
                behind = pad_sequence([staleness(t, n_done) for t in unscored], batch_first=True)
                batch = batch.with_fields(staleness=behind.to(self.device))
        with timer.phase("scoring"):
            wait_for_scores(trajectories, self.hooks.stop)
            check_rewarded(unscored, self.comm)
        self.reward_names.check(unscored)
        if isinstance(trajectories, Rollout):
            metrics.merge(trajectories.metrics)
        with timer.phase("experience"):
            if shaping.normalize_reward and shaping.reward_normalizer == "running":
                rewards = [episode_reward(parts, self.weights) for parts in by_episode(unscored)]
                self.moments.update(torch.tensor(rewards), self.comm)
            if batch is None:
                return None
            measure_scores(unscored, self.weights, metrics)
            measure_sources(unscored, self.hooks.sources, self.weights, metrics)
            rewards = whole_rewards(unscored, self.weights)
            batch = batch.with_fields(scores=torch.tensor(rewards, device=self.device))
            measure_tasks(unscored, batch, self.weights, n_done, metrics)
            return self._add_rewards(batch, unscored, metrics)

    def _completed(
        self, batch: Experience | None, trajectories: Sequence[Trajectory], metrics: Metrics, n_done: int
    ) -> list[Experience]:
        """The rows of a batch with rewards (and values), with advantages and returns."""
        if batch is None:
            return []
        with self.hooks.timer.phase("experience"):
            batch = self._add_returns(batch, n_done)
            measure_experience(batch, metrics)
            assert batch.advantages is not None
            measure_signal(trajectories, batch.advantages, batch.action_mask, weights=self.weights, metrics=metrics)
            if self.config.shaping.overlong_filter:
                batch = batch.with_fields(action_mask=overlong_mask(batch.action_mask, batch.truncated))
            return list(split_rows(batch.to("cpu") if self.config.ppo.buffer_cpu_offload else batch))

    def _old_log_probs_from(
        self, given: Sequence[Trajectory], unscored: Sequence[Trajectory], n_done: int
    ) -> tuple[OldLogProbsFrom, bool]:
        """Source of the old policy's log-probs, and whether older policies sampled any token; the same on all ranks."""
        # Not sampled by this run's engine; or by an agent, whose requests meet in other batches each time, and so the
        # last bits of log-probs differ.
        foreign = not isinstance(given, Rollout) or any(t.episode is not None for t in unscored)
        stale = any({*compress(t.versions, t.loss_mask)} - {n_done} for t in unscored)
        counts = self.comm.all_reduce(torch.tensor([len(unscored), int(foreign), int(stale)]))
        n_samples, n_foreign, n_stale = counts.tolist()
        single_update = 0 < n_samples <= self.config.batch.train_batch_size and n_stale == 0
        trains_actor = n_done >= self.frozen_steps
        return old_log_probs_from(self.config, single_update and trains_actor, by_engine=n_foreign == 0), n_stale > 0

    def _run_models(
        self, trajectories: Sequence[Trajectory], old_log_probs: OldLogProbsFrom, values: bool
    ) -> Experience | None:
        """One batch with log-probs of actor and reference, entropy and values; None on a rank without trajectories."""
        runs_any = old_log_probs == "recompute" or (values and self.critic is not None) or self.reference is not None
        outputs = self._outputs(trajectories, old_log_probs == "recompute", values) if runs_any else {}
        if not trajectories:
            return None
        batch = collate(trajectories, self.pad_token_id).to(self.device).with_fields(**outputs)
        return batch.with_fields(log_probs=batch.rollout_log_probs) if old_log_probs == "rollout" else batch

    @torch.no_grad()
    def _outputs(self, trajectories: Sequence[Trajectory], recompute: bool, values: bool) -> dict[str, Tensor]:
        """Fields (B, L) of own trajectories, some from forwards on other ranks. Equally many forwards on all ranks."""
        shares, outputs = self.config.ppo.share_prompts == "auto", dict[str, Tensor]()
        groups = [(t.group, t.spans[0][0] if t.spans else 0) for t in trajectories if shares]
        deal = Deal([len(t.token_ids) for t in trajectories], self.comm, groups)
        rows = deal.out([torch.tensor([t.token_ids, t.loss_mask], dtype=torch.int32) for t in trajectories])
        media, made, lengths = deal.media([t.prompt.media for t in trajectories]), rows[:], [r.shape[1] for r in rows]
        ids = [distinct_ids(row[0].tolist(), of_row) for row, of_row in zip(rows, media, strict=True) if shares]
        with self.hooks.uncompiled():
            batches = equal_batches(lengths, forward_size(self.config), self.comm, ids)
            for chosen in progress_bar(batches, "experience", enabled=self.comm.rank == 0):
                outputs = self._forward([rows[i] for i in chosen], [media[i] for i in chosen], recompute, values)
                stacked = torch.stack([*outputs.values()]).float()  # (N, B, L)
                for row, i in enumerate(chosen):
                    made[i] = stacked[:, row, : lengths[i]].clone()  # no row keeps the whole batch in memory
        self.hooks.timer.count_tokens("experience", sum(lengths))
        own = [row.T for row in deal.back(made)]
        joined = pad_sequence(own, batch_first=True).to(self.device).permute(2, 0, 1).contiguous() if own else ()
        return dict(zip(outputs, joined, strict=False))

    def _forward(self, rows: list[Tensor], media: list[Media], recompute: bool, values: bool) -> dict[str, Tensor]:
        """Fields (B, L) of ``rows``, each (2, L): token ids, and 1 for actions. Without rows of an idle forward."""
        rows = rows or [torch.zeros(2, 2)]
        ids, mask = pad_right([row[0] for row in rows], self.pad_token_id)
        actions, outputs = pad_right([row[1] for row in rows], 0)[0].bool(), dict[str, Tensor]()
        more: dict[str, Any] = {"media": media} if any(media) else {}
        if recompute:
            with timed("actor_forward"):
                outputs["log_probs"], outputs["entropy"] = self.actor(ids, mask, actions, return_entropy=True, **more)
        if self.critic is not None and values:
            with timed("critic_forward"):
                outputs["values"] = torch.where(on_device(actions, self.device), self.critic(ids, mask, **more), 0.0)
        if self.reference is not None:
            with timed("reference_forward"):
                outputs["ref_log_probs"] = self.reference(ids, mask, actions, **more)
        return outputs

    def _add_rewards(self, batch: Experience, trajectories: Sequence[Trajectory], metrics: Metrics) -> Experience:
        """Add token rewards: KL penalty, scores and steps after the baseline."""
        parts = EpisodeParts(trajectories, self.device)
        scores, steps = self._shaped(trajectories, parts)
        metrics.add_tensor("shaped_reward", steps.added_to(scores))
        greedy = self._greedy_rewards(trajectories, parts) if self.estimator.needs_greedy else None
        if self.estimator.compares_steps:
            scores, steps = parts.outcomes(scores, steps)
        scores, token_rewards = parts.split(*self.estimator.rewards(scores, steps, parts.groups, greedy))

        mask = batch.action_mask
        kl = None
        if batch.ref_log_probs is not None and not self.config.kl.use_kl_loss:
            kl = compute_approx_kl(batch.old_or_rollout_log_probs, batch.ref_log_probs, mask)  # k1: the only right one

        kl_coef = self.kl_controller.value
        rewards = compute_reward(scores, kl, mask, kl_coef=kl_coef, token_rewards=token_rewards)
        return batch.with_fields(rewards=rewards)

    def _add_returns(self, batch: Experience, n_done: int) -> Experience:
        """Add advantages and returns: those of a Monte-Carlo rollout while only the critic learns its values."""
        assert batch.rewards is not None
        lambd_critic = 1.0 if n_done < self.config.ppo.value_pretrain_steps else None
        advantages, returns = self.estimator.advantages(
            batch.rewards, batch.values, batch.action_mask, self.config.advantage, lambd_critic
        )
        return batch.with_fields(advantages=advantages, returns=returns)

    def _greedy_rewards(self, trajectories: Sequence[Trajectory], parts: EpisodeParts) -> Tensor:
        """Shaped whole rewards (E,) of the greedy responses beside the episodes."""
        responses = [trajectories[row].greedy for row in parts.last.tolist()]
        assert all(responses), "each trajectory needs its greedy response"
        distinct = list({id(part): part for response in responses for part in response}.values())
        of_greedy = EpisodeParts(distinct, self.device)
        scores, steps = self._shaped(distinct, of_greedy)
        rewards = steps.added_to(scores)
        place_of_last = {id(distinct[row]): place for place, row in enumerate(of_greedy.last.tolist())}
        return rewards[[place_of_last[id(response[-1])] for response in responses]]

    def _shaped(self, trajectories: Sequence[Trajectory], parts: EpisodeParts) -> tuple[Tensor, StepRewards]:
        """Scores (E,) of episodes, normalized, penalized and clipped as options say, and rewards of their steps.

        Normalization is that of whole rewards: steps are divided by their std, and the score is what is then missing
        from the shaped whole, so that the mean is taken once from an episode however many steps it has.
        """
        total_scores = [t.total_score(self.weights) for t in trajectories]
        scores = torch.tensor(total_scores, dtype=torch.float32, device=self.device)
        scores, steps = parts.join(scores, collect_step_rewards(trajectories, self.device))

        shaping, max_len = self.config.shaping, self.config.generation.generate_max_len
        if not shaping.normalize_reward or shaping.reward_normalizer == "model":
            return shape_scores(scores, parts.truncated, parts.longest, shaping, max_len), steps

        whole = steps.added_to(scores)
        if shaping.reward_normalizer == "group":
            mean, std = group_moments(whole, parts.groups)
            whole = (whole - mean) / std
            steps = StepRewards(steps.rewards / std[:, None], steps.ends)
        else:
            whole = self.moments.normalize(whole)
            steps = StepRewards(steps.rewards / self.moments.scale, steps.ends)

        whole = shape_scores(whole, parts.truncated, parts.longest, shaping, max_len)
        return steps.taken_from(whole), steps


def check_sampled(trajectories: Sequence[Trajectory], ids: SampledIds, comm: Comm) -> None:
    """``ValueError`` on all ranks for an action that can never be sampled: its probability is 0. Collective."""
    left_out = set(chain.from_iterable(ids.left_out))
    problem = None
    for trajectory in trajectories:
        token_ids, mask = trajectory.token_ids, trajectory.loss_mask
        if not left_out.isdisjoint(compress(token_ids, mask)):
            place = next(t for t, is_action in enumerate(mask) if is_action and token_ids[t] in left_out)
            problem = f"token {place} of a sample is trained on, but {ids.why_not(token_ids[place])}"
            break

    if problems := [of_rank for of_rank in comm.all_gather_object(problem) if of_rank is not None]:
        remedy = "Set its action_mask to False, or, if it is an EOS or stop token, add it to the tokenizer."
        raise ValueError(f"{problems[0]}. {remedy}")


def old_log_probs_from(config: TrainPPOConfig, single_update: bool, by_engine: bool = True) -> OldLogProbsFrom:
    """Source of the old policy's log-probs, see ``--old_log_probs``; "training": the forward that is trained on.

    ``single_update``: one optimizer step trains the actor on all samples, with the weights that sampled them;
    ``by_engine``: this run's engine did. Log-probs of other trajectories may be anything.
    """
    if (wanted := config.loss.wanted_old_log_probs) != "auto":
        return wanted
    generation, ppo, batch = config.generation, config.ppo, config.batch
    cut = generation.top_p < 1 or generation.top_k is not None or generation.min_new_tokens > 0
    if not by_engine or cut or generation.rollout_engine != "hf" or config.loss.rollout_correction != "none":
        return "recompute"
    if not config.deepspeed.bf16:
        return "rollout"
    samples = config.prompts_per_step * ppo.n_samples_per_prompt
    always = samples <= batch.train_batch_size and batch.max_epochs == 1  # with several epochs ``entropy`` would change
    return "training" if single_update and always and config.lora.lora_dropout == 0 else "recompute"


def forward_size(config: TrainPPOConfig) -> MicroBatchSize:
    """Size of a forward that trains nothing."""
    rows, tokens = config.ppo.forward_rows, config.ppo.micro_rollout_tokens
    return MicroBatchSize(rows, tokens, split_overhead(config.deepspeed.zero_stage))
