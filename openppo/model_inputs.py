"""Inputs of models: token ids with their mask, positions and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from openppo.media import Media, TokenIds, Tokens, distinct_ids

_ORDER = "ModelInputs(sequences, attention_mask), int64 and bool, both (B, L)"


@dataclass(frozen=True)
class ModelInputs:
    """A batch as models read it, the first argument of every forward. Rows are padded on the right.

    Tensors may be on the host, where a forward counts tokens without waiting for a GPU. ``TypeError`` for a mask that
    is none.

    >>> inputs = ModelInputs.of_ids([[5, 6, 9], [5]], pad_token_id=0)
    >>> inputs.sequences.tolist(), inputs.lengths
    ([[5, 6, 9], [5, 0, 0]], [3, 1])
    """

    sequences: Tensor  # (B, L) int64
    attention_mask: Tensor  # (B, L) bool: a real token
    media: tuple[Media, ...] = ()  # images of each row, B of them; empty without images
    # (B, L) int64: from 0 in each document of a row, and documents do not see each other. None: a row is one document.
    position_ids: Tensor | None = None

    def __post_init__(self) -> None:
        named = {"sequences": self.sequences, "attention_mask": self.attention_mask}
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} is {tensor!r:.60}, no tensor: the order is {_ORDER}.")

        if self.sequences.is_floating_point() or self.attention_mask.is_floating_point():
            dtypes = f"{self.sequences.dtype} and {self.attention_mask.dtype}"
            raise TypeError(f"sequences and attention_mask are {dtypes}: the order is {_ORDER}.")
        if self.attention_mask.shape != self.sequences.shape:
            shapes = (
                f"{tuple(self.attention_mask.shape)}, and sequences {tuple(self.sequences.shape)}"
            )
            raise TypeError(f"attention_mask has the shape {shapes}: the order is {_ORDER}.")

    @classmethod
    def of_ids(cls, rows: Sequence[Sequence[int] | Tensor], pad_token_id: int) -> ModelInputs:
        """Pad rows of token ids on the right."""
        lengths = torch.tensor([len(row) for row in rows])
        tensors = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
        sequences = pad_sequence(tensors, batch_first=True, padding_value=pad_token_id)
        return cls(sequences, torch.arange(sequences.shape[1]) < lengths[:, None])

    @classmethod
    def of(cls, rows: Sequence[Tokens], pad_token_id: int) -> ModelInputs:
        """Pad the tokens of prompts, examples or segments on the right, with their images."""
        inputs = cls.of_ids([row.token_ids for row in rows], pad_token_id)
        return inputs.with_media([row.media for row in rows])

    @classmethod
    def join(cls, batches: Sequence[ModelInputs]) -> ModelInputs:
        """Join batches, padded to the longest with id 0."""
        width = max(batch.sequences.shape[1] for batch in batches)
        parts: dict[str, list[Tensor]] = {name: [] for name in batches[0].tensors()}
        media: list[Media] = []
        for batch in batches:
            media += batch.media or [()] * len(batch)
            for name, tensor in batch.widened(width).tensors().items():
                parts[name].append(tensor)

        joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
        return cls(media=(), **joined).with_media(media)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row."""
        lengths: list[int] = self.attention_mask.bool().sum(-1).tolist()
        return lengths

    @property
    def distinct_rows(self) -> list[list[int]]:
        """``distinct_ids`` of each row, without padding."""
        media = self.media or [()] * len(self)
        rows = zip(self.sequences.tolist(), self.lengths, media, strict=True)
        return [distinct_ids(TokenIds(row[:length], row_media)) for row, length, row_media in rows]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are set, by name; images have tensors of their own."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def with_media(self, media: Sequence[Media]) -> ModelInputs:
        """Return a copy with the images of each row."""
        return replace(self, media=tuple(media) if any(media) else ())

    def rows(self) -> Iterator[ModelInputs]:
        """Yield each row without padding, as a copy that does not keep the batch in memory."""
        assert self.position_ids is None, "packed documents have no rows of their own"
        for row, length in enumerate(self.lengths):
            tensors = {
                name: tensor[row : row + 1, :length].clone()
                for name, tensor in self.tensors().items()
            }
            yield ModelInputs(**tensors, media=self.media[row : row + 1])

    def widened(self, width: int) -> ModelInputs:
        """Return a copy with padding up to ``width`` columns, with id 0."""
        assert self.position_ids is None, "packed documents are padded when they are packed"
        tensors = {name: pad_to(tensor, width) for name, tensor in self.tensors().items()}
        return replace(self, media=self.media, **tensors)

    def to(
        self, device: torch.device | str, move: Callable[..., Tensor] = Tensor.to
    ) -> ModelInputs:
        """Return a copy on ``device``, to which ``move`` transfers each tensor."""
        tensors = {name: move(tensor, device) for name, tensor in self.tensors().items()}
        return replace(self, media=self.media, **tensors)


def pad_to(tensor: Tensor, width: int) -> Tensor:
    """Append zeros to the last dimension of ``tensor``, up to ``width``."""
    return F.pad(tensor, (0, width - tensor.shape[-1]))
