"""Samples and their tokens as rows of samples.jsonl, tokens.jsonl and ``--dump_rollouts``."""

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.datasets.message_parts import media_url
from openppo.datasets.templates import text_of
from openppo.media import Tokens, distinct_ids
from openppo.rollout.episodes import episode_numbers
from openppo.tracking import json_form
from openppo.trainer.self_check import token_columns, token_texts
from openppo.types import Experience, Prompt, Trajectory

N_SAMPLES = 4
"""Samples that are logged of a step or of an evaluation."""
MAX_TOKENS = 2000
"""Tokens that are kept of a longer response, half of them from either end."""

Row = dict[str, Any]


def choose(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return indices of at most ``N_SAMPLES``: one sample, or two of a group, for each prompt.

    Prompts are those with the smallest checksums, so the same return in each pass over the data. An episode in several
    segments counts by its last.
    """
    groups: dict[int, list[int]] = {}
    last_parts = {number: i for i, number in enumerate(episode_numbers(trajectories))}
    for i in sorted(last_parts.values()):
        groups.setdefault(trajectories[i].group, []).append(i)

    checksums = {}
    for group, (first, *_) in groups.items():
        prompt = trajectories[first].prompt
        key = sample_key(prompt)
        checksums[group] = zlib.crc32(repr(key).encode())

    chosen: list[int] = []
    for group in sorted(groups, key=checksums.__getitem__):
        chosen += groups[group][:2]
    return chosen[:N_SAMPLES]


def sample_key(tokens: Tokens) -> tuple[int, ...]:
    """Token ids that tell samples apart; those of images are distinct."""
    return tuple(distinct_ids(tokens))


def sample_row(
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    reward: float | None,
    experience: Experience | None = None,
) -> Row:
    """Make a line of samples.jsonl, with the KL of the ``experience`` (1, L) if given.

    ``reward`` is that of the whole episode, of which the trajectory may be a part; None in a run without rewards.
    """
    prompt = trajectory.prompt
    episode = trajectory.episode
    rewards = {} if reward is None else {"reward": reward, "rewards": trajectory.scores}
    row = {
        "prompt": prompt.text,
        "response": tokenizer.decode(trajectory.response_ids),
        "label": json_form(prompt.label),  # Parquet has dates and bytes
        "finish_reason": trajectory.finish_reason.value,
        **rewards,
        "response_length": sum(trajectory.action_mask),
    }
    if trajectory.logged:
        row["extra"] = trajectory.logged
    if episode is not None:
        row["ending"] = episode.ending.value
        row["turns"] = episode.n_turns
        row["messages"] = json_form(episode.messages)
        row["error"] = episode.error
        row["output"] = episode.output
        opening = takewhile(lambda message: message["role"] != "assistant", episode.messages)
        texts = (text_of(message.get("content")) for message in opening)
        row["prompt"] = prompt.text or "\n".join(texts)

    read = rendered(prompt, tokenizer)
    is_shown = read != row["prompt"] if episode is None else episode.n_turns > 0
    if is_shown:
        row["rendered_prompt"] = read
    kl = None if experience is None else token_columns(experience).get("kl")
    if kl is not None:
        row["kl"] = float(kl.sum())
    return row


def rendered(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode a prompt with special tokens and tools; equal tokens of an image are counted."""
    images = {item.token_id for item in prompt.media}
    parts = []
    for is_image, run in groupby(prompt.token_ids, images.__contains__):
        ids = list(run)
        shown = ids[:1] if is_image else ids
        text = str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))
        parts.append(f"{text} x {len(ids)}" if is_image else text)
    return "".join(parts)


def rollout_row(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, reward: float | None, tokens: bool
) -> Row:
    """Make a line of ``--dump_rollouts``, with the same columns and types in any run.

    So all files make one table; without rewards the column ``reward`` has only nulls. Values that may have any type in
    a row of data are text: labels, and as JSON rewards, extras and messages.
    """
    prompt = trajectory.prompt
    row = sample_row(trajectory, tokenizer, reward)
    row["label"] = _label_text(row["label"])
    row["reward"] = None if reward is None else float(reward)
    row["rewards"] = json.dumps(json_form(trajectory.scores))
    row["extra"] = json.dumps(trajectory.logged, ensure_ascii=False)
    if trajectory.episode is None:
        row |= {"ending": "", "turns": 1, "error": "", "output": ""}
    row["rendered_prompt"] = row.get("rendered_prompt", "")
    row["messages"] = json.dumps(row.get("messages"), ensure_ascii=False)
    row["source"] = prompt.source
    row["task"] = prompt.task
    row["row"] = prompt.index
    row["group"] = trajectory.group
    if tokens:
        row["token_ids"] = trajectory.token_ids
        row["action_mask"] = trajectory.action_mask
        row["log_probs"] = trajectory.log_probs
    return row


def _label_text(label: Any) -> str:
    """A label as text, as JSON if it is none."""
    if label is None:
        return ""
    if isinstance(label, str):
        return label
    return json.dumps(label, ensure_ascii=False)


def token_row(
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    experience: Experience | None = None,
    observed: Mapping[str, Tensor] | None = None,
) -> Row:
    """Make a line of tokens.jsonl: lists over the response's tokens, null for untrained ones.

    Thumbnails are by the address of the image in messages. Numbers are those of the ``experience`` (1, L), else the
    engine's, and of training forwards that were ``observed``, (L,).
    """
    first = len(trajectory.prompt.token_ids)
    n = len(trajectory.token_ids)
    if experience is not None:
        mask = experience.action_mask[0].tolist()
        columns = {name: column[0] for name, column in token_columns(experience).items()}
    else:
        mask = trajectory.action_mask
        columns = {"log_prob": torch.tensor(trajectory.log_probs, dtype=torch.float64)}
    columns |= observed or {}

    places = _kept_places(first, n)
    texts = token_texts(trajectory.token_ids, tokenizer, first)
    row: Row = {"first": first, "n_tokens": n - first, "texts": [texts[t - first] for t in places]}
    row |= _prompt_columns(trajectory.token_ids[:first], tokenizer)
    row["ids"] = [trajectory.token_ids[t] for t in places]
    row["trained"] = [int(mask[t]) for t in places]
    media = trajectory.prompt.media
    if media:
        row["images"] = {media_url(item.key): item.thumbnail for item in media}
    if trajectory.episode is not None:
        row["turns"] = [[start - first, stop - first] for start, stop in trajectory.spans]

    for name, column in columns.items():
        values = column.tolist()
        # float32 is sure of six digits
        row[name] = [float(f"{values[t]:.6g}") if mask[t] else None for t in places]
    return row


def _kept_places(first: int, end: int) -> list[int]:
    """Places of a response's tokens, of a long one the first and the last."""
    if end - first <= MAX_TOKENS:
        return list(range(first, end))
    half = MAX_TOKENS // 2
    return [*range(first, first + half), *range(end - half, end)]


def _prompt_columns(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Row:
    """Tokens of a prompt, of a long one the first and the last."""
    if len(ids) <= MAX_TOKENS:
        return {"prompt_ids": ids, "prompt_texts": token_texts(ids, tokenizer)}
    half = MAX_TOKENS // 2
    first = token_texts(ids[:half], tokenizer)
    last = token_texts(ids, tokenizer, len(ids) - half)
    return {"prompt_ids": ids[:half] + ids[-half:], "prompt_texts": first + last}
