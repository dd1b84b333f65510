"""Experience from trajectories: log-probs, values, rewards and advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openppo.config import TrainPPOConfig
from openppo.experience.episode_segments import EpisodeSegments
from openppo.experience.estimators import group_moments
from openppo.experience.forwards import (
    Forwards,
    Model,
    OldLogProbsFrom,
    check_sampled,
    old_log_probs_from,
)
from openppo.experience.hooks import Hooks
from openppo.experience.measure import (
    measure_experience,
    measure_scores,
    measure_shaped,
    measure_signal,
    measure_sources,
    measure_staleness,
    measure_tasks,
    staleness,
)
from openppo.experience.own_estimator import estimator_of
from openppo.experience.own_kl_controller import make_kl_controller
from openppo.experience.replay_buffer import split_rows
from openppo.experience.reward_names import RewardNames
from openppo.experience.running_moments import RunningMoments
from openppo.experience.scoring import check_rewards
from openppo.experience.token_rewards import (
    StepRewards,
    collect_step_rewards,
    compute_reward,
    overlong_mask,
    shape_scores,
)
from openppo.models.log_probs import compute_approx_kl
from openppo.rollout.episodes import by_episode, episode_reward, whole_rewards
from openppo.rollout.rollout import Rollout, wait_for_scores
from openppo.tracking import Metrics
from openppo.types import Comm, Experience, Trajectory

_STATEFUL = ("kl_controller", "moments")


@dataclass(eq=False)
class ExperienceMaker:
    """Run the models over trajectories and compute the inputs of the losses; ``make`` does all of it.

    ``actor`` and ``reference`` (None without a KL) are called like ``Actor.forward``, ``critic`` (None for estimators
    without one) like a ``ScalarHeadModel``. All ranks call every method together; no group is split between ranks.

    >>> [experience.advantages.shape for experience in maker.make(trajectories, Metrics())]
    [torch.Size([1, 4]), torch.Size([1, 4])]
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
        self.estimator = estimator_of(self.config.advantage)
        self.weights = self.config.rewards.weights()
        self.measured_weights = None if self.config.rewards.are_none else self.weights
        self.moments = RunningMoments()

        evaluation = self.config.evaluation
        pass_on = evaluation.pass_on if evaluation.eval_reward_fn is None else None
        self.reward_names = RewardNames(self.weights, self.comm, pass_on)

        self.kl_controller = make_kl_controller(self.config.kl)

    @property
    def forwards(self) -> Forwards:
        """Forwards of the maker's current models."""
        return Forwards(
            actor=self.actor,
            critic=self.critic,
            reference=self.reference,
            config=self.config,
            comm=self.comm,
            device=self.device,
            pad_token_id=self.pad_token_id,
            hooks=self.hooks,
        )

    def make(
        self, trajectories: Sequence[Trajectory], metrics: Metrics, n_done: int = 0
    ) -> list[Experience]:
        """Make one experience per trajectory, in order, on this maker's device (``buffer_cpu_offload``: the host).

        Runs the models, then waits for scores still under way (or for a signal: ``Interrupted`` on all ranks).
        ``n_done`` is the number of global steps trained so far, which is also the policy's version.
        """
        batch = self._rewarded(trajectories, metrics, n_done)
        measure_staleness(trajectories, n_done, metrics)
        return self._completed(batch, trajectories, metrics, n_done=n_done)

    def count(self, samples: Sequence[object]) -> int:
        """Number of samples over all ranks."""
        return int(self.comm.all_reduce(torch.tensor(len(samples))))

    def state_dict(self) -> dict[str, Any]:
        """State for ``load_state_dict``, as JSON."""
        return {name: getattr(self, name).state_dict() for name in _STATEFUL}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the KL coefficient and the moments of rewards."""
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])

    def _rewarded(
        self, trajectories: Sequence[Trajectory], metrics: Metrics, n_done: int, values: bool = True
    ) -> Experience | None:
        """One batch with token rewards; None on a rank without trajectories. Without ``values`` no critic runs."""
        unscored = trajectories.unscored if isinstance(trajectories, Rollout) else trajectories
        timer = self.hooks.timer
        if self.hooks.sampled_ids.left_out:
            check_sampled(unscored, self.hooks.sampled_ids, self.comm)

        with timer.phase("experience"):
            source, is_stale = self._old_log_probs_from(trajectories, unscored, n_done)
            batch = self.forwards(unscored, source, values)
            if is_stale and batch is not None:
                behind = pad_sequence([staleness(t, n_done) for t in unscored], batch_first=True)
                batch = batch.with_fields(staleness=behind.to(self.device))

        with timer.phase("scoring"):
            wait_for_scores(trajectories, self.hooks.stop)
            check_rewards(unscored, self.comm, self.measured_weights is not None)
        self.reward_names.check(unscored)
        if isinstance(trajectories, Rollout):
            metrics.merge(trajectories.metrics)

        with timer.phase("experience"):
            shaping = self.config.shaping
            if shaping.normalize_reward and shaping.reward_normalizer == "running":
                episodes = by_episode(unscored)
                rewards = [episode_reward(segments, self.weights) for segments in episodes]
                self.moments.update(torch.tensor(rewards), self.comm)
            if batch is None:
                return None

            measure_scores(unscored, self.measured_weights, metrics)
            measure_sources(unscored, self.hooks.sources, self.measured_weights, metrics=metrics)
            rewards = whole_rewards(unscored, self.weights)
            batch = batch.with_fields(scores=torch.tensor(rewards, device=self.device))
            measure_tasks(unscored, batch, self.weights, n_done=n_done, metrics=metrics)
            return self._add_rewards(batch, unscored, metrics)

    def _completed(
        self,
        batch: Experience | None,
        trajectories: Sequence[Trajectory],
        metrics: Metrics,
        n_done: int,
    ) -> list[Experience]:
        """Add advantages and returns to a batch that has rewards (and values); return its rows."""
        if batch is None:
            return []

        with self.hooks.timer.phase("experience"):
            batch = self._add_returns(batch, n_done)
            measure_experience(batch, metrics)
            assert batch.advantages is not None
            measure_signal(
                trajectories,
                batch.advantages,
                batch.action_mask,
                weights=self.measured_weights,
                metrics=metrics,
            )

            if self.config.shaping.overlong_filter:
                mask = overlong_mask(batch.action_mask, batch.truncated)
                batch = batch.with_fields(action_mask=mask)
            if self.config.ppo.buffer_cpu_offload:
                batch = batch.to("cpu")
            return list(split_rows(batch))

    def _old_log_probs_from(
        self, trajectories: Sequence[Trajectory], unscored: Sequence[Trajectory], n_done: int
    ) -> tuple[OldLogProbsFrom, bool]:
        """Source of the old policy's log-probs; True if older policies sampled any token. Collective."""
        # Foreign log-probs come from another engine, or from an agent, whose varying batches change the last bits.
        is_from_engine = isinstance(trajectories, Rollout)
        is_foreign = not is_from_engine or any(t.episode is not None for t in unscored)
        is_stale = any(_versions(t) - {n_done} for t in unscored)
        counts = torch.tensor([len(unscored), int(is_foreign), int(is_stale)])
        n_samples, n_foreign, n_stale = self.comm.all_reduce(counts).tolist()

        trains_actor = n_done >= self.frozen_steps
        fits_one_update = 0 < n_samples <= self.config.batch.train_batch_size
        source = old_log_probs_from(
            self.config,
            single_update=fits_one_update and n_stale == 0 and trains_actor,
            by_engine=n_foreign == 0,
        )
        return source, n_stale > 0

    def _add_rewards(
        self, batch: Experience, trajectories: Sequence[Trajectory], metrics: Metrics
    ) -> Experience:
        """Add token rewards: KL penalty, and scores and step rewards less the baseline."""
        segments = EpisodeSegments(trajectories, self.device)
        scores, steps = self._shaped(trajectories, segments)
        measure_shaped(steps.added_to(scores), self.measured_weights, metrics)

        greedy = (
            self._greedy_rewards(trajectories, segments) if self.estimator.needs_greedy else None
        )
        if self.estimator.compares_steps:
            scores, steps = segments.outcomes(scores, steps)
        scores, step_rewards = self.estimator.rewards(scores, steps, segments.groups, greedy)
        scores, token_rewards = segments.split(scores, step_rewards)

        mask = batch.action_mask
        kl = None
        if batch.ref_log_probs is not None and not self.config.kl.use_kl_loss:
            # Only k1, used as a reward, has the gradient of the KL.
            kl = compute_approx_kl(batch.old_or_rollout_log_probs, batch.ref_log_probs, mask)

        kl_coef = self.kl_controller.value
        rewards = compute_reward(scores, kl, mask, kl_coef=kl_coef, token_rewards=token_rewards)
        return batch.with_fields(rewards=rewards)

    def _add_returns(self, batch: Experience, n_done: int) -> Experience:
        """Add advantages and returns; Monte-Carlo returns while the critic is pretrained."""
        assert batch.rewards is not None
        lambd_critic = 1.0 if n_done < self.config.ppo.value_pretrain_steps else None
        advantages, returns = self.estimator.advantages(
            batch.rewards, batch.values, batch.action_mask, self.config.advantage, lambd_critic
        )
        return batch.with_fields(advantages=advantages, returns=returns)

    def _greedy_rewards(
        self, trajectories: Sequence[Trajectory], segments: EpisodeSegments
    ) -> Tensor:
        """Shaped whole rewards (E,) of the greedy responses that belong to the episodes."""
        responses = [trajectories[row].greedy for row in segments.last.tolist()]
        assert all(responses), "each trajectory needs its greedy response"
        by_id = {id(segment): segment for response in responses for segment in response}
        distinct = list(by_id.values())
        greedy_segments = EpisodeSegments(distinct, self.device)
        scores, steps = self._shaped(distinct, greedy_segments)
        rewards = steps.added_to(scores)

        last_segments = [distinct[row] for row in greedy_segments.last.tolist()]
        places = {id(segment): place for place, segment in enumerate(last_segments)}
        return rewards[[places[id(response[-1])] for response in responses]]

    def _shaped(
        self, trajectories: Sequence[Trajectory], segments: EpisodeSegments
    ) -> tuple[Tensor, StepRewards]:
        """Scores (E,) of episodes, normalized, penalized and clipped by options, and rewards of their steps.

        Whole rewards are normalized: steps are divided by the std of whole rewards, and the score is the shaped whole
        reward less the steps, so that the mean is subtracted only once from an episode, however many steps it has.
        """
        total_scores = [t.total_score(self.weights) for t in trajectories]
        scores = torch.tensor(total_scores, dtype=torch.float32, device=self.device)
        step_rewards = collect_step_rewards(trajectories, self.device)
        scores, steps = segments.join(scores, step_rewards)

        shaping = self.config.shaping
        max_len = self.config.generation.generate_max_len
        if not shaping.normalize_reward or shaping.reward_normalizer == "model":
            scores = shape_scores(
                scores, segments.truncated, segments.longest, config=shaping, max_len=max_len
            )
            return scores, steps

        whole = steps.added_to(scores)
        if shaping.reward_normalizer == "group":
            mean, std = group_moments(whole, segments.groups)
            whole = (whole - mean) / std
            steps = StepRewards(steps.rewards / std[:, None], steps.ends)
        else:
            whole = self.moments.normalize(whole)
            steps = StepRewards(steps.rewards / self.moments.scale, steps.ends)

        whole = shape_scores(
            whole, segments.truncated, segments.longest, config=shaping, max_len=max_len
        )
        return steps.taken_from(whole), steps


def _versions(trajectory: Trajectory) -> set[int]:
    """Versions of the policies that sampled the trained actions."""
    return set(compress(trajectory.versions, trajectory.loss_mask))
