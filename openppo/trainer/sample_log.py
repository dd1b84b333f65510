"""Samples, self-checks and distributions of a step or an evaluation, for people to look at."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.experience.measure import experience_histograms
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.log_probs import policy_ratio
from openppo.models.pretrained import eos_token_ids
from openppo.rollout.episodes import by_episode, episode_reward, whole_rewards
from openppo.rollout.rollout import Rollout
from openppo.trainer.components import PPOComponents
from openppo.trainer.sample_rows import Row, choose, rollout_row, sample_key, sample_row, token_row
from openppo.trainer.self_check import check_samples
from openppo.types import Experience, FinishReason, Trajectory

N_TOKEN_STEPS = 100
"""Steps of a run, about, whose samples are logged token by token."""


class StepDiagnostics:
    """Logs samples of rank 0, self-checks and histograms. All ranks call every method together.

    Only histograms are computed for it: ``observe`` keeps what training computes anyway.
    """

    def __init__(self, config: TrainPPOConfig, components: PPOComponents, total_steps: int) -> None:
        self.config = config
        self.components = components
        self.total_steps = total_steps
        self.comm = components.strategy.comm
        self.tokenizer = components.tokenizer
        self.weights = None if config.rewards.are_none else config.rewards.weights()
        self.trained_on: Sequence[Trajectory] | None = None
        """Trajectories of the last step, until they are shown."""
        self._checks_next = config.tracking.self_check and self.comm.rank == 0
        self.observed: dict[tuple[int, ...], dict[str, Tensor]] = {}
        """Numbers (L,) of the last epoch's forwards, by ``sample_key``."""

    def observe(self, micro: Experience, log_probs: Tensor, entropy: Tensor | None) -> None:
        """Keep ratio and entropy (B, L) of a training forward, if tokens of the step are logged."""
        if not self._shows_tokens(self.components.state.global_step + 1):
            return
        ratio = policy_ratio(log_probs.detach(), micro.old_or_rollout_log_probs, micro.action_mask)
        numbers = {"ratio": ratio.cpu()}
        if entropy is not None:
            numbers["entropy"] = entropy.detach().cpu()

        lengths = micro.inputs.lengths
        for row, ids in enumerate(micro.inputs.distinct_rows):
            row_numbers = {name: rows[row][: lengths[row]] for name, rows in numbers.items()}
            self.observed[tuple(ids)] = row_numbers

    def show_step(self, step: int, buffer: ReplayBuffer, metrics: Mapping[str, float]) -> None:
        """Log the trajectories that ``step`` has trained on and their experience in ``buffer``; drop both."""
        if self.trained_on is None:  # an earlier session has logged them
            return
        n_dropped = len(self.trained_on) - len(buffer)  # by --buffer_limit
        kept = list(self.trained_on)[n_dropped:]
        if self._checks_next:
            self._check(step, kept, buffer, metrics=metrics)

        chosen = choose(kept) if self.comm.rank == 0 else []
        earned = _earned(kept, self.weights)
        samples = [
            sample_row(kept[i], self.tokenizer, earned[i], experience=buffer.items[i])
            for i in chosen
        ]
        failed = self.trained_on.failed if isinstance(self.trained_on, Rollout) else []
        tokens: list[Row] = []
        if self._shows_tokens(step):
            tokens = self._token_rows(chosen, kept, buffer) + self._failed_tokens(failed)
        self._log(step, [*samples, *self._failed_rows(failed)], tokens)
        self._dump(step, "train", self.trained_on, weights=self.weights)

        if self.config.tracking.shows_histograms and step % self.config.run.logging_steps == 0:
            earned_by_episode = []
            if self.weights is not None:
                weights = self.weights
                earned_by_episode = [
                    episode_reward(segments, weights) for segments in by_episode(kept)
                ]
            histograms = experience_histograms(buffer.items, earned_by_episode, self.comm)
            self.components.trackers.log_histograms(step, histograms)
        buffer.clear()
        self.trained_on = None
        self.observed = {}

    def show_failed(self, step: int, failed: Sequence[Trajectory]) -> None:
        """Log the episodes whose failures end the run at ``step``, which is not trained."""
        self._log(step, self._failed_rows(failed), self._failed_tokens(failed))

    def show_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log samples of an evaluation, with the numbers of the engine."""
        chosen = choose(trajectories) if self.comm.rank == 0 else []
        weights = self.components.grading.measured_weights
        earned = _earned(trajectories, weights)
        samples = [sample_row(trajectories[i], self.tokenizer, earned[i]) for i in chosen]
        tokens = [token_row(trajectories[i], self.tokenizer) for i in chosen]
        self._log(step, samples, tokens, evaluation=True)
        self._dump(step, "eval", trajectories, weights=weights)

    def _check(
        self,
        step: int,
        kept: Sequence[Trajectory],
        buffer: ReplayBuffer,
        metrics: Mapping[str, float],
    ) -> None:
        """Check samples, except those that the limit of an episode has cut off."""
        plain = [
            i
            for i, trajectory in enumerate(kept)
            if trajectory.truncated == (trajectory.finish_reason is FinishReason.LENGTH)
        ]
        if not plain:
            return

        self._checks_next = False
        check_samples(
            step,
            [buffer.items[i] for i in plain],
            self.tokenizer,
            eos_token_ids=eos_token_ids(self.components.actor.module.model, self.tokenizer),
            kl=self.config.kl,
            kl_coef=metrics.get("kl_coef", 0.0),
            labels=[kept[i].prompt.label for i in plain],
            one_score=self._has_one_score(),
        )

    def _has_one_score(self) -> bool:
        """True if only last tokens are scored; functions, steps and turns may reward others."""
        rewards = self.config.rewards
        sources = (rewards.reward_fn, rewards.remote_rm_url, rewards.prm_pretrain)
        if any(source is not None for source in sources):
            return False
        return all(trajectory.episode is None for trajectory in self.trained_on or [])

    def _token_rows(
        self, chosen: Sequence[int], kept: Sequence[Trajectory], buffer: ReplayBuffer
    ) -> list[Row]:
        """Lines of tokens.jsonl of the ``chosen`` samples. Collective."""
        observed = self._observed_of([kept[i] for i in chosen])
        return [
            token_row(kept[i], self.tokenizer, buffer.items[i], observed=numbers)
            for i, numbers in zip(chosen, observed, strict=True)
        ]

    def _failed_rows(self, failed: Sequence[Trajectory]) -> list[Row]:
        """Lines of samples.jsonl on rank 0, below those of the trained episodes."""
        if self.comm.rank != 0:
            return []
        reward = None if self.weights is None else 0.0
        return [sample_row(trajectory, self.tokenizer, reward) for trajectory in failed]

    def _failed_tokens(self, failed: Sequence[Trajectory]) -> list[Row]:
        """Lines of tokens.jsonl on rank 0: the tokens that the model read."""
        if self.comm.rank != 0:
            return []
        return [token_row(trajectory, self.tokenizer) for trajectory in failed]

    def _shows_tokens(self, step: int) -> bool:
        return step % -(-self.total_steps // N_TOKEN_STEPS) == 0 or step in (1, self.total_steps)

    def _observed_of(self, chosen: Sequence[Trajectory]) -> list[dict[str, Tensor]]:
        """Numbers of training forwards on rank 0's ``chosen`` samples, from the ranks that trained on them."""
        keys = [sample_key(t) for t in chosen]
        wanted = self.comm.all_gather_object(keys)[0]
        here = {key: self.observed[key] for key in wanted if key in self.observed}
        everywhere: dict[tuple[int, ...], dict[str, Tensor]] = {}
        for numbers in self.comm.all_gather_object(here):
            everywhere |= numbers
        return [everywhere.get(key, {}) for key in keys]

    def _dump(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        weights: Mapping[str, float] | None,
    ) -> None:
        """Log all of this rank's ``trajectories`` with ``--dump_rollouts``."""
        dump = self.config.dump
        if dump.dump_rollouts is None:
            return
        earned = _earned(trajectories, weights)
        rows = []
        for i, trajectory in enumerate(trajectories):
            row = rollout_row(trajectory, self.tokenizer, earned[i], tokens=dump.dump_tokens)
            rows.append({"sample": i} | row)
        self.components.trackers.log_rollouts(step, split, rows)

    def _log(
        self, step: int, samples: Sequence[Row], tokens: Sequence[Row], evaluation: bool = False
    ) -> None:
        trackers = self.components.trackers
        start = {"evaluation": True} if evaluation else {}
        trackers.log_samples(step, [start | {"sample": i} | row for i, row in enumerate(samples)])
        trackers.log_tokens(step, [start | {"sample": i} | row for i, row in enumerate(tokens)])


def _earned(
    trajectories: Sequence[Trajectory], weights: Mapping[str, float] | None
) -> Sequence[float | None]:
    """Return the whole reward of each trajectory's episode; None without rewards (``weights`` None)."""
    return [None] * len(trajectories) if weights is None else whole_rewards(trajectories, weights)
