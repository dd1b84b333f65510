"""The self-check shows where everything lies, and sees what lies elsewhere."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from openppo.config.ppo import KLConfig
from openppo.trainer.overview.self_check import SelfCheck, self_check
from openppo.types import Experience

EOS, KL_COEF = 9, 0.5


class Words:
    """A tokenizer of ten words; number 4 clears the screen."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.decode([i]).replace(" ", "\u2581") for i in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join("</s>" if i == EOS else "\x1b[2J" if i == 4 else f" w{i}" for i in ids)


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
        sequences=ids,
        attention_mask=torch.ones(1, length, dtype=torch.bool),
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


def check(*rows: Experience, **kl: Any) -> SelfCheck:
    return self_check(rows, Words(), {EOS}, KLConfig(**kl), KL_COEF)  # type: ignore[arg-type]


def text(of: SelfCheck) -> list[str]:
    """The page as in a log file."""
    buffer = io.StringIO()
    Console(file=buffer, width=110).print(of.page)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


GOOD = row(4, 5, score=2.0, truncated=False)
CUT = row(3, 9, score=-1.5, truncated=True)


def test_every_token_shows_its_numbers_and_where_score_eos_and_padding_are() -> None:
    found = check(GOOD, CUT)
    lines = text(found)
    assert found.faults == []
    assert lines[0] == "sample 1: 5 of 9 tokens are trained on, 4 to 8; EOS at 8, trained on"
    assert lines[1] == "earned 2; in the rewards beside the KL penalty: 2 at 8"
    by_number = {line.split()[0]: line.split() for line in lines[3:14] if line and line.split()[0].isdigit()}
    assert lines[2].split() == "token id attention action log-prob KL value reward advantage".split()
    assert by_number["3"] == ["3", "'", "w3'", "3", "1", "0"]
    numbers = ["-1.0000", "0.1000", "0.2500", "-0.0500", "0.7500"]
    assert by_number["4"] == ["4", "'\\x1b[2J'", "4", "1", "1", *numbers, "first", "action"]
    assert by_number["8"] == [
        *("8", "'</s>'", "9", "1", "1", "-1.0000", "0.1000", "0.2500", "1.9500", "0.7500"),
        *("EOS,", "score", "+2"),
    ]
    assert by_number["9"][-4:] == ["0", "0", "0", "padding"]
    second = lines.index("sample 2: 9 of 12 tokens are trained on, 3 to 11; cut by --generate_max_len, no EOS")
    assert lines[second + 1] == "earned -1.5; in the rewards beside the KL penalty: -1.5 at 11"
    assert max(map(len, lines)) <= 110


def test_one_sample_that_ended_and_one_that_was_cut_are_chosen() -> None:
    lines = text(check(GOOD, GOOD, GOOD, CUT))
    assert any("EOS at 8" in line for line in lines)
    assert any("cut by" in line for line in lines)
    assert len([line for line in text(check(GOOD)) if line.startswith("sample")]) == 1


def test_without_a_penalty_in_the_rewards_all_of_them_is_score() -> None:
    found = check(GOOD, use_kl_loss=True)
    assert "-0.05 at 4, -0.05 at 5, -0.05 at 6 and 2 more" in text(found)[1]


def changed(field: str, token: int, value: Any) -> Experience:
    """``GOOD`` with one entry changed."""
    tensor: Tensor = GOOD.tensors()[field].clone()
    tensor[0, token] = value
    return GOOD.with_fields(**{field: tensor})


@pytest.mark.parametrize(
    ("field", "token", "value", "fault"),
    [
        ("attention_mask", 8, False, "sample 1: token 8 is trained on but is padding"),
        ("attention_mask", 2, False, "sample 1: token 3 is real but comes after padding"),
        ("log_probs", 5, 0.5, "sample 1: token 5 is trained on but has a log-prob above 0"),
        ("rewards", 3, 1.0, "sample 1: token 3 is not trained on but has reward"),
        ("advantages", 1, 1.0, "sample 1: token 1 is not trained on but has advantage"),
        ("values", 0, 1.0, "sample 1: token 0 is not trained on but has value"),
        ("sequences", 8, 3, "sample 1: it ended by itself, but token 8, the last trained on, is no EOS"),
        ("action_mask", 8, False, "sample 1: it ended by itself, but token 7, the last trained on, is no EOS"),
    ],
)
def test_what_should_not_be_is_told(field: str, token: int, value: Any, fault: str) -> None:
    assert fault in check(changed(field, token, value)).faults


def test_a_score_elsewhere_than_on_the_last_action_is_told() -> None:
    """What TRL once did: the score on the token before, or on the first padding."""
    assert GOOD.rewards is not None
    moved = GOOD.with_fields(rewards=GOOD.rewards.roll(-1, 1) * GOOD.action_mask)
    moved.rewards[0, 8] = -0.05  # type: ignore[index]
    assert any("the score lies at token 7, not only at the last" in fault for fault in check(moved).faults)


def test_looking_changes_neither_experience_nor_random_numbers() -> None:
    before = {name: tensor.clone() for name, tensor in GOOD.tensors().items()}
    state = torch.get_rng_state()
    check(GOOD, CUT)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in GOOD.tensors().items())


def test_samples_that_are_left_out_of_training_are_called_so() -> None:
    left_out = GOOD.with_fields(action_mask=torch.zeros_like(GOOD.action_mask))
    found = check(left_out)
    assert "9 tokens, none of them trained on" in text(found)[0]
    assert found.faults == []
