"""Experience from samples: log-probs, values, rewards and advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openppo.config import TrainPPOConfig
from openppo.config.resolved import Resolved
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
from openppo.experience.sample_rows import SampleRows
from openppo.experience.scoring import check_rewards
from openppo.experience.token_rewards import (
    StepRewards,
    collect_step_rewards,
    compute_reward,
    overlong_mask,
    shape_scores,
)
from openppo.models.log_probs import compute_approx_kl
from openppo.rollout.rollout import Rollout, unscored, wait_for_scores
from openppo.tracking import Metrics
from openppo.types import Comm, Experience, Sample, Segment, segments_of

_STATEFUL = ("kl_controller", "moments")


@dataclass(eq=False)
class ExperienceMaker:
    """Run the models over segments and compute the inputs of the losses; ``make`` does all of it.

    ``actor`` and ``reference`` (None without a KL) are called like ``Actor.forward``, ``critic`` (None for estimators
    without one) like a ``ScalarHeadModel``. All ranks call every method together; no group is split between ranks.

    >>> [experience.advantages.shape for experience in maker.make(samples, Metrics())]
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
    values_in_training: bool = False
    """Leave values and advantages to ``OnePassUpdate`` where one optimizer step takes the whole rollout."""

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
    def resolved(self) -> Resolved:
        """Sizes and layout of batches: those of the run, or as the options state them."""
        return self.hooks.resolved or Resolved.of(self.config)

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
            resolved=self.resolved,
        )

    def make(
        self, samples: Sequence[Sample], metrics: Metrics, n_done: int = 0
    ) -> list[Experience]:
        """Make one experience per segment, in order, in CPU memory.

        Values, advantages and returns are missing where ``values_in_training`` leaves them to the update.
        Runs the models, then waits for scores still under way (or for a signal: ``Interrupted`` on all ranks).
        ``n_done`` is the number of global steps trained so far, which is also the policy's version.
        """
        batch = self._rewarded(samples, metrics, n_done)
        measure_staleness(samples, n_done, metrics)
        if batch is None:
            return []

        with self.hooks.timer.phase("experience"):
            if self.critic is None or batch.values is not None:
                batch = self.complete(batch, samples, metrics, n_done=n_done)
            return list(split_rows(batch.to("cpu")))

    def complete(
        self, batch: Experience, samples: Sequence[Sample], metrics: Metrics, n_done: int
    ) -> Experience:
        """Add and measure advantages and returns of a batch that has rewards, and values if there is a critic."""
        batch = self.add_returns(batch, n_done)
        measure_experience(batch, metrics)
        assert batch.advantages is not None
        measure_signal(
            samples,
            batch.advantages,
            batch.action_mask,
            weights=self.measured_weights,
            metrics=metrics,
        )
        if self.config.shaping.overlong_filter:
            mask = overlong_mask(batch.action_mask, batch.truncated)
            batch = batch.with_fields(action_mask=mask)
        return batch

    def add_returns(self, batch: Experience, n_done: int) -> Experience:
        """Add advantages and returns; Monte-Carlo returns while the critic is pretrained."""
        assert batch.rewards is not None
        lambd_critic = 1.0 if n_done < self.config.ppo.value_pretrain_steps else None
        advantages, returns = self.estimator.advantages(
            batch.rewards, batch.values, batch.action_mask, self.config.advantage, lambd_critic
        )
        return batch.with_fields(advantages=advantages, returns=returns)

    def count(self, items: Sequence[object]) -> int:
        """Number of items over all ranks."""
        return int(self.comm.all_reduce(torch.tensor(len(items))))

    def state_dict(self) -> dict[str, Any]:
        """State for ``load_state_dict``, as JSON."""
        return {name: getattr(self, name).state_dict() for name in _STATEFUL}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the KL coefficient and the moments of rewards."""
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(state[name])

    def _rewarded(
        self, samples: Sequence[Sample], metrics: Metrics, n_done: int
    ) -> Experience | None:
        """One batch with token rewards; None on a rank without samples."""
        timer = self.hooks.timer
        sampled = unscored(samples)
        if self.hooks.sampled_ids.left_out:
            check_sampled(sampled, self.hooks.sampled_ids, self.comm)

        with timer.phase("experience"):
            plan = self._plan_forwards(samples, n_done)
            batch = self.forwards(sampled, plan.old_log_probs, plan.values)
            if plan.is_stale and batch is not None:
                lags = [staleness(segment, n_done) for segment in segments_of(sampled)]
                behind = pad_sequence(lags, batch_first=True)
                batch = batch.with_fields(staleness=behind.to(self.device))

        with timer.phase("scoring"):
            wait_for_scores(samples, self.hooks.stop)
            check_rewards(samples, self.comm, self.measured_weights is not None)
        self.reward_names.check(samples)
        if isinstance(samples, Rollout):
            metrics.merge(samples.metrics)

        with timer.phase("experience"):
            shaping = self.config.shaping
            if shaping.normalize_reward == "running":
                self.moments.update(torch.tensor(self._total_rewards(samples)), self.comm)
            if batch is None:
                return None

            measure_scores(samples, self.measured_weights, metrics)
            measure_sources(samples, self.hooks.sources, self.measured_weights, metrics=metrics)
            rows = SampleRows(samples, self.device)
            rewards = torch.tensor(self._total_rewards(samples), device=self.device)  # (N,)
            batch = batch.with_fields(scores=rewards.repeat_interleave(rows.n_rows))
            measure_tasks(samples, batch, self.weights, n_done=n_done, metrics=metrics)
            return self._add_rewards(batch, samples, rows, metrics=metrics)

    def _total_rewards(self, samples: Sequence[Sample]) -> list[float]:
        """Total reward of each sample before shaping."""
        return [sample.total_reward(self.weights) for sample in samples]

    def _plan_forwards(self, samples: Sequence[Sample], n_done: int) -> "_ForwardPlan":
        """Forwards that the experience of all ranks' samples needs. Collective."""
        # Foreign log-probs come from another engine, or from an agent, whose varying batches change the last bits.
        is_from_engine = isinstance(samples, Rollout)
        sampled = unscored(samples)
        segments = segments_of(sampled)
        is_foreign = not is_from_engine or any(sample.episode is not None for sample in sampled)
        is_stale = any(_versions(segment) - {n_done} for segment in segments)
        counts = torch.tensor([len(segments), int(is_foreign), int(is_stale)])
        n_rows, n_foreign, n_stale = self.comm.all_reduce(counts).tolist()

        trains_actor = n_done >= self.frozen_steps
        fits_one_update = 0 < n_rows <= self.config.batch.train_batch_size
        return _ForwardPlan(
            old_log_probs=old_log_probs_from(
                self.config,
                single_update=fits_one_update and n_stale == 0 and trains_actor,
                by_engine=n_foreign == 0,
            ),
            values=not (self.values_in_training and fits_one_update),
            is_stale=n_stale > 0,
        )

    def _add_rewards(
        self, batch: Experience, samples: Sequence[Sample], rows: SampleRows, metrics: Metrics
    ) -> Experience:
        """Add token rewards: KL penalty, and scores and step rewards less the baseline."""
        scores, steps = self._shaped(samples, rows)
        measure_shaped(steps.added_to(scores), self.measured_weights, metrics)

        greedy = self._greedy_rewards(samples) if self.estimator.needs_greedy else None
        if self.estimator.compares_steps:
            scores, steps = rows.outcomes(scores, steps)
        scores, step_rewards = self.estimator.rewards(scores, steps, rows.groups, greedy)
        scores, token_rewards = rows.by_row(scores, step_rewards)

        mask = batch.action_mask
        kl = None
        if batch.ref_log_probs is not None and not self.config.kl.use_kl_loss:
            # Only k1, used as a reward, has the gradient of the KL.
            kl = compute_approx_kl(batch.old_or_rollout_log_probs, batch.ref_log_probs, mask)

        kl_coef = self.kl_controller.value
        rewards = compute_reward(scores, kl, mask, kl_coef=kl_coef, token_rewards=token_rewards)
        return batch.with_fields(rewards=rewards)

    def _greedy_rewards(self, samples: Sequence[Sample]) -> Tensor:
        """Shaped total rewards (N,) of the greedy responses that belong to the samples."""
        by_group: dict[int, Sample] = {}
        for sample in samples:
            assert sample.greedy is not None, "each sample needs its greedy response"
            by_group[sample.group] = sample.greedy
        greedy = list(by_group.values())
        scores, steps = self._shaped(greedy, SampleRows(greedy, self.device))

        places = {group: place for place, group in enumerate(by_group)}
        return steps.added_to(scores)[[places[sample.group] for sample in samples]]

    def _shaped(self, samples: Sequence[Sample], rows: SampleRows) -> tuple[Tensor, StepRewards]:
        """Scores (N,) of samples, normalized, penalized and clipped by options, and rewards of their steps.

        Total rewards are normalized: steps are divided by the std of total rewards, and the score is the shaped total
        reward less the steps, so that the mean is subtracted only once from a sample, however many steps it has.
        """
        total_scores = [sample.total_score(self.weights) for sample in samples]
        scores = torch.tensor(total_scores, dtype=torch.float32, device=self.device)
        steps = collect_step_rewards(samples, self.device)

        shaping = self.config.shaping
        max_len = self.config.generation.generate_max_len
        if shaping.normalize_reward in ("off", "model"):
            scores = shape_scores(
                scores, rows.truncated, rows.longest, config=shaping, max_len=max_len
            )
            return scores, steps

        whole = steps.added_to(scores)
        if shaping.normalize_reward == "group":
            mean, std = group_moments(whole, rows.groups)
            whole = (whole - mean) / std
            steps = StepRewards(steps.rewards / std[:, None], steps.ends)
        else:
            whole = self.moments.normalize(whole)
            steps = StepRewards(steps.rewards / self.moments.scale, steps.ends)

        whole = shape_scores(whole, rows.truncated, rows.longest, config=shaping, max_len=max_len)
        return steps.taken_from(whole), steps


@dataclass(frozen=True)
class _ForwardPlan:
    """Forwards that a rollout needs; ``is_stale`` if older policies sampled any token."""

    old_log_probs: OldLogProbsFrom
    values: bool
    is_stale: bool


def _versions(segment: Segment) -> set[int]:
    """Versions of the policies that sampled the trained actions."""
    return set(compress(segment.versions, segment.loss_mask))
