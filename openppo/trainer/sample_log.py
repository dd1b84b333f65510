"""What is shown of a step to people: a few samples and their tokens, the self-check, distributions."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.experience.measure import experience_histograms
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.loss import policy_ratio
from openppo.models.pretrained import eos_token_ids
from openppo.tracking import Trackers, json_form
from openppo.trainer.components import PPOComponents
from openppo.trainer.self_check import check_samples
from openppo.types import Comm, Experience, Trajectory

N_SAMPLES = 4
"""Samples that are logged of a step or of an evaluation."""
N_TOKEN_STEPS = 100
"""Steps of a run, about, whose samples are logged token by token."""
MAX_TOKENS = 2000
"""Longer responses keep this many tokens, half of them from either end."""
_CONTEXT = 6
"""Tokens before a token that its text may depend on: a leading blank, the bytes of one character."""

Row = dict[str, Any]


class StepDiagnostics:
    """Shows steps and evaluations; nothing is computed for it but histograms. All ranks call every method together."""

    def __init__(self, config: TrainPPOConfig, components: PPOComponents, total_steps: int) -> None:
        self.config = config
        self.components = components
        self.trained_on: Sequence[Trajectory] | None = None
        """Trajectories of the last step, until it is shown."""
        comm, weights = components.strategy.comm, config.rewards.weights()
        self._samples = SampleLog(comm, components.trackers, components.tokenizer, weights, total_steps)
        self._has_checked = not config.tracking.self_check or comm.rank != 0

    def observe(self, micro: Experience, log_probs: Tensor, entropy: Tensor | None) -> None:
        """Keep what the actor's training forward computed, if the step under way is logged token by token."""
        self._samples.observe(self.components.state.global_step + 1, micro, log_probs, entropy)

    def show_step(self, step: int, buffer: ReplayBuffer, metrics: Mapping[str, float]) -> None:
        """Log what ``step`` has trained on, ``trained_on`` and its experience in ``buffer``; drop both."""
        if self.trained_on is None:  # of an earlier session, which has logged it
            return
        if not self._has_checked and len(buffer) > 0:
            self._has_checked = True
            self._check(step, buffer, metrics.get("kl_coef", 0.0))
        self._samples.write(step, self.trained_on, buffer)
        if self.config.tracking.shows_histograms and step % self.config.run.logging_steps == 0:
            self.components.trackers.log_histograms(
                step, experience_histograms(buffer.items, self.components.strategy.comm)
            )
        buffer.clear()
        self.trained_on = None

    def show_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log samples of an evaluation."""
        self._samples.write_evaluation(step, trajectories)

    def _check(self, step: int, buffer: ReplayBuffer, kl_coef: float) -> None:
        tokenizer, rewards = self.components.tokenizer, self.config.rewards
        eos = eos_token_ids(self.components.actor.module.model, tokenizer)
        # a function may reward single tokens, and so may steps
        one_score = rewards.reward_fn is None and rewards.remote_rm_url is None and rewards.prm_pretrain is None
        check_samples(step, buffer.items, tokenizer, eos, self.config.kl, kl_coef, one_score)


class SampleLog:
    """Logs a few samples of rank 0, chosen by their prompts, so that the same ones return in each episode.

    Nothing is computed for it: ``observe`` keeps what training computes anyway. ``weights`` are those of rewards.
    """

    def __init__(
        self,
        comm: Comm,
        trackers: Trackers,
        tokenizer: PreTrainedTokenizerBase,
        weights: dict[str, float],
        total_steps: int,
    ) -> None:
        self.comm = comm
        self.trackers = trackers
        self.tokenizer = tokenizer
        self.weights = weights
        self.total_steps = total_steps
        self.every = -(-total_steps // N_TOKEN_STEPS)
        self._trained: dict[tuple[int, ...], dict[str, list[float]]] = {}  # by token ids, of the last epoch
        self._observed_step = 0

    def writes_tokens(self, step: int) -> bool:
        """Whether samples of ``step`` are logged token by token."""
        return step % self.every == 0 or step in (1, self.total_steps)

    def observe(self, step: int, micro: Experience, log_probs: Tensor, entropy: Tensor | None) -> None:
        """Keep ratio and entropy (B, L) of a training forward of ``step``; a later epoch replaces an earlier one."""
        if step != self._observed_step:  # a step that was never written leaves nothing
            self._observed_step, self._trained = step, {}
        if not self.writes_tokens(step):
            return
        ratio = policy_ratio(log_probs.detach(), micro.old_or_rollout_log_probs, micro.action_mask)
        numbers = {"ratio": ratio.tolist()} | ({} if entropy is None else {"entropy": entropy.detach().tolist()})
        lengths = micro.attention_mask.sum(-1).tolist()
        for row, (ids, n) in enumerate(zip(micro.sequences.tolist(), lengths, strict=True)):
            self._trained[tuple(ids[:n])] = {name: values[row][:n] for name, values in numbers.items()}

    def write(self, step: int, trajectories: Sequence[Trajectory], buffer: ReplayBuffer) -> None:
        """Log samples that ``step`` has trained on; ``buffer`` has experience of this rank's last ``trajectories``."""
        kept = list(trajectories)[len(trajectories) - len(buffer) :]  # without those dropped by --buffer_limit
        chosen = choose(kept) if self.comm.rank == 0 else []
        samples = [sample_row(kept[i], self.tokenizer, self.weights, buffer.items[i]) for i in chosen]
        tokens = []
        if self.writes_tokens(step):
            trained = self._of_all_ranks([kept[i] for i in chosen])
            for i, numbers in zip(chosen, trained, strict=True):
                tokens.append(token_row(kept[i], self.tokenizer, buffer.items[i], numbers))
        self._trained = {}
        self._log(step, samples, tokens)

    def write_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log samples of an evaluation: what the engine, which sampled them, reported."""
        chosen = [trajectories[i] for i in choose(trajectories)] if self.comm.rank == 0 else []
        samples = [{"evaluation": True} | sample_row(t, self.tokenizer, self.weights) for t in chosen]
        tokens = [{"evaluation": True} | token_row(t, self.tokenizer) for t in chosen]
        self._log(step, samples, tokens)

    def _of_all_ranks(self, chosen: Sequence[Trajectory]) -> list[dict[str, list[float]]]:
        """What training forwards computed of rank 0's ``chosen`` samples, on the ranks that trained on them."""
        wanted = self.comm.all_gather_object([tuple(t.token_ids) for t in chosen])[0]
        mine = {ids: self._trained[ids] for ids in wanted if ids in self._trained}
        found: dict[tuple[int, ...], dict[str, list[float]]] = {}
        for numbers in self.comm.all_gather_object(mine):
            found |= numbers
        return [found.get(tuple(t.token_ids), {}) for t in chosen]

    def _log(self, step: int, samples: Sequence[Row], tokens: Sequence[Row]) -> None:
        for log, rows in ((self.trackers.log_samples, samples), (self.trackers.log_tokens, tokens)):
            log(step, [_numbered(row, i) for i, row in enumerate(rows)])


def choose(trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices of at most ``N_SAMPLES``: one sample, or two of a group, of the prompts with the smallest checksums."""
    groups: dict[int, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(i)
    of_each = 1 if max(map(len, groups.values()), default=0) < 2 else 2

    def checksum(group: int) -> int:
        return zlib.crc32(repr(trajectories[groups[group][0]].prompt.token_ids).encode())

    return [i for group in sorted(groups, key=checksum) for i in groups[group][:of_each]][:N_SAMPLES]


def sample_row(
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict[str, float],
    experience: Experience | None = None,
) -> Row:
    """A line of samples.jsonl; of the ``experience`` (1, L) that was trained on, if any, the KL."""
    row = {
        "prompt": trajectory.prompt.text,
        "response": tokenizer.decode(trajectory.response_ids),
        "label": json_form(trajectory.prompt.label),  # Parquet has dates and bytes
        "finish_reason": trajectory.finish_reason.value,
        "reward": trajectory.total_reward(weights),
        "rewards": trajectory.scores,
        "response_length": sum(trajectory.action_mask),
    }
    kl = None if experience is None else _kl(experience)
    return row if kl is None else row | {"kl": float(kl.sum())}


def token_row(
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    experience: Experience | None = None,
    trained: dict[str, list[float]] | None = None,
) -> Row:
    """A line of tokens.jsonl: lists over the response's tokens, null where a token is not trained on.

    Numbers are those of the ``experience`` (1, L) and of the forwards that ``trained`` on it; without experience the
    engine's.
    """
    first, n = len(trajectory.prompt.token_ids), len(trajectory.token_ids)
    columns: dict[str, list[float]] = {"log_prob": trajectory.log_probs}
    mask = trajectory.action_mask
    if experience is not None:
        mask, kl, tensors = experience.action_mask[0].tolist(), _kl(experience), experience.tensors()
        columns = {"log_prob": experience.old_or_rollout_log_probs[0].tolist()} | (
            {} if kl is None else {"kl": kl[0].tolist()}
        )
        fields = {"value": "values", "reward": "rewards", "advantage": "advantages", "return": "returns"}
        fields["entropy"] = "entropy"
        columns |= {name: tensors[field][0].tolist() for name, field in fields.items() if field in tensors}
    columns |= trained or {}
    half = MAX_TOKENS // 2
    kept = list(range(first, n)) if n - first <= MAX_TOKENS else [*range(first, first + half), *range(n - half, n)]
    texts = token_texts(trajectory.token_ids, tokenizer, first)
    return {
        "first": first,
        "n_tokens": n - first,
        "texts": [texts[t - first] for t in kept],
        "ids": [trajectory.token_ids[t] for t in kept],
        "trained": [int(mask[t]) for t in kept],
    } | {  # with the six digits that float32 is sure of
        name: [float(f"{values[t]:.6g}") if mask[t] else None for t in kept] for name, values in columns.items()
    }


def token_texts(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, first: int = 0) -> list[str]:
    """The text that each token from ``first`` on adds; joined, they are the text.

    A token that only begins a character (byte-level BPE) adds nothing; the one that ends it adds all of it.
    """

    def text_of(start: int, end: int) -> str:
        text = tokenizer.decode(list(token_ids[start:end]), clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence is one text"
        return text

    texts, read = [], first
    for end in range(first + 1, len(token_ids) + 1):
        start = max(0, read - _CONTEXT)
        before, after = text_of(start, read), text_of(start, end)
        complete = not after.endswith("\ufffd") or end - read >= _CONTEXT or end == len(token_ids)
        texts.append(after[len(before) :] if complete else "")
        if complete:
            read = end
    return texts


def _numbered(row: Row, number: int) -> Row:
    evaluation = {"evaluation": True} if "evaluation" in row else {}
    return evaluation | {"sample": number} | row


def _kl(experience: Experience) -> Tensor | None:
    """k1 of the policy from the reference, (1, L); None without a reference."""
    if experience.ref_log_probs is None:
        return None
    return torch.where(experience.action_mask, experience.old_or_rollout_log_probs - experience.ref_log_probs, 0.0)
