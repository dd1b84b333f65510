"""Trajectories that wait for training: their age, and their form in checkpoints, JSON."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from openppo.rollout.episodes import episode_numbers
from openppo.types import Ending, Episode, FinishReason, Prompt, Trajectory

_PLAIN = [
    "token_ids",
    "action_mask",
    "log_probs",
    "versions",
    "group",
    "weight",
    "fraction",
    "token_rewards",
    "step_ends",
    "extras",
    "notes",
    "trained_mask",
    "reward_error",
]
"""Fields that JSON holds as they are."""


def as_json(group: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the trajectories of one group as JSON, with only the tokens of their prompts."""
    greedy = group[0].greedy
    rows = [*group, *greedy]
    numbers = episode_numbers(rows)

    saved_rows: list[dict[str, Any]] = []
    episodes: dict[int, dict[str, Any] | None] = {}
    for number, row in zip(numbers, rows, strict=True):
        saved_rows.append(_row_as_json(row) | {"episode": number})
        episodes[number] = None if row.episode is None else _episode_as_json(row.episode)
    return {"rows": saved_rows, "episodes": list(episodes.values()), "greedy": len(greedy)}


def is_kept_whole(group: Sequence[Trajectory], prompt: Prompt) -> bool:
    """True if ``as_json`` holds all of a group: it has no images except those of ``prompt``."""
    keys = _image_keys(prompt)
    return all(_image_keys(row.prompt) == keys for row in group)


def from_json(saved: dict[str, Any], prompt: Prompt) -> list[Trajectory]:
    """Return the trajectories of a group with ``prompt``."""
    episodes = [None if entry is None else _episode(entry) for entry in saved["episodes"]]
    rows: list[Trajectory] = []
    for row in saved["rows"]:
        # The checkpoint may be older than some of the fields, and than the name of one.
        plain = {name: row[name] for name in _PLAIN if name in row}
        plain.setdefault("fraction", row.get("share", 1.0))
        trajectory = Trajectory(
            **plain,
            finish_reason=FinishReason(row["finish_reason"]),
            prompt=replace(prompt, token_ids=row["prompt_ids"]),
            scores=dict(row["scores"]),
            stop=tuple(row.get("stop", ())),
            episode=episodes[row["episode"]],
        )
        rows.append(trajectory)

    n_sampled = len(rows) - saved["greedy"]
    sampled = rows[:n_sampled]
    greedy = tuple(rows[n_sampled:])
    for trajectory in sampled:
        trajectory.greedy = greedy
    return sampled


def oldest_version(trajectory: Trajectory) -> int | None:
    """Version of the oldest action that is trained on; None without such actions."""
    return min(compress(trajectory.versions, trajectory.loss_mask), default=None)


def without_old(trajectory: Trajectory, oldest: int) -> Trajectory:
    """Return a copy that is trained on from version ``oldest`` on; rewards still read all actions."""
    actions = zip(trajectory.versions, trajectory.loss_mask, strict=True)
    trained_mask = [is_trained and version >= oldest for version, is_trained in actions]
    return replace(trajectory, trained_mask=trained_mask)


def _row_as_json(row: Trajectory) -> dict[str, Any]:
    plain = {name: vars(row)[name] for name in _PLAIN}
    converted = {
        "scores": dict(row.scores),
        "stop": row.stop,
        "finish_reason": row.finish_reason.value,
        "prompt_ids": row.prompt.token_ids,
    }
    return plain | converted


def _episode_as_json(episode: Episode) -> dict[str, Any]:
    return {**vars(episode), "ending": episode.ending.value}


def _episode(saved: dict[str, Any]) -> Episode:
    return Episode(**saved | {"ending": Ending(saved["ending"])})


def _image_keys(prompt: Prompt) -> list[int]:
    return [item.key for item in prompt.media]
