"""Samples by hand."""

from dataclasses import replace
from typing import Any

from openppo.types import FinishReason, Prompt, Sample, Segment


def one_segment(
    token_ids: list[int],
    action_mask: list[bool],
    log_probs: list[float],
    versions: list[int],
    finish_reason: FinishReason,
    prompt: Prompt,
    group: int,
    token_rewards: list[float] | None = None,
    step_ends: list[bool] | None = None,
    trained_mask: list[bool] | None = None,
    **whole: Any,
) -> Sample:
    """Return a sample of one segment; ``whole`` are further fields of the sample."""
    segment = Segment(
        token_ids=token_ids,
        action_mask=action_mask,
        log_probs=log_probs,
        versions=versions,
        n_prompt=len(prompt.token_ids),
        finish_reason=finish_reason,
        media=prompt.media,
        token_rewards=token_rewards,
        step_ends=step_ends,
        trained_mask=trained_mask,
    )
    return Sample(prompt=prompt, group=group, segments=[segment], **whole)


def with_last(sample: Sample, **changes: Any) -> Sample:
    """Return a copy whose last segment has these fields."""
    return replace(sample, segments=[*sample.segments[:-1], replace(sample.last, **changes)])
