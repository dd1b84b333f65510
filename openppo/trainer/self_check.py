"""Two samples as they are trained on, for people to check: PPO's token by token, supervised ones as text.

All numbers are those of the experience itself; only the KL is computed again, by k1.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import KLConfig
from openppo.datasets import PreferenceExample, ProcessExample, RankingExample
from openppo.experience.replay_buffer import join_rows
from openppo.models.log_probs import compute_approx_kl
from openppo.models.supervised_loss import IGNORE_INDEX
from openppo.tracking.console import escape_control, log_lines, table_lines
from openppo.types import Experience

_SHOWN = ("log_prob", "kl", "value", "reward", "advantage")
_SAMPLES = 2
_SEGMENTS = 6
_LONGEST = 240
_LONGEST_TOKEN = 8
_BEFORE, _ENDS = 2, 3  # tokens shown before the first action, and at both ends of the actions
_CONTEXT = (
    6  # tokens that the text of the next may depend on: a leading blank, the bytes of one character
)
_TINY = 1e-5  # what float32 leaves of rewards of about 1 when the KL penalty is taken out again
_HINT = "(--no_self_check leaves it out)"


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
    """Log two of ``items``, one row each, that step number ``step`` trains on; returns faults, which are logged too.

    One sample ended with EOS and one was cut, if there are both. ``kl_coef`` is what their rewards were made with,
    ``labels`` are of their prompts; ``one_score`` says that only the last token can have a score.
    """
    ended = [i for i, item in enumerate(items) if not item.truncated[0]]
    cut = [i for i, item in enumerate(items) if item.truncated[0]]
    chosen = sorted([*ended[:1], *cut[:1], *ended[1:2], *cut[1:2]][:_SAMPLES])
    both = join_rows([items[i].to("cpu") for i in chosen])  # padded as a micro-batch is
    lines, faults = [f"self-check of step {step}: samples as trained on {_HINT}", ""], []
    for row in range(len(both)):
        sample = _Sample(both, row, set(eos_token_ids), penalty=0.0 if kl.use_kl_loss else kl_coef)
        label = (
            []
            if labels[chosen[row]] is None
            else [("label", escape_control(str(labels[chosen[row]]), _LONGEST))]
        )
        facts = [
            (f"sample {row + 1}", sample.summary()),
            *sample.texts(tokenizer),
            *label,
            ("places", sample.places()),
        ]
        lines += [*table_lines(facts), *sample.table(tokenizer), ""]
        faults += [f"sample {row + 1}: {fault}" for fault in sample.faults(one_score)]
    log_lines("\n".join(lines).split("\n"))
    for fault in faults:
        logger.warning("self-check: %s; please report this with the lines above", fault)
    if not faults:
        logger.info("self-check: masks, EOS, score and padding lie where they should")
    return faults


class _Sample:
    """One row of a batch, with an entry for each token."""

    def __init__(self, batch: Experience, row: int, eos: set[int], penalty: float) -> None:
        assert batch.scores is not None, "the experience is complete"
        self.ids: list[int] = batch.sequences[row].tolist()
        self.attended, self.trained = (
            batch.attention_mask[row].bool(),
            batch.action_mask[row].bool(),
        )
        self.actions: list[int] = self.trained.nonzero()[:, 0].tolist()
        self.truncated = bool(batch.truncated[row])
        self.reward = float(batch.scores[row])
        self.eos = eos
        columns = token_columns(batch)
        self.columns = {name: columns[name][row].double() for name in _SHOWN if name in columns}
        self.score = self.columns["reward"] + penalty * self.columns.get(
            "kl", torch.zeros(1)
        )  # without the penalty
        self.score[self.score.abs() <= _TINY * max(1.0, float(self.score.abs().max()))] = 0.0
        self.scored: list[int] = self.score.nonzero()[:, 0].tolist()

    def summary(self) -> str:
        """How many tokens are trained on, how the sample ended, and its raw reward."""
        end = "cut by --generate_max_len" if self.truncated else "ended by itself"
        n = int(self.attended.sum())
        return f"{len(self.actions)} of {n} tokens are trained on; {end}; earned {self.reward:.4g}"

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
        """Prompt, by its end, and what follows from the first action on, by its start."""
        real = int(self.attended.sum())
        first = self.actions[0] if self.actions else real
        prompt, response = (
            str(tokenizer.decode(ids)) for ids in (self.ids[:first], self.ids[first:real])
        )
        return [
            ("prompt", escape_control(prompt, _LONGEST, keep="end")),
            ("response", escape_control(response, _LONGEST)),
        ]

    def places(self) -> str:
        """Numbers of the tokens at which the actions begin, and EOS, scores and padding lie."""
        places = [f"first action {i}" for i in self.actions[:1]]
        places += [f"EOS {i}" for i in self.actions if self.ids[i] in self.eos][-_ENDS:]
        places += [f"score {self.score[i]:+.4g} at {i}" for i in self.scored[-_ENDS:]]
        real = int(self.attended.sum())
        places += [f"padding from {real}"] if real < len(self.ids) else []
        return ", ".join(places)

    def faults(self, one_score: bool) -> list[str]:
        """Claims that hold for any experience and not for this one; none of a sample left out of training."""
        if not self.actions:
            return []
        places = {"is trained on but is padding": self.trained & ~self.attended}
        for name, column in self.columns.items():
            places[f"is not trained on but has {name}"] = ~self.trained & (column != 0)
        found = [
            f"token {int(where.nonzero()[0])} {fault}"
            for fault, where in places.items()
            if where.any()
        ]
        last = self.actions[-1]
        if not self.truncated and self.ids[last] not in self.eos:
            found.append(f"it ended by itself, but token {last}, the last trained on, is not EOS")
        if one_score and self.scored not in ([], [last]):
            found.append(
                f"the score lies at token {self.scored[0]}, not only at the last one that is trained on"
            )
        return found

    def table(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Both ends of the actions, scored tokens, and where padding begins."""
        n, real = len(self.ids), int(self.attended.sum())
        first = self.actions[0] if self.actions else _BEFORE
        shown = {
            *range(max(0, first - _BEFORE), first),
            *self.actions[:_ENDS],
            *self.actions[-_ENDS:],
        }
        shown |= {*self.scored[-_ENDS:], *range(real, min(n, real + 1))}
        rows: list[list[str]] = [["", "token", "id", "action", *self.columns, ""]]
        for before, i in pairwise([-1, *sorted(shown), n]):
            if i > before + 1:
                rows.append(["", f"{i - before - 1} more"])
            if i < n:
                text = escape_control(
                    token_texts(self.ids[: i + 1], tokenizer, first=i)[0][:_LONGEST_TOKEN]
                )
                numbers = [
                    f"{column[i]:z.3f}" if self.trained[i] else ""
                    for column in self.columns.values()
                ]
                rows.append(
                    [str(i), f"'{text}'", str(self.ids[i]), str(int(self.trained[i])), *numbers, ""]
                )
        return table_lines(rows, right=[0, *range(2, 4 + len(self.columns))])


def token_columns(experience: Experience) -> dict[str, Tensor]:
    """What an experience (B, L) knows of its tokens, (B, L) each, by the names of tokens.jsonl."""
    log_probs = experience.old_or_rollout_log_probs
    reference = experience.ref_log_probs
    mask = experience.action_mask
    columns = {
        "log_prob": log_probs,
        "kl": None if reference is None else compute_approx_kl(log_probs, reference, mask),
        "value": experience.values,
        "reward": experience.rewards,
        "advantage": experience.advantages,
        "return": experience.returns,
        "entropy": experience.entropy,
    }
    return {name: column for name, column in columns.items() if column is not None}


def token_texts(
    token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, first: int = 0
) -> list[str]:
    """The text that each token from ``first`` on adds; joined, they are the text.

    A token that only begins a character (byte-level BPE) adds nothing; the one that ends it adds all of it.
    """
    texts, read = [], first
    for end in range(first + 1, len(token_ids) + 1):
        both = [list(token_ids[max(0, read - _CONTEXT) : stop]) for stop in (read, end)]
        before, after = (
            str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in both
        )
        complete = not after.endswith("\ufffd") or end - read >= _CONTEXT or end == len(token_ids)
        texts.append(after[len(before) :] if complete else "")
        if complete:
            read = end
    return texts


def show_examples(examples: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Log the first of the ``examples`` of a supervised step: what is read, and what the loss is of."""
    rows = [
        (
            f"{number} {part}",
            escape_control(text, _LONGEST, keep="end" if part == "read" else "start"),
        )
        for number, example in enumerate(examples[:_SAMPLES], 1)
        for part, text in _parts(example, tokenizer)
    ]
    log_lines([f"self-check: what the first step trains on {_HINT}", "", *table_lines(rows), ""])


def _parts(example: Any, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Names and texts of an example's parts: of token examples the last turns of reading and training."""
    if isinstance(example, (PreferenceExample, RankingExample)):
        scores = example.scores if isinstance(example, RankingExample) else None
        sides = (
            ["chosen", "rejected"] if scores is None else [f"ranked {score:g}" for score in scores]
        )
        texts = zip(sides, example.texts, strict=True)
        return [
            (side, f"score at token {len(ids) - 1} of: {tokenizer.decode(ids)}")
            for side, ids in texts
        ]
    if isinstance(example, ProcessExample):
        judged = {i: label for i, label in enumerate(example.labels) if label != IGNORE_INDEX}
        places = ", ".join(
            f"{f'{x:.2f}' if isinstance(x, float) else tokenizer.decode([x])} at {i}"
            for i, x in judged.items()
        )
        return [
            ("read", str(tokenizer.decode(example.token_ids))),
            ("judged", f"{len(judged)} steps: {places}"),
        ]
    targets = zip((False, *example.loss_mask[1:]), example.token_ids, strict=True)
    turns = [(target, [i for _, i in turn]) for target, turn in groupby(targets, key=itemgetter(0))]
    return [
        ("trained on" if target else "read", f"{tokenizer.decode(ids)} ({len(ids)} tokens)")
        for target, ids in turns[-_SEGMENTS:]
    ]
