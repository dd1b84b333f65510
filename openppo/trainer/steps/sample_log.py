"""Which samples are logged, and what is written of each of their tokens."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.experience.collate import idle_experience, join_rows
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.loss import policy_ratio
from openppo.tracking import json_form
from openppo.trainer.components import PPOComponents
from openppo.types import Experience, Trajectory

N_SAMPLES = 4
"""Samples that are logged of a step or of an evaluation."""
N_TOKEN_STEPS = 100
"""Steps of a run, about, whose samples are logged token by token."""
MAX_TOKENS = 2000
"""Longer responses keep this many tokens, half of them from either end."""
_CONTEXT = 6
"""Tokens before a token that its text may depend on: a leading blank, the bytes of one character."""

Sample = dict[str, Any]
TOKENS = "tokens"  # key of what goes to tokens.jsonl


class SampleLog:
    """Describes a few samples of rank 0 and hands them to the trackers. All ranks call every method together.

    Prompts are chosen by their content, so that the same ones are seen again in each episode and evaluation.
    """

    def __init__(self, config: TrainPPOConfig, parts: PPOComponents, total_steps: int) -> None:
        self.components = parts
        self.weights = config.rewards.weights()
        self.total_steps = total_steps
        self.every = -(-total_steps // N_TOKEN_STEPS)
        self.n_forwards = n_forwards(config)

    def describe(self, trajectories: Sequence[Trajectory], buffer: ReplayBuffer, step: int) -> list[Sample]:
        """What is known before training; ``buffer`` holds the experience of this rank's last ``trajectories``."""
        if not self.components.strategy.is_main:
            return []
        n_dropped = len(trajectories) - len(buffer)  # by --buffer_limit
        kept = list(trajectories)[n_dropped:]
        chosen = choose(kept)
        samples = self._readable([kept[i] for i in chosen], [buffer.items[i] for i in chosen])
        if not self._writes_tokens(step):
            for sample in samples:
                del sample[TOKENS]
        return samples

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Log what ``describe`` gave, after training: with the ratio and entropy of the policy as it is now."""
        if self._writes_tokens(step):
            self._add_policy_of_now([sample[TOKENS] for sample in samples if TOKENS in sample])
        self._log(step, samples, evaluation=False)

    def write_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log samples of an evaluation, with what the models say of them; ``Interrupted`` as of ``run_models``."""
        chosen = [trajectories[i] for i in choose(trajectories)] if self.components.strategy.is_main else []
        with self.components.strategy.uncompiled():
            self.components.train(False)
            experiences = self.components.maker.run_models(chosen)
        self._log(step, self._readable(chosen, experiences), evaluation=True)

    def _writes_tokens(self, step: int) -> bool:
        return step % self.every == 0 or step in (1, self.total_steps)

    def _readable(self, trajectories: Sequence[Trajectory], experiences: Sequence[Experience]) -> list[Sample]:
        samples = []
        for t, experience in zip(trajectories, experiences, strict=True):
            sample = readable(t, self.components.tokenizer, self.weights)
            kl = _kl(experience)
            if kl is not None:
                sample["kl"] = float(kl.sum())
            samples.append(sample | {TOKENS: token_rows(t, experience, self.components.tokenizer)})
        return samples

    @torch.no_grad()
    def _add_policy_of_now(self, rows: Sequence[Sample]) -> None:
        """``n_forwards`` on every rank, as partitioned weights need it; only rank 0 has ``rows``."""
        with self.components.strategy.uncompiled():
            self.components.train(False)
            size = -(-N_SAMPLES // self.n_forwards)
            for start in range(0, N_SAMPLES, size):
                some = rows[start : start + size]
                batch = join_rows([_experience(row.pop("sequence")) for row in some]) if some else idle_experience()
                batch = batch.to(self.components.strategy.device)
                inputs = batch.sequences, batch.attention_mask, batch.action_mask
                log_probs, entropy = self.components.actor(*inputs, return_entropy=True)
                ratio = policy_ratio(log_probs, batch.rollout_log_probs, batch.action_mask)
                for i, row in enumerate(some):
                    values = {"ratio": ratio[i : i + 1], "entropy": entropy[i : i + 1]}
                    _add_values(row, values, batch.action_mask[i : i + 1])

    def _log(self, step: int, samples: Sequence[Sample], evaluation: bool) -> None:
        kind = {"evaluation": True} if evaluation else {}
        numbered = [kind | {"sample": i} | sample for i, sample in enumerate(samples)]
        rows = [kind | {"sample": i} | sample[TOKENS] for i, sample in enumerate(samples) if TOKENS in sample]
        for row in rows:
            row.pop("sequence", None)
        self.components.trackers.log_samples(step, [{k: v for k, v in s.items() if k != TOKENS} for s in numbered])
        self.components.trackers.log_tokens(step, rows)


def n_forwards(config: TrainPPOConfig) -> int:
    """Forward passes of the actor over the samples of a step that is logged token by token."""
    rows, tokens = config.ppo.micro_rollout_batch_size, config.ppo.micro_rollout_tokens
    if tokens is not None:
        rows = max(1, tokens // (config.data.prompt_max_len + config.generation.generate_max_len))
    return -(-N_SAMPLES // min(N_SAMPLES, rows))


def choose(trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices of at most ``N_SAMPLES``: of the prompts with the smallest checksums, one sample each, or two of a group.

    Over the episodes the same prompts have the smallest checksums, whatever batches they fall into.
    """
    groups: dict[int, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(i)
    of_each = 1 if max(map(len, groups.values()), default=0) < 2 else 2

    def checksum(group: int) -> int:
        return zlib.crc32(repr(trajectories[groups[group][0]].prompt.token_ids).encode())

    return [i for group in sorted(groups, key=checksum) for i in groups[group][:of_each]][:N_SAMPLES]


def readable(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, weights: dict[str, float]) -> Sample:
    """What a line of samples.jsonl says; ``weights`` are those of the rewards by name."""
    return {
        "prompt": trajectory.prompt.text,
        "response": tokenizer.decode(trajectory.response_ids),
        "label": json_form(trajectory.prompt.label),  # Parquet has dates and bytes, which no checkpoint could hold
        "finish_reason": trajectory.finish_reason.value,
        "reward": trajectory.total_reward(weights),
        "rewards": trajectory.scores,
        "response_length": sum(trajectory.action_mask),
    }


def token_rows(trajectory: Trajectory, experience: Experience, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Lists over the response's tokens, of one sample's ``experience`` (1, L): null where a token is not trained on.

    ``sequence`` has the token ids, action mask and old log-probs of the whole trajectory: what another forward needs.
    """
    first, mask, tensors = len(trajectory.prompt.token_ids), experience.action_mask, experience.tensors()
    row: Sample = {
        "sequence": {
            "token_ids": trajectory.token_ids,
            "action_mask": mask[0].tolist(),
            "log_probs": experience.known_log_probs[0].tolist(),
        },
        "first": first,
        "n_tokens": len(trajectory.token_ids) - first,
    }
    kept = _kept(row)
    texts = token_texts(trajectory.token_ids, tokenizer, first)
    row["texts"] = [texts[t - first] for t in kept]
    row["ids"] = [trajectory.token_ids[t] for t in kept]
    row["trained"] = [int(mask[0, t]) for t in kept]
    per_token = {"log_prob": experience.known_log_probs, "kl": _kl(experience)}
    names = {"value": "values", "reward": "rewards", "advantage": "advantages", "return": "returns"}
    per_token |= {name: tensors.get(field) for name, field in names.items()}
    if "advantages" not in tensors:  # of an evaluation, whose policy is the one of now
        per_token["entropy"] = tensors.get("entropy")
    _add_values(row, per_token, mask)
    return row


def token_texts(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, first: int = 0) -> list[str]:
    """The text that each token from ``first`` on adds. Together they are the text.

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


def _kept(row: Sample) -> list[int]:
    """Positions in the sequence of the response's tokens that are written."""
    first, n = row["first"], row["n_tokens"]
    if n <= MAX_TOKENS:
        return list(range(first, first + n))
    return [*range(first, first + MAX_TOKENS // 2), *range(first + n - MAX_TOKENS // 2, first + n)]


def _add_values(row: Sample, tensors: dict[str, Tensor | None], mask: Tensor) -> None:
    """Numbers (1, L) as lists over the tokens that are written, to the six digits that float32 is sure of."""
    kept = _kept(row)
    trained = mask[0].tolist()
    for name, tensor in tensors.items():
        if tensor is not None:
            values = tensor[0].tolist()
            row[name] = [float(f"{values[t]:.6g}") if trained[t] else None for t in kept]


def _kl(experience: Experience) -> Tensor | None:
    """k1 of the policy from the reference, (1, L); None without a reference."""
    if experience.ref_log_probs is None:
        return None
    return torch.where(experience.action_mask, experience.known_log_probs - experience.ref_log_probs, 0.0)


def _experience(sequence: Sample) -> Experience:
    """A batch of one row; ``rollout_log_probs`` are the old policy's."""
    ids, mask = torch.tensor([sequence["token_ids"]]), torch.tensor([sequence["action_mask"]])
    return Experience(ids, torch.ones_like(mask), mask, torch.tensor([sequence["log_probs"]]), torch.tensor([False]))
