"""Two samples as they are trained on, for people to check: PPO's token by token, supervised ones as text.

All numbers are those of the experience itself; only the KL is computed again, by the function that made it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config import KLConfig
from openppo.datasets import PreferenceExample, ProcessExample
from openppo.experience.replay_buffer import join_rows
from openppo.experience.token_rewards import kl_penalty
from openppo.models.supervised_loss import IGNORE_INDEX
from openppo.tracking.console import escape_control, log_lines, table_lines
from openppo.trainer.supervised.batches import TokenMicroBatch
from openppo.types import Experience

logger = logging.getLogger("openppo")

_SAMPLES, _SEGMENTS, _LONGEST, _LONGEST_TOKEN = 2, 6, 240, 16
_BEFORE, _ENDS = 2, 3  # tokens shown before the first action, and at both ends of the actions
_TINY = 1e-5  # what float32 leaves of rewards of about 1 when the KL penalty is taken out again
_HINT = "(--no_self_check leaves it out)"


def check_samples(
    step: int,
    items: Sequence[Experience],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Iterable[int],
    kl: KLConfig,
    kl_coef: float,
    one_score: bool = True,
) -> list[str]:
    """Log two of ``items``, one row each, that step number ``step`` trains on; returns faults, which are logged too.

    One sample ended with EOS and one was cut, if there are both. ``kl_coef`` is what their rewards were made with;
    ``one_score`` says that only the last token can have a score.
    """
    ended = [i for i, item in enumerate(items) if not item.truncated[0]]
    cut = [i for i, item in enumerate(items) if item.truncated[0]]
    chosen = sorted([*ended[:1], *cut[:1], *ended[1:2], *cut[1:2]][:_SAMPLES])
    both = join_rows([items[i].to("cpu") for i in chosen])  # padded as a micro-batch is
    eos, penalty = set(eos_token_ids), 0.0 if kl.use_kl_loss else kl_coef
    lines, faults = [f"self-check of step {step}: two samples as they are trained on {_HINT}", ""], []
    for row in range(len(both)):
        sample = _Sample(both, row, tokenizer, eos, kl, penalty)
        lines += [f"sample {row + 1}: {sample.summary()}", *sample.table(), ""]
        faults += [f"sample {row + 1}: {fault}" for fault in sample.faults(one_score)]
    log_lines("\n".join(lines).split("\n"))
    for fault in faults:
        logger.warning("self-check: %s; please report this with the lines above", fault)
    if not faults:
        logger.info("self-check: masks, EOS, score and padding lie where they should")
    return faults


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
            given = batch.old_or_rollout_log_probs[row], batch.ref_log_probs[row], batch.action_mask[row]
            per_token = kl_penalty(*given, kl.kl_estimator).double()
        rest = rewards + penalty * per_token  # of a reward, without the KL penalty
        scale = max(1.0, float(rest.abs().max()))
        self.score: list[float] = torch.where(rest.abs() > _TINY * scale, rest, 0.0).tolist()
        self.scored = [i for i, score in enumerate(self.score) if score != 0]
        columns: dict[str, Tensor | None] = {
            "log-prob": batch.old_or_rollout_log_probs[row],
            "KL": None if batch.ref_log_probs is None else per_token,
            "value": None if batch.values is None else batch.values[row],
            "reward": batch.rewards[row],
            "advantage": None if batch.advantages is None else batch.advantages[row],
        }
        self.columns = {name: column.tolist() for name, column in columns.items() if column is not None}

    def summary(self) -> str:
        """Places of actions, EOS and score in words; tokens count from 0."""
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
        """Claims that hold for any experience and not for this one; none of a sample left out of training."""
        if not self.actions:
            return []
        n, outside = len(self.ids), [i for i, action in enumerate(self.trained) if not action]
        claims: list[tuple[str, Callable[[int], bool], Iterable[int]]] = [
            ("is trained on but is padding", lambda i: self.attended[i], self.actions),
            ("is real but comes after padding", lambda i: not self.attended[i] or all(self.attended[:i]), range(n)),
            ("is trained on but has a log-prob above 0", lambda i: self.columns["log-prob"][i] <= 0, self.actions),
        ]
        found = [f"token {i} {fault}" for fault, holds, places in claims for i in places if not holds(i)][:3]
        for name, column in self.columns.items():
            found += [f"token {i} is not trained on but has {name}" for i in outside if column[i] != 0][:1]
        if not self.truncated and self.ids[self.actions[-1]] not in self.eos:
            found.append(f"it ended by itself, but token {self.actions[-1]}, the last trained on, is not EOS")
        if one_score and self.scored not in ([], self.actions[-1:]):
            found.append(f"the score lies at token {self.scored[0]}, not only at the last one that is trained on")
        return found

    def table(self) -> list[str]:
        """Both ends of the actions, scored tokens, and where padding begins."""
        rows: list[list[str]] = [["", "token", "id", "attention", "action", *self.columns, ""]]
        before = -1
        for i in [*self._shown(), len(self.ids)]:
            if i > before + 1:
                rows.append(["", f"... {i - before - 1} more"])
            if i < len(self.ids):
                masks = [str(int(mask[i])) for mask in (self.attended, self.trained)]
                numbers = [_number(column[i]) if self.trained[i] else "" for column in self.columns.values()]
                rows.append([str(i), self._text(i), str(self.ids[i]), *masks, *numbers, self._notes(i)])
            before = i
        return table_lines(rows, right=[0, *range(2, 5 + len(self.columns))])

    def _shown(self) -> list[int]:
        n, real = len(self.ids), sum(self.attended)
        if not self.actions:
            return list(range(min(n, _BEFORE + _ENDS)))
        first = self.actions[0]
        shown = {*range(max(0, first - _BEFORE), first), *self.actions[:_ENDS], *self.actions[-_ENDS:]}
        return sorted(shown | set(self.scored[-_ENDS:]) | set(range(real, min(n, real + 1))))

    def _notes(self, i: int) -> str:
        notes = [] if self.attended[i] else ["padding"]
        if self.actions and i == self.actions[0]:
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
        return f"'{escape_control(text[:_LONGEST_TOKEN])}'"


def _number(value: float) -> str:
    return f"{value:.4f}".replace("-0.0000", "0.0000") if abs(value) < 1000 else f"{value:.3g}"


def show_examples(micro_batch: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the first examples of a micro-batch of ``SupervisedTrainer``: what is read, and what the loss is of."""
    rows = []
    for number, parts in zip(range(1, _SAMPLES + 1), _examples(micro_batch, tokenizer), strict=False):
        for part, text in parts:
            shown = escape_control(text, _LONGEST, keep="end" if part == "read" else "start")
            rows.append((f"{number} {part}", shown))
    if rows:
        log_lines([f"self-check: what the first step trains on {_HINT}", "", *table_lines(rows), ""])


def _examples(micro_batch: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[tuple[str, str]]]:
    """Each example in parts: what a part is, and its text."""
    if isinstance(micro_batch, TokenMicroBatch):
        for ids, attended, trained in zip(*(tensor.tolist() for tensor in micro_batch[:3]), strict=True):
            n = sum(attended)
            yield _segments(ids[:n], [False, *trained[1:n]], tokenizer)
        return
    for example in micro_batch:
        if isinstance(example, PreferenceExample):
            sides = {"chosen": example.chosen_ids, "rejected": example.rejected_ids}
            yield [
                (side, f"score at token {len(ids) - 1}, '{tokenizer.decode(ids[-1:])}', of: {tokenizer.decode(ids)}")
                for side, ids in sides.items()
            ]
        elif isinstance(example, ProcessExample):
            judged = [(i, label) for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
            shown = [f"{x:.2f}" if isinstance(x, float) else str(tokenizer.decode([x])) for _, x in judged]
            places = ", ".join(f"{label} at {i}" for label, (i, _) in zip(shown, judged, strict=True))
            yield [("read", str(tokenizer.decode(example.token_ids))), ("judged", f"{len(judged)} steps: {places}")]


def _segments(ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Text in turns of reading and training; of many turns the last."""
    lines = []
    for is_trained, group in groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        tokens = [token for token, _ in group]
        text = f"{tokenizer.decode(tokens)} ({len(tokens)} tokens)"
        lines.append(("trained on" if is_trained else "read", text))
    return lines[-_SEGMENTS:]
