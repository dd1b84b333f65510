"""Samples, self-checks and distributions of a step or an evaluation, for people to look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.experience.measure import experience_histograms
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.log_probs import policy_ratio
from openppo.models.pretrained import eos_token_ids
from openppo.rollout.rollout import Rollout
from openppo.trainer.components import PPOComponents
from openppo.trainer.sample_rows import Row, choose, rollout_row, sample_key, sample_row, token_row
from openppo.trainer.self_check import check_samples
from openppo.types import Experience, FinishReason, Sample, Segment

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
        self.trained_on: Sequence[Sample] | None = None
        """Samples of the last step, until they are shown."""
        self._checks_next = config.tracking.self_check and self.comm.rank == 0
        self.observed: dict[tuple[int, ...], dict[str, Tensor]] = {}
        """Numbers (L,) of the last epoch's forwards, by ``sample_key``."""

    def begin_step(self) -> None:
        """Drop the numbers of an earlier step, which is kept if it was never shown."""
        self.observed.clear()

    def keep(self, samples: Sequence[Sample]) -> None:
        """Keep the ``samples`` that were trained on until they are shown."""
        self.trained_on = samples

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
        """Log the samples that ``step`` has trained on and their experience in ``buffer``; drop both."""
        if self.trained_on is None:  # an earlier session has logged them
            return
        trained = trained_samples(self.trained_on, buffer.items)
        if self._checks_next:
            self._check(step, trained, metrics)

        samples = [each.sample for each in trained]
        chosen = [trained[i] for i in choose(samples)] if self.comm.rank == 0 else []
        rows = [
            sample_row(each.sample, self.tokenizer, self.weights, rows=each.rows) for each in chosen
        ]
        failed = self.trained_on.failed if isinstance(self.trained_on, Rollout) else []
        tokens: list[Row] = []
        if self._shows_tokens(step):
            tokens = self._token_rows(chosen) + self._failed_tokens(failed)
        self._log(step, [*rows, *self._failed_rows(failed)], tokens)
        self._dump(step, "train", self.trained_on, weights=self.weights)

        if self.config.tracking.shows_histograms and step % self.config.run.logging_steps == 0:
            rewards: list[float] = []
            if self.weights is not None:
                weights = self.weights
                rewards = [sample.total_reward(weights) for sample in samples]
            histograms = experience_histograms(buffer.items, rewards, self.comm)
            self.components.trackers.log_histograms(step, histograms)
        buffer.clear()
        self.trained_on = None
        self.observed = {}

    def show_failed(self, step: int, failed: Sequence[Sample]) -> None:
        """Log the episodes whose failures end the run at ``step``, which is not trained."""
        self._log(step, self._failed_rows(failed), self._failed_tokens(failed))

    def show_evaluation(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples of an evaluation, with the numbers of the engine."""
        chosen = [samples[i] for i in choose(samples)] if self.comm.rank == 0 else []
        weights = self.components.grading.measured_weights
        rows = [sample_row(sample, self.tokenizer, weights) for sample in chosen]
        tokens = [token_row(sample, self.tokenizer) for sample in chosen]
        self._log(step, rows, tokens, evaluation=True)
        self._dump(step, "eval", samples, weights=weights)

    def _check(
        self, step: int, trained: Sequence["TrainedSample"], metrics: Mapping[str, float]
    ) -> None:
        """Check rows, except those that the limit of an episode has cut off."""
        rows: list[Experience] = []
        labels: list[Any] = []
        for each in trained:
            for segment, row in each.pairs():
                is_cut = segment.finish_reason is FinishReason.LENGTH
                if each.sample.truncates(segment) == is_cut:
                    rows.append(row)
                    labels.append(each.sample.prompt.label)
        if not rows:
            return

        self._checks_next = False
        check_samples(
            step,
            rows,
            self.tokenizer,
            eos_token_ids=eos_token_ids(self.components.actor.module.model, self.tokenizer),
            kl=self.config.kl,
            kl_coef=metrics.get("kl_coef", 0.0),
            labels=labels,
            one_score=self._has_one_score(),
        )

    def _has_one_score(self) -> bool:
        """True if only last tokens are scored; functions, steps and turns may reward others."""
        rewards = self.config.rewards
        sources = (rewards.reward_fn, rewards.remote_rm_url, rewards.prm_pretrain)
        if any(source is not None for source in sources):
            return False
        return all(sample.episode is None for sample in self.trained_on or [])

    def _token_rows(self, chosen: Sequence["TrainedSample"]) -> list[Row]:
        """Lines of tokens.jsonl of the ``chosen`` samples. Collective."""
        observed = self._observed_of([each.sample for each in chosen])
        return [
            token_row(each.sample, self.tokenizer, each.rows[-1], observed=numbers)
            for each, numbers in zip(chosen, observed, strict=True)
        ]

    def _failed_rows(self, failed: Sequence[Sample]) -> list[Row]:
        """Lines of samples.jsonl on rank 0, below those of the trained episodes."""
        if self.comm.rank != 0:
            return []
        return [sample_row(sample, self.tokenizer, self.weights) for sample in failed]

    def _failed_tokens(self, failed: Sequence[Sample]) -> list[Row]:
        """Lines of tokens.jsonl on rank 0: the tokens that the model read."""
        if self.comm.rank != 0:
            return []
        return [token_row(sample, self.tokenizer) for sample in failed]

    def _shows_tokens(self, step: int) -> bool:
        return step % -(-self.total_steps // N_TOKEN_STEPS) == 0 or step in (1, self.total_steps)

    def _observed_of(self, chosen: Sequence[Sample]) -> list[dict[str, Tensor]]:
        """Numbers of training forwards on rank 0's ``chosen`` samples, from the ranks that trained on them."""
        keys = [sample_key(sample.last) for sample in chosen]
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
        samples: Sequence[Sample],
        weights: Mapping[str, float] | None,
    ) -> None:
        """Log all of this rank's ``samples`` with ``--dump_rollouts``."""
        dump = self.config.dump
        if dump.dump_rollouts is None:
            return
        rows = []
        for i, sample in enumerate(samples):
            row = rollout_row(sample, self.tokenizer, weights)
            rows.append({"sample": i} | row)
        self.components.trackers.log_rollouts(step, split, rows)

    def _log(
        self, step: int, samples: Sequence[Row], tokens: Sequence[Row], evaluation: bool = False
    ) -> None:
        trackers = self.components.trackers
        start = {"evaluation": True} if evaluation else {}
        trackers.log_samples(step, [start | {"sample": i} | row for i, row in enumerate(samples)])
        trackers.log_tokens(step, [start | {"sample": i} | row for i, row in enumerate(tokens)])


@dataclass(frozen=True)
class TrainedSample:
    """A sample, and the experience (1, L) of each of its segments."""

    sample: Sample
    rows: Sequence[Experience]

    def pairs(self) -> list[tuple[Segment, Experience]]:
        """Segments with their experience."""
        return list(zip(self.sample.segments, self.rows, strict=True))


def trained_samples(samples: Sequence[Sample], rows: Sequence[Experience]) -> list[TrainedSample]:
    """Pair samples with ``rows``, the experience of all their segments in order."""
    trained: list[TrainedSample] = []
    start = 0
    for sample in samples:
        end = start + len(sample.segments)
        trained.append(TrainedSample(sample, rows[start:end]))
        start = end
    return trained
