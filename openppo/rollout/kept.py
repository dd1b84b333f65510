"""Samples that wait for training: their age, and their form in checkpoints, JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from openppo.media import Media
from openppo.types import Ending, Episode, FinishReason, Prompt, Sample, Segment

_PLAIN_OF_SEGMENT = (
    "token_ids",
    "action_mask",
    "log_probs",
    "versions",
    "n_prompt",
    "token_rewards",
    "step_ends",
    "trained_mask",
)
_PLAIN = ("group", "weight", "scores", "extras", "notes", "stop", "reward_error")
"""Fields that JSON holds as they are."""


def as_json(group: Sequence[Sample]) -> dict[str, Any]:
    """Return the samples of one group as JSON, without their prompt."""
    greedy = group[0].greedy
    return {
        "samples": [_sample_as_json(sample) for sample in group],
        "greedy": None if greedy is None else _sample_as_json(greedy),
    }


def is_kept_whole(group: Sequence[Sample], prompt: Prompt) -> bool:
    """True if ``as_json`` holds all of a group: it has no images except those of ``prompt``."""
    keys = _image_keys(prompt.media)
    segments = [segment for sample in group for segment in sample.segments]
    return all(_image_keys(segment.media) == keys for segment in segments)


def from_json(saved: Mapping[str, Any], prompt: Prompt) -> list[Sample]:
    """Return the samples of a group with ``prompt``."""
    greedy = None if saved["greedy"] is None else _sample(saved["greedy"], prompt, greedy=None)
    return [_sample(sample, prompt, greedy) for sample in saved["samples"]]


def oldest_version(sample: Sample) -> int | None:
    """Version of the oldest action that is trained on; None without such actions."""
    versions: list[int] = []
    for segment in sample.segments:
        versions += compress(segment.versions, segment.loss_mask)
    return min(versions, default=None)


def newest_version(sample: Sample) -> int:
    """Version of the newest action; -1 without actions."""
    return max(max(segment.versions) for segment in sample.segments)


def without_old(sample: Sample, oldest: int) -> Sample:
    """Return a copy that is trained on from version ``oldest`` on; rewards still read all actions."""
    segments: list[Segment] = []
    for segment in sample.segments:
        actions = zip(segment.versions, segment.loss_mask, strict=True)
        trained_mask = [is_trained and version >= oldest for version, is_trained in actions]
        segments.append(replace(segment, trained_mask=trained_mask))
    return replace(sample, segments=segments)


def _sample_as_json(sample: Sample) -> dict[str, Any]:
    plain = {name: vars(sample)[name] for name in _PLAIN}
    segments = [_segment_as_json(segment) for segment in sample.segments]
    episode = sample.episode
    saved_episode = None if episode is None else {**vars(episode), "ending": episode.ending.value}
    return plain | {"segments": segments, "episode": saved_episode}


def _segment_as_json(segment: Segment) -> dict[str, Any]:
    plain = {name: vars(segment)[name] for name in _PLAIN_OF_SEGMENT}
    return plain | {"finish_reason": segment.finish_reason.value}


def _sample(saved: Mapping[str, Any], prompt: Prompt, greedy: Sample | None) -> Sample:
    plain = {name: saved[name] for name in _PLAIN}
    episode = saved["episode"]
    if episode is not None:
        episode = Episode(**{**episode, "ending": Ending(episode["ending"])})
    return Sample(
        prompt=prompt,
        segments=[_segment(segment, prompt.media) for segment in saved["segments"]],
        episode=episode,
        greedy=greedy,
        **plain | {"stop": tuple(plain["stop"])},
    )


def _segment(saved: Mapping[str, Any], media: Media) -> Segment:
    plain = {name: saved[name] for name in _PLAIN_OF_SEGMENT}
    return Segment(finish_reason=FinishReason(saved["finish_reason"]), media=media, **plain)


def _image_keys(media: Media) -> list[int]:
    return [item.key for item in media]
