"""Two samples token by token, as they are about to be trained on, and what must be true of them.

All numbers are those of the experience itself: nothing is computed again, but for the KL, by the function that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config.ppo import KLConfig
from openppo.experience.collate import join_rows
from openppo.experience.token_rewards import kl_penalty
from openppo.tracking.terminal import harmless
from openppo.types import Experience

_BEFORE, _FIRST, _LAST = 2, 3, 3
"""Tokens shown: of the prompt's end, and at both ends of what is trained on."""
_LONGEST_TOKEN = 16
_TINY = 1e-5
"""What float32 leaves of rewards of about 1 when the KL penalty is taken out again."""


@dataclass(frozen=True)
class SelfCheck:
    """What a person sees, and what should be true and is not."""

    page: RenderableType
    faults: list[str]


def self_check(
    items: Sequence[Experience],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Iterable[int],
    kl: KLConfig,
    kl_coef: float,
    one_score: bool = True,
) -> SelfCheck:
    """Of two of the samples ``items`` (each one row): one that ended with EOS and one that was cut, if there are both.

    ``kl_coef`` is what their rewards were made with; ``one_score`` says that no token but the last can have a reward.
    """
    ended = [i for i, item in enumerate(items) if not item.truncated[0]]
    cut = [i for i, item in enumerate(items) if item.truncated[0]]
    chosen = sorted([*ended[:1], *cut[:1], *ended[1:2], *cut[1:2]][:2])
    both = join_rows([items[i].to("cpu") for i in chosen])  # padded as a micro-batch is
    eos, penalty = set(eos_token_ids), 0.0 if kl.use_kl_loss else kl_coef
    pages: list[RenderableType] = []
    faults: list[str] = []
    for row in range(len(both)):
        sample = _Sample(both, row, tokenizer, eos, kl, penalty)
        pages += [Text.assemble((f"sample {row + 1}", "bold"), f": {sample.summary()}"), sample.table(), ""]
        faults += [f"sample {row + 1}: {fault}" for fault in sample.faults(one_score)]
    return SelfCheck(Group(*pages[:-1]), faults)


class _Sample:
    """One row of a batch, as lists with an entry for each token."""

    def __init__(
        self,
        batch: Experience,
        row: int,
        tokenizer: PreTrainedTokenizerBase,
        eos: set[int],
        kl: KLConfig,
        penalty: float,
    ) -> None:
        assert batch.rewards is not None and batch.scores is not None, "the experience is complete"
        self.tokenizer, self.eos = tokenizer, eos
        self.ids: list[int] = batch.sequences[row].tolist()
        self.attended: list[bool] = batch.attention_mask[row].tolist()
        self.trained: list[bool] = batch.action_mask[row].tolist()
        self.truncated, self.reward = bool(batch.truncated[row]), float(batch.scores[row])
        self.actions = [i for i, action in enumerate(self.trained) if action]
        rewards, per_token = batch.rewards[row].double(), torch.zeros(len(self.ids), dtype=torch.float64)
        if batch.ref_log_probs is not None:
            given = (batch.known_log_probs[row], batch.ref_log_probs[row], batch.action_mask[row])
            per_token = kl_penalty(*given, kl.kl_estimator).double()
        rest = rewards + penalty * per_token  # of a reward, without the KL penalty
        scale = max(1.0, float(rest.abs().max()))
        self.score: list[float] = torch.where(rest.abs() > _TINY * scale, rest, 0.0).tolist()
        self.scored = [i for i, score in enumerate(self.score) if score != 0]
        columns: list[tuple[str, Tensor | None]] = [
            ("log-prob", batch.known_log_probs),
            ("KL", None if batch.ref_log_probs is None else per_token[None]),
            ("value", batch.values),
            ("reward", batch.rewards),
            ("advantage", batch.advantages),
        ]
        self.columns: dict[str, list[float]] = {
            name: of[0 if name == "KL" else row].tolist() for name, of in columns if of is not None
        }

    def summary(self) -> str:
        """Where everything lies, in words; tokens count from 0."""
        n = sum(self.attended)
        if not self.actions:
            return f"{n} tokens, none of them trained on"
        first, last = self.actions[0], self.actions[-1]
        end = "cut by --generate_max_len, no EOS" if self.truncated else f"EOS at {last}, trained on"
        at = ", ".join(f"{self.score[i]:.4g} at {i}" for i in self.scored[:3]) or "0"
        more = f" and {len(self.scored) - 3} more" if len(self.scored) > 3 else ""
        trained = f"{len(self.actions)} of {n} tokens are trained on, {first} to {last}"
        return f"{trained}; {end}\nearned {self.reward:.4g}; in the rewards beside the KL penalty: {at}{more}"

    def faults(self, one_score: bool) -> list[str]:
        """What should be true of any experience and is not; of a sample that is left out of training nothing."""
        if not self.actions:
            return []
        n, outside = len(self.ids), [i for i, action in enumerate(self.trained) if not action]
        claims: list[tuple[str, Callable[[int], bool], Iterable[int]]] = [
            ("is trained on but is padding", lambda i: self.attended[i], self.actions),
            ("is real but comes after padding", lambda i: not self.attended[i] or all(self.attended[:i]), range(n)),
            ("is trained on but has a log-prob above 0", lambda i: self.columns["log-prob"][i] <= 0, self.actions),
        ]
        found = [f"token {i} {told}" for told, holds, places in claims for i in places if not holds(i)][:3]
        for name, column in self.columns.items():
            found += [f"token {i} is not trained on but has {name}" for i in outside if column[i] != 0][:1]
        if not self.truncated and self.ids[self.actions[-1]] not in self.eos:
            found.append(f"it ended by itself, but token {self.actions[-1]}, the last trained on, is no EOS")
        if one_score and self.scored not in ([], self.actions[-1:]):
            found.append(f"the score lies at token {self.scored[0]}, not only at the last one that is trained on")
        return found

    def table(self) -> Table:
        """Both ends of what is trained on, what has a score, and the padding's begin."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in ("", "token", "id", "attention", "action", *self.columns, ""):
            words = name in ("token", "") and bool(table.columns)
            table.add_column(name, justify="left" if words else "right", no_wrap=True)
        before = -1
        for i in self._shown():
            if i > before + 1:
                table.add_row("", Text(f"... {i - before - 1} more", style="dim"))
            numbers = [_number(column[i]) if self.trained[i] else "" for column in self.columns.values()]
            masks = [str(int(mask[i])) for mask in (self.attended, self.trained)]
            style = "" if self.trained[i] else "dim"
            cells = [Text(str(i)), Text(self._text(i)), Text(str(self.ids[i])), *map(Text, masks + numbers)]
            table.add_row(*cells, Text(self._notes(i), style="bold"), style=style)
            before = i
        if before < len(self.ids) - 1:
            table.add_row("", Text(f"... {len(self.ids) - 1 - before} more", style="dim"))
        return table

    def _shown(self) -> list[int]:
        n, real = len(self.ids), sum(self.attended)
        if not self.actions:
            return list(range(min(n, _BEFORE + _FIRST)))
        first = self.actions[0]
        shown = {*range(max(0, first - _BEFORE), first), *self.actions[:_FIRST], *self.actions[-_LAST:]}
        return sorted(shown | set(self.scored[-_LAST:]) | set(range(real, min(n, real + 1))))

    def _notes(self, i: int) -> str:
        notes = []
        if not self.attended[i]:
            notes.append("padding")
        elif self.actions and i == self.actions[0]:
            notes.append("first action")
        if self.trained[i] and self.ids[i] in self.eos:
            notes.append("EOS")
        if self.score[i] != 0:
            notes.append(f"score {self.score[i]:+.4g}")
        return ", ".join(notes)

    def _text(self, i: int) -> str:
        """The token with its blanks, which some tokenizers leave out when they decode it alone."""
        piece: str | None = self.tokenizer.convert_ids_to_tokens([self.ids[i]])[0]
        text = str(self.tokenizer.decode([self.ids[i]]))
        if piece is None or "\ufffd" in text or not text:
            text = piece or ""
        elif piece.startswith("\u2581") and not text.startswith(" "):
            text = " " + text
        return f"'{harmless(text[:_LONGEST_TOKEN])}'"


def _number(value: float) -> str:
    return f"{value:.4f}".replace("-0.0000", "0.0000") if abs(value) < 1000 else f"{value:.3g}"
