"""Scores in their samples."""

from dataclasses import replace

from openppo.types import Sample, Score, Segment


def scored(sample: Sample, score: Score) -> Sample:
    """Return a copy with the rewards of ``score`` beside its own; equal names replace them.

    Token rewards outside the action mask become 0; those of a turn's own rewards are added.
    """
    *earlier, last = sample.segments
    if score.token_rewards is not None:
        last = _with_token_rewards(last, score.token_rewards, score.step_ends)
    return replace(
        sample,
        segments=[*earlier, last],
        scores={**sample.scores, **score.rewards},
        extras={**sample.extras, **score.extras},
        notes={**sample.notes, **score.notes},
        reward_error=score.error if score.failed else None,
    )


def _with_token_rewards(
    segment: Segment, token_rewards: list[float], step_ends: list[bool] | None
) -> Segment:
    """Add token rewards to those that the segment has."""
    pairs = zip(token_rewards, segment.action_mask, strict=True)
    token_rewards = [reward if is_action else 0.0 for reward, is_action in pairs]
    if segment.token_rewards is None or segment.step_ends is None:
        return replace(segment, token_rewards=token_rewards, step_ends=step_ends)

    both_rewards = zip(token_rewards, segment.token_rewards, strict=True)
    all_ends = segment.action_mask if step_ends is None else step_ends
    both_ends = zip(all_ends, segment.step_ends, strict=True)
    return replace(
        segment,
        token_rewards=list(map(sum, both_rewards)),
        step_ends=list(map(any, both_ends)),
    )
