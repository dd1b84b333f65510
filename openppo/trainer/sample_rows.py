"""Samples and their tokens as rows of samples.jsonl, tokens.jsonl and ``--dump_rollouts``."""

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import compress, groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.datasets.message_parts import media_url
from openppo.datasets.templates import text_of
from openppo.media import TokenIds, Tokens, distinct_ids
from openppo.tracking import json_form
from openppo.trainer.self_check import token_columns, token_texts
from openppo.types import Experience, Sample, Segment

N_SAMPLES = 4
"""Samples that are logged of a step or of an evaluation."""
MAX_TOKENS = 2000
"""Tokens that are kept of a longer response, half of them from either end."""

Row = dict[str, Any]


def choose(samples: Sequence[Sample]) -> list[int]:
    """Return indices of at most ``N_SAMPLES``: one sample, or two of a group, for each prompt.

    Prompts are those with the smallest checksums, so the same return in each pass over the data.
    """
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)

    checksums = {}
    for group, (first, *_) in groups.items():
        key = sample_key(_prompt_tokens(samples[first].last))
        checksums[group] = zlib.crc32(repr(key).encode())

    chosen: list[int] = []
    for group in sorted(groups, key=checksums.__getitem__):
        chosen += groups[group][:2]
    return chosen[:N_SAMPLES]


def sample_key(tokens: Tokens) -> tuple[int, ...]:
    """Token ids that tell samples apart; those of images are distinct."""
    return tuple(distinct_ids(tokens))


def sample_row(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, float] | None,
    rows: Sequence[Experience] = (),
) -> Row:
    """Make a line of samples.jsonl, with the KL of the experience of its segments, (1, L) each, if given.

    ``weights`` are those of rewards; None in a run without rewards.
    """
    prompt = sample.prompt
    episode = sample.episode
    row: Row = {
        "prompt": prompt.text,
        "label": json_form(prompt.label),  # Parquet has dates and bytes
        **_answer(sample, tokenizer, weights),
        "source": prompt.source,
        "row": prompt.index,
        "group": sample.group,
        "segments": [_segment_summary(segment) for segment in sample.segments],
    }
    if sample.logged:
        row["extra"] = sample.logged
    if sample.greedy is not None:
        row["greedy"] = _answer(sample.greedy, tokenizer, weights)
    if episode is not None:
        row["ending"] = episode.ending.value
        row["turns"] = episode.n_turns
        row["messages"] = json_form(episode.messages)
        row["error"] = episode.error
        row["output"] = episode.output
        opening = takewhile(lambda message: message["role"] != "assistant", episode.messages)
        texts = (text_of(message.get("content")) for message in opening)
        row["prompt"] = prompt.text or "\n".join(texts)

    read = rendered(_prompt_tokens(sample.last), tokenizer)
    is_shown = read != row["prompt"] if episode is None else episode.n_turns > 0
    if is_shown:
        row["rendered_prompt"] = read
    kl = [token_columns(experience).get("kl") for experience in rows]
    if kl and kl[0] is not None:
        row["kl"] = sum(float(column.sum()) for column in kl if column is not None)
    return row


def _answer(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, weights: Mapping[str, float] | None
) -> Row:
    """Columns of a response and of what it earned."""
    columns: Row = {
        "response": tokenizer.decode(sample.last.response_ids),
        "finish_reason": sample.last.finish_reason.value,
        "response_length": sample.n_actions,
    }
    if weights is not None:
        columns["reward"] = sample.total_reward(weights)
        columns["rewards"] = dict(sample.scores)
    return columns


def _segment_summary(segment: Segment) -> Row:
    """Columns of a segment: runs of versions over its actions, and places of its token rewards."""
    versions = compress(segment.versions, segment.action_mask)
    rewards = enumerate(segment.token_rewards or [])
    ends = segment.step_ends or segment.action_mask
    return {
        "n_prompt": segment.n_prompt,
        "n_tokens": len(segment.token_ids),
        "actions": [list(span) for span in segment.spans],
        "versions": [[version, len(list(run))] for version, run in groupby(versions)],
        "token_rewards": [[place, reward] for place, reward in rewards if ends[place]],
        "finish_reason": segment.finish_reason.value,
    }


def _prompt_tokens(segment: Segment) -> TokenIds:
    """Tokens before the first turn, with all images of the segment."""
    return TokenIds(segment.prompt_ids, segment.media)


def rendered(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode a prompt with special tokens and tools; equal tokens of an image are counted."""
    images = {item.token_id for item in tokens.media}
    parts = []
    for is_image, run in groupby(tokens.token_ids, images.__contains__):
        ids = list(run)
        shown = ids[:1] if is_image else ids
        text = str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))
        parts.append(f"{text} x {len(ids)}" if is_image else text)
    return "".join(parts)


def rollout_row(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, float] | None,
) -> Row:
    """Make a line of ``--dump_rollouts``, with the same columns and types in any run.

    So all files make one table; without rewards the column ``reward`` has only nulls. Values that may have any type in
    a row of data are text: labels, and as JSON rewards, extras, messages and the greedy response.
    """
    row = sample_row(sample, tokenizer, weights)
    row["label"] = _label_text(row["label"])
    row["reward"] = None if weights is None else float(row["reward"])
    row["rewards"] = json.dumps(json_form(dict(sample.scores)))
    row["extra"] = json.dumps(sample.logged, ensure_ascii=False)
    if sample.episode is None:
        row |= {"ending": "", "turns": 1, "error": "", "output": ""}
    row["rendered_prompt"] = row.get("rendered_prompt", "")
    row["messages"] = json.dumps(row.get("messages"), ensure_ascii=False)
    row["greedy"] = json.dumps(row.get("greedy"), ensure_ascii=False)
    row["task"] = sample.prompt.task
    row["segments"] = [_dumped_segment(segment) for segment in sample.segments]
    return row


def _dumped_segment(segment: Segment) -> Row:
    """Columns of a segment that have a value in any run; lists have an entry for each token."""
    versions = list(compress(segment.versions, segment.action_mask))
    return {
        "n_prompt": segment.n_prompt,
        "n_tokens": len(segment.token_ids),
        "n_actions": segment.n_actions,
        "oldest_version": min(versions, default=-1),
        "newest_version": max(versions, default=-1),
        "finish_reason": segment.finish_reason.value,
        "token_ids": segment.token_ids,
        "action_mask": segment.action_mask,
        "log_probs": segment.log_probs,
        "versions": segment.versions,
        "token_rewards": segment.token_rewards or [0.0] * len(segment.token_ids),
    }


def _label_text(label: Any) -> str:
    """A label as text, as JSON if it is none."""
    if label is None:
        return ""
    if isinstance(label, str):
        return label
    return json.dumps(label, ensure_ascii=False)


def token_row(
    sample: Sample,
    tokenizer: PreTrainedTokenizerBase,
    experience: Experience | None = None,
    observed: Mapping[str, Tensor] | None = None,
) -> Row:
    """Make a line of tokens.jsonl: lists over the last segment's response, null for untrained tokens.

    Thumbnails are by the address of the image in messages. Numbers are those of the ``experience`` (1, L), else the
    engine's, and of training forwards that were ``observed``, (L,).
    """
    segment = sample.last
    first = segment.n_prompt
    n = len(segment.token_ids)
    if experience is not None:
        mask = experience.action_mask[0].tolist()
        columns = {name: column[0] for name, column in token_columns(experience).items()}
    else:
        mask = segment.action_mask
        columns = {"log_prob": torch.tensor(segment.log_probs, dtype=torch.float64)}
    columns |= observed or {}

    places = _kept_places(first, n)
    texts = token_texts(segment.token_ids, tokenizer, first)
    row: Row = {"first": first, "n_tokens": n - first, "texts": [texts[t - first] for t in places]}
    row |= _prompt_columns(segment.prompt_ids, tokenizer)
    row["ids"] = [segment.token_ids[t] for t in places]
    row["trained"] = [int(mask[t]) for t in places]
    if segment.media:
        row["images"] = {media_url(item.key): item.thumbnail for item in segment.media}
    if sample.episode is not None:
        row["turns"] = [[start - first, stop - first] for start, stop in segment.spans]

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
