"""Trajectories to tensors, and experiences apart and together again."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from torch import Tensor
from torch.nn import functional as F

from openppo.models.padding import pad_right
from openppo.types import Experience, FinishReason, Trajectory

PER_ROW_FIELDS = ("scores", "truncated", "weight")
"""Fields of shape (B,); all others are (B, L)."""


def collate(trajectories: Sequence[Trajectory], pad_token_id: int) -> Experience:
    """Right-padded tensors of the trajectories' tokens; masks come from lengths, never from token ids."""
    sequences, attention_mask = pad_right([t.token_ids for t in trajectories], pad_token_id)
    action_mask, _ = pad_right([t.action_mask for t in trajectories], 0)
    log_probs = torch.zeros(sequences.shape)
    for row, trajectory in enumerate(trajectories):
        log_probs[row, : len(trajectory.log_probs)] = torch.tensor(trajectory.log_probs)
    return Experience(
        sequences=sequences,
        attention_mask=attention_mask,
        action_mask=action_mask.bool(),
        rollout_log_probs=torch.where(action_mask.bool(), log_probs, 0.0),
        truncated=torch.tensor([t.finish_reason is FinishReason.LENGTH for t in trajectories]),
        weight=torch.tensor([t.weight for t in trajectories]),
    )


def split_rows(experience: Experience) -> Iterator[Experience]:
    """One experience per row, its padding cut off; copies, so that no row keeps the whole batch in memory."""
    lengths = experience.attention_mask.sum(-1).tolist()
    tensors = experience.tensors()
    for row, length in enumerate(lengths):
        yield Experience(
            **{
                name: (tensor[row : row + 1] if name in PER_ROW_FIELDS else tensor[row : row + 1, :length]).clone()
                for name, tensor in tensors.items()
            }
        )


def join_rows(rows: Sequence[Experience]) -> Experience:
    """Rows (or batches) padded on the right to the longest; padding is 0 and False everywhere, ids included."""
    width = max(row.sequences.shape[1] for row in rows)

    def joined(name: str, tensors: list[Tensor]) -> Tensor:
        if name in PER_ROW_FIELDS:
            return torch.cat(tensors)
        return torch.cat([F.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])

    names = rows[0].tensors()
    return Experience(**{name: joined(name, [row.tensors()[name] for row in rows]) for name in names})


def idle_experience(like: Experience | None = None) -> Experience:
    """One row of two tokens without any action, for a rank that has less to do than others."""
    shape, device = (1, 2), torch.device("cpu") if like is None else like.sequences.device
    shapes = {field.name: shape[:1] if field.name in PER_ROW_FIELDS else shape for field in fields(Experience)}
    made = {name: torch.zeros(of_field, device=device) for name, of_field in shapes.items()}
    made["sequences"] = made["sequences"].long()
    made["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=device)
    made |= {name: made[name].bool() for name in ("action_mask", "truncated")}
    return Experience(**made)
