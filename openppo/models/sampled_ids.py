"""Ids that a policy can sample, the same ones in sampling and training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice

from torch import Tensor, inf


@dataclass(frozen=True)
class SampledIds:
    """All ids with logits except the ranges ``left_out`` before the softmax, in ascending order.

    ``media`` maps the id of each placeholder token to its kind. ``sampled_ids`` makes one for a model and its
    tokenizer, such as ``SampledIds((range(60, 61), range(62, 64)), {60: "image"})``.
    """

    left_out: tuple[range, ...] = ()
    media: Mapping[int, str] = field(default_factory=dict)

    def __contains__(self, token_id: int) -> bool:
        return not any(token_id in part for part in self.left_out)

    def first(self, n: int) -> list[int]:
        """The ``n`` lowest ids that can be sampled."""
        sampled = (token_id for token_id in count() if token_id in self)
        return list(islice(sampled, n))

    def mask(self, logits: Tensor) -> Tensor:
        """Write minus infinity into ``logits`` (..., V) at ids that are left out, and return ``logits``."""
        for part in self.left_out:
            logits[..., part.start : part.stop].fill_(-inf)
        return logits

    def why_not(self, token_id: int) -> str:
        """The reason why an id that is left out is never sampled."""
        kind = self.media.get(token_id)
        if kind is None:
            return f"the id {token_id} is never sampled, as the tokenizer does not know it"
        return f"the id {token_id} is never sampled, as it stands for {kind}s"

    def check_ends(self, eos_token_ids: Iterable[int], stop_token_ids: Iterable[int]) -> None:
        """Raise ``ValueError`` for a stop token, or for all EOS tokens, that can never be sampled."""
        for token_id in stop_token_ids:
            if token_id not in self:
                raise ValueError(
                    f"--stop_token_ids: {self.why_not(token_id)}. Leave it out, or use another id."
                )

        ends = [*eos_token_ids]
        if ends and not any(token_id in self for token_id in ends):
            raise ValueError(
                f"--pretrain: no response could end with EOS: {self.why_not(ends[0])}. Set eos_token_id in "
                "generation_config.json to a token of the tokenizer, or add that token to the tokenizer."
            )

    def __str__(self) -> str:
        """The ids that are left out, for a log line."""
        ids_by_kind: dict[str, list[int]] = {}
        for token_id, kind in self.media.items():
            ids_by_kind.setdefault(kind, []).append(token_id)

        parts = []
        for kind, token_ids in ids_by_kind.items():
            ids = ", ".join(map(str, sorted(token_ids)))
            parts.append(f"{ids} ({kind}s)")
        n_unknown = sum(map(len, self.left_out)) - len(self.media)
        if n_unknown > 0:
            parts.append(
                f"{n_unknown} that the tokenizer does not know, up to {self.left_out[-1][-1]}"
            )
        return ", ".join(parts)


ALL_IDS = SampledIds()
"""All ids of a model, none left out."""
