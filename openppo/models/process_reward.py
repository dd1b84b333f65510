"""Process reward model: a causal language model that is read at the placeholder token after each step."""

from __future__ import annotations

from torch import Tensor, nn

from openppo.models.padding import widen


class ProcessRewardModel(nn.Module):
    """Wraps a Hugging Face causal language model ``.model``; the forward returns its logits at chosen places."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sequences: Tensor, places: Tensor) -> Tensor:
        """Logits (N, V) at the N true ``places``, row by row.

        ``sequences`` int64 and ``places`` bool, both (B, L), padded on the right. Logits are computed only in columns
        that some row asks for. Without any place the model runs all the same, as partitioned weights demand.
        """
        columns = places.any(0).nonzero()[:, 0]  # (K,)
        # Without attention mask for the reason given in Actor.forward.
        inputs = widen(sequences, self.model)
        logits = self.model(input_ids=inputs, logits_to_keep=columns, use_cache=False).logits  # (B, K, V)
        chosen: Tensor = logits[places[:, columns]]
        return chosen
