"""The self-check shows where everything lies, and sees what lies elsewhere."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from openppo.config import KLConfig
from openppo.datasets import PreferenceExample, ProcessExample, TokenExample
from openppo.models.supervised_loss import IGNORE_INDEX
from openppo.trainer.self_check import check_samples
from openppo.trainer.supervised.self_check import show_examples
from openppo.types import Experience, ModelInputs

EOS, KL_COEF = 9, 0.5


class Words:
    """A tokenizer of words; number 4 clears the screen."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(
            "</s>" if i == EOS else "\x1b[2J" if i == 4 else f" {chr(ord('a') + i)}" for i in ids
        )


def row(n_prompt: int, n_actions: int, score: float, truncated: bool) -> Experience:
    """Log-probs -1, KL 0.1 at each action, so that rewards are -0.05 and at the last one the score more."""
    length = n_prompt + n_actions
    ids = (torch.arange(length) % 8)[None]
    if not truncated:
        ids[0, -1] = EOS
    action_mask = torch.arange(length)[None] >= n_prompt
    actions = action_mask.float()
    rewards = -KL_COEF * 0.1 * actions
    rewards[0, -1] += score
    return Experience(
        ModelInputs(ids, torch.ones(1, length, dtype=torch.bool)),
        action_mask=action_mask,
        rollout_log_probs=-actions,
        truncated=torch.tensor([truncated]),
        scores=torch.tensor([score]),
        log_probs=-actions,
        ref_log_probs=-1.1 * actions,
        values=0.25 * actions,
        rewards=rewards,
        advantages=0.75 * actions,
        returns=actions,
    )


def check(*rows: Experience, **kl: Any) -> list[str]:
    """Faults of the rows."""
    labels = [f"label {i}\x1b[2J" for i in range(len(rows))]
    words: Any = Words()
    return check_samples(1, rows, words, {EOS}, kl=KLConfig(**kl), kl_coef=KL_COEF, labels=labels)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of openppo."""
    caplog.set_level(logging.INFO, logger="openppo")
    return caplog


def page(logged: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the first record below its title."""
    return logged.records[0].getMessage().split("\n")[2:]


GOOD = row(4, 5, score=2.0, truncated=False)
CUT = row(3, 9, score=-1.5, truncated=True)


def test_tokens_show_numbers_score_eos_and_padding(logged: pytest.LogCaptureFixture) -> None:
    assert check(GOOD, GOOD, GOOD, CUT) == [], "one that ended and one that was cut are shown"
    lines = page(logged)
    assert logged.messages[-1] == "self-check: masks, EOS, score and padding lie where they should"
    assert lines[:5] == [
        "sample 1  5 of 9 tokens are trained on; ended by itself; earned 2",
        r"prompt     a b c d",
        r"response  \x1b[2J f g h</s>",
        r"label     label 0\x1b[2J",
        "places    first action 4, EOS 8, score +2 at 8, padding from 9",
    ]
    assert lines[5].split() == "token id action log_prob kl value reward advantage".split()
    by_number = {
        line.split()[0]: line.split() for line in lines[6:17] if line and line.split()[0].isdigit()
    }
    assert by_number["3"] == ["3", "'", "d'", "3", "0"]
    numbers = ["-1.000", "0.100", "0.250", "-0.050", "0.750"]
    assert by_number["4"] == ["4", "'\\x1b[2J'", "4", "1", *numbers]
    numbers[3] = "1.950"
    assert by_number["8"] == ["8", "'</s>'", "9", "1", *numbers]
    assert by_number["9"][-1] == "0", "padding is not trained on"
    second = lines.index(
        "sample 2  9 of 12 tokens are trained on; cut by --generate_max_len; earned -1.5"
    )
    assert lines[second + 3 : second + 5] == [
        r"label     label 3\x1b[2J",
        "places    first action 3, score -1.5 at 11",
    ]
    assert max(map(len, lines)) <= 80


def test_a_sample_without_a_label_shows_none(logged: pytest.LogCaptureFixture) -> None:
    words: Any = Words()
    check_samples(1, [GOOD], words, {EOS}, kl=KLConfig(), kl_coef=KL_COEF, labels=[None])
    assert [line.split()[0] for line in page(logged)[:4]] == [
        "sample",
        "prompt",
        "response",
        "places",
    ]


def test_rows_of_long_samples_fit_80_columns(logged: pytest.LogCaptureFixture) -> None:
    longest = row(1500, 500, score=-123.456, truncated=True)
    ids = 151_000 + torch.zeros_like(longest.sequences)
    inputs = replace(longest.inputs, sequences=ids)
    check(longest.with_fields(inputs=inputs, values=-99.0 * longest.action_mask))
    assert max(map(len, page(logged))) <= 80


def test_penalties_beside_the_rewards_and_untrained_samples_are_told(
    logged: pytest.LogCaptureFixture,
) -> None:
    check(GOOD, use_kl_loss=True)
    scores = "score -0.05 at 6, score -0.05 at 7, score +1.95 at 8"
    assert f"places first action 4, EOS 8, {scores}" in " ".join("\n".join(page(logged)).split())
    logged.clear()
    assert check(GOOD.with_fields(action_mask=torch.zeros_like(GOOD.action_mask))) == []
    assert "0 of 9 tokens are trained on" in page(logged)[0]


def changed(field: str, token: int, value: Any) -> Experience:
    """``GOOD`` with one entry changed."""
    tensor: Tensor = getattr(GOOD, field).clone()
    tensor[0, token] = value
    if field in ("sequences", "attention_mask"):
        return GOOD.with_fields(inputs=replace(GOOD.inputs, **{field: tensor}))
    return GOOD.with_fields(**{field: tensor})


@pytest.mark.parametrize(
    ("field", "token", "value", "fault"),
    [
        ("attention_mask", 8, False, "sample 1: token 8 is trained on but is padding"),
        ("rewards", 3, 1.0, "sample 1: token 3 is not trained on but has reward"),
        ("advantages", 1, 1.0, "sample 1: token 1 is not trained on but has advantage"),
        ("values", 0, 1.0, "sample 1: token 0 is not trained on but has value"),
        (
            "sequences",
            8,
            3,
            "sample 1: it ended by itself, but token 8, the last trained on, is not EOS",
        ),
        (
            "action_mask",
            8,
            False,
            "sample 1: it ended by itself, but token 7, the last trained on, is not EOS",
        ),
        (
            "rewards",
            7,
            2.0,
            "sample 1: the score lies at token 7, not only at the last one that is trained on",
        ),
    ],
)
def test_faults_are_named(
    field: str, token: int, value: Any, fault: str, logged: pytest.LogCaptureFixture
) -> None:
    assert fault in check(changed(field, token, value))
    assert any(
        record.levelno == logging.WARNING and fault in record.getMessage()
        for record in logged.records
    )


@pytest.mark.parametrize(
    ("example", "lines"),
    [
        (  # the first token of a row is not a target whatever its mask says
            TokenExample([0, 1, 2, 3, 4, 5], [True, False, True, False, True, True]),
            [
                "1 read a b (2 tokens)",
                "1 trained on c (1 tokens)",
                "1 read d (1 tokens)",
                "1 trained on \\x1b[2J f (2 tokens)",
            ],
        ),
        (
            PreferenceExample([0, 1, 2], [0, 3], 0.0),
            ["1 chosen score at token 2 of: a b c", "1 rejected score at token 1 of: a d"],
        ),
        (
            ProcessExample([0, 1, 2, 1], [IGNORE_INDEX, 7, IGNORE_INDEX, 8]),
            ["1 read a b c b", "1 judged 2 steps: h at 1, i at 3"],
        ),
    ],
    ids=["tokens", "pair", "steps"],
)
def test_what_is_read_and_what_is_trained_on_are_told_apart(
    example: Any, lines: list[str], logged: pytest.LogCaptureFixture
) -> None:
    show_examples([example], Words())  # type: ignore[arg-type]
    assert [" ".join(line.split()) for line in page(logged) if line.strip()] == lines
