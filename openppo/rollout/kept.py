"""Trajectories that are kept until they are trained on: how old they are, and as JSON for checkpoints."""

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
    "share",
    "token_rewards",
    "step_ends",
]
_PLAIN += ["extras", "notes", "trained_mask", "reward_error"]


def as_json(group: Sequence[Trajectory]) -> dict[str, Any]:
    """The trajectories of one group; of their prompt only its place and the tokens read."""
    greedy = group[0].greedy
    rows = [*group, *greedy]
    numbers = episode_numbers(rows)
    episodes: dict[int, dict[str, Any] | None] = {}
    for number, row in zip(numbers, rows, strict=True):
        episodes[number] = (
            None
            if row.episode is None
            else {**vars(row.episode), "ending": row.episode.ending.value}
        )
    return {
        "rows": [
            _row(row) | {"episode": number} for number, row in zip(numbers, rows, strict=True)
        ],
        "episodes": list(episodes.values()),
        "greedy": len(greedy),
    }


def is_kept_whole(group: Sequence[Trajectory], prompt: Prompt) -> bool:
    """Whether ``as_json`` has all of a group with ``prompt``: images that an agent has shown it has not."""
    keys = [item.key for item in prompt.media]
    return all([item.key for item in row.prompt.media] == keys for row in group)


def from_json(saved: dict[str, Any], prompt: Prompt) -> list[Trajectory]:
    """The trajectories of a group with ``prompt``."""
    episodes = [
        None if e is None else Episode(**e | {"ending": Ending(e["ending"])})
        for e in saved["episodes"]
    ]
    rows = []
    for row in saved["rows"]:
        own = replace(prompt, token_ids=row["prompt_ids"])
        plain = {
            name: row[name] for name in _PLAIN if name in row
        }  # a checkpoint may be older than a name
        made = Trajectory(
            **plain,
            finish_reason=FinishReason(row["finish_reason"]),
            prompt=own,
            scores=dict(row["scores"]),
            stop=tuple(row.get("stop", ())),
            episode=episodes[row["episode"]],
        )
        rows.append(made)
    n_sampled = len(rows) - saved["greedy"]
    sampled, greedy = rows[:n_sampled], tuple(rows[n_sampled:])
    for trajectory in sampled:
        trajectory.greedy = greedy
    return sampled


def _row(row: Trajectory) -> dict[str, Any]:
    plain = {name: vars(row)[name] for name in _PLAIN}
    own = {
        "scores": dict(row.scores),
        "stop": row.stop,
        "finish_reason": row.finish_reason.value,
        "prompt_ids": row.prompt.token_ids,
    }
    return plain | own


def oldest_version(trajectory: Trajectory) -> int | None:
    """Version of the oldest action that losses read; None if they read none."""
    return min(compress(trajectory.versions, trajectory.loss_mask), default=None)


def without_old(trajectory: Trajectory, oldest: int) -> Trajectory:
    """A copy that is trained on from version ``oldest`` on; rewards still read all actions."""
    versions = zip(trajectory.versions, trajectory.loss_mask, strict=True)
    return replace(
        trajectory,
        trained_mask=[is_trained and version >= oldest for version, is_trained in versions],
    )
