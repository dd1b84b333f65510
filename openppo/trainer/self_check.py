"""Self-check of PPO: two samples as they are trained on, token by token.

All numbers are those of the experience itself; only the KL is computed again, by k1.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import KLConfig
from openppo.experience.replay_buffer import join_rows
from openppo.models.log_probs import compute_approx_kl
from openppo.tracking.console import escape_control, log_lines, table_lines
from openppo.types import Experience

HINT = "(--no_self_check leaves it out)"
N_SHOWN = 2
"""Samples in the log."""
LONGEST = 240
"""Characters of a text in the log."""

_COLUMNS = ("log_prob", "kl", "value", "reward", "advantage")
_LONGEST_TOKEN = 8  # characters
_BEFORE = 2  # tokens shown before the first action
_ENDS = 3  # tokens shown at both ends of the actions

_CONTEXT = 6
"""Tokens before one that its text may depend on: a leading blank, bytes of a character."""

_TINY = 1e-5
"""Rounding in float32 of rewards of about 1, minus the KL penalty."""


def check_samples(
    step: int,
    items: Sequence[Experience],
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Iterable[int],
    kl: KLConfig,
    kl_coef: float,
    labels: Sequence[Any],
    one_score: bool = True,
) -> list[str]:
    """Log two of the ``items`` of step ``step``, one row each; return their faults, also logged.

    One sample ended with EOS and one was cut, if there are both. ``kl_coef`` is that of the KL penalty in rewards,
    ``labels`` are those of the prompts. With ``one_score`` only the last token can have a score.
    """
    shown = _shown(items)
    rows = join_rows([items[i].to("cpu") for i in shown])  # padded as a micro-batch is
    eos = set(eos_token_ids)
    penalty = 0.0 if kl.use_kl_loss else kl_coef

    lines = [f"self-check of step {step}: samples as trained on {HINT}", ""]
    faults = []
    for row, i in enumerate(shown):
        sample = _Sample(rows, row, eos, penalty=penalty)
        facts = [(f"sample {row + 1}", sample.summary()), *sample.texts(tokenizer)]
        if labels[i] is not None:
            facts.append(("label", escape_control(str(labels[i]), LONGEST)))
        facts.append(("places", sample.places()))
        lines += [*table_lines(facts), *sample.table(tokenizer), ""]
        faults += [f"sample {row + 1}: {fault}" for fault in sample.faults(one_score)]

    log_lines("\n".join(lines).split("\n"))
    for fault in faults:
        logger.warning("self-check: %s; please report this with the lines above", fault)
    if not faults:
        logger.info("self-check: masks, EOS, score and padding lie where they should")
    return faults


def _shown(items: Sequence[Experience]) -> list[int]:
    """Places of the samples to show: one ended, one cut, if there are both."""
    ended = [i for i, item in enumerate(items) if not item.truncated[0]]
    cut = [i for i, item in enumerate(items) if item.truncated[0]]
    by_rank = [*ended[:1], *cut[:1], *ended[1:2], *cut[1:2]]
    return sorted(by_rank[:N_SHOWN])


class _Sample:
    """One row of a batch, with an entry for each token."""

    def __init__(self, batch: Experience, row: int, eos: set[int], penalty: float) -> None:
        assert batch.scores is not None, "the experience is complete"
        self.ids: list[int] = batch.sequences[row].tolist()
        self.attended = batch.attention_mask[row].bool()
        self.trained = batch.action_mask[row].bool()
        self.actions = _places(self.trained)
        self.truncated = bool(batch.truncated[row])
        self.reward = float(batch.scores[row])
        self.eos = eos

        columns = token_columns(batch)
        self.columns = {}
        for name in _COLUMNS:
            if name in columns:
                self.columns[name] = columns[name][row].double()

        # Rewards without the KL penalty; what rounding leaves of it is no score.
        kl = self.columns.get("kl", torch.zeros(1))
        self.score = self.columns["reward"] + penalty * kl
        rounding = _TINY * max(1.0, float(self.score.abs().max()))
        self.score[self.score.abs() <= rounding] = 0.0
        self.scored = _places(self.score)

    def summary(self) -> str:
        """Number of tokens that are trained on, kind of ending, and raw reward."""
        end = "cut by --generate_max_len" if self.truncated else "ended by itself"
        n = int(self.attended.sum())
        return f"{len(self.actions)} of {n} tokens are trained on; {end}; earned {self.reward:.4g}"

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
        """End of the prompt, and start of the text from the first action on."""
        n_real = int(self.attended.sum())
        first = self.actions[0] if self.actions else n_real
        prompt = str(tokenizer.decode(self.ids[:first]))
        response = str(tokenizer.decode(self.ids[first:n_real]))
        return [
            ("prompt", escape_control(prompt, LONGEST, keep="end")),
            ("response", escape_control(response, LONGEST)),
        ]

    def places(self) -> str:
        """Numbers of the tokens of first action, EOS, scores and first padding."""
        places = [f"first action {i}" for i in self.actions[:1]]
        eos = [i for i in self.actions if self.ids[i] in self.eos]
        places += [f"EOS {i}" for i in eos[-_ENDS:]]
        places += [f"score {self.score[i]:+.4g} at {i}" for i in self.scored[-_ENDS:]]
        n_real = int(self.attended.sum())
        if n_real < len(self.ids):
            places.append(f"padding from {n_real}")
        return ", ".join(places)

    def faults(self, one_score: bool) -> list[str]:
        """Violations of claims that hold for any sample; none if it is left out of training."""
        if not self.actions:
            return []

        masks = {"is trained on but is padding": self.trained & ~self.attended}
        for name, column in self.columns.items():
            masks[f"is not trained on but has {name}"] = ~self.trained & (column != 0)
        faults = []
        for fault, mask in masks.items():
            if mask.any():
                faults.append(f"token {int(mask.nonzero()[0])} {fault}")

        last = self.actions[-1]
        if not self.truncated and self.ids[last] not in self.eos:
            faults.append(f"it ended by itself, but token {last}, the last trained on, is not EOS")
        if one_score and self.scored not in ([], [last]):
            faults.append(
                f"the score lies at token {self.scored[0]}, not only at the last one that is trained on"
            )
        return faults

    def table(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Lines of both ends of the actions, of scored tokens, and of the first padding."""
        n = len(self.ids)
        n_real = int(self.attended.sum())
        first = self.actions[0] if self.actions else _BEFORE
        shown = set(range(max(0, first - _BEFORE), first))
        shown.update(self.actions[:_ENDS], self.actions[-_ENDS:], self.scored[-_ENDS:])
        shown.update(range(n_real, min(n, n_real + 1)))

        rows: list[list[str]] = [["", "token", "id", "action", *self.columns, ""]]
        for before, i in pairwise([-1, *sorted(shown), n]):
            n_between = i - before - 1
            if n_between > 0:
                rows.append(["", f"{n_between} more"])
            if i < n:
                rows.append(self._table_row(i, tokenizer))
        return table_lines(rows, right=[0, *range(2, 4 + len(self.columns))])

    def _table_row(self, i: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Cells of token ``i``: text, id, action mask, and numbers if it is trained on."""
        text = token_texts(self.ids[: i + 1], tokenizer, first=i)[0]
        text = escape_control(text[:_LONGEST_TOKEN])
        numbers = []
        for column in self.columns.values():
            numbers.append(f"{column[i]:z.3f}" if self.trained[i] else "")
        action = str(int(self.trained[i]))
        return [str(i), f"'{text}'", str(self.ids[i]), action, *numbers, ""]


def _places(mask: Tensor) -> list[int]:
    """Places (N,) at which a row (L,) is not zero."""
    places: list[int] = mask.nonzero()[:, 0].tolist()
    return places


def token_columns(experience: Experience) -> dict[str, Tensor]:
    """Values (B, L) of each token of an experience, by the names of tokens.jsonl."""
    log_probs = experience.old_or_rollout_log_probs
    columns = {
        "log_prob": log_probs,
        "kl": None,
        "value": experience.values,
        "reward": experience.rewards,
        "advantage": experience.advantages,
        "return": experience.returns,
        "entropy": experience.entropy,
    }
    reference = experience.ref_log_probs
    if reference is not None:
        columns["kl"] = compute_approx_kl(log_probs, reference, experience.action_mask)
    return {name: column for name, column in columns.items() if column is not None}


def token_texts(
    token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, first: int = 0
) -> list[str]:
    """Return the text that each token from ``first`` on adds; joined, they are the text.

    A token that only begins a character (byte-level BPE) adds nothing; the one that ends it adds all of it.
    """

    def decoded(start: int, end: int) -> str:
        ids = list(token_ids[start:end])
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    texts = []
    read = first  # tokens up to here are in ``texts``
    for end in range(first + 1, len(token_ids) + 1):
        start = max(0, read - _CONTEXT)
        before = decoded(start, read)
        after = decoded(start, end)

        ends_inside_character = after.endswith("\ufffd")
        complete = not ends_inside_character or end - read >= _CONTEXT or end == len(token_ids)
        texts.append(after[len(before) :] if complete else "")
        if complete:
            read = end
    return texts
