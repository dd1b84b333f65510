"""Rewards that need no model; the mathematical one is asked from a thread, as in a run."""

import json
import logging
import math
import sys
import threading
import time
from itertools import pairwise

import pytest

from openppo.config import RewardConfig
from openppo.rewards import VerifiableScorer, start_scoring
from openppo.rewards.verifiable import MathReward, final_answer, length_reward, make_verify
from openppo.types import Prompt, Score


@pytest.fixture
def judge(make_sample):
    """The reward of a response to a prompt with a label."""

    def run(verify, response, label):
        return verify(response, make_sample([4], [1], label=label))

    return run


def verify_of(option):
    """As the command line makes it."""
    [(verifier, argument)] = RewardConfig(verifiable_reward=(option,)).verifiers().items()
    return make_verify(verifier, argument, prompts=[])


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("72", [" 72\n", "#### 1\n#### 72 \n"], ["#### 72 #### 71", "72.", "it is 72", ""]),
        ("48/2 = 24\n48+24 = 72\n#### 72", ["24 and 48 make\n#### 72"], ["24"]),
        (145.0, ["145"], ["14", "1450"]),  # SVAMP and AddSub
        ("145.0", ["145"], ["1450"]),
        (140.0, ["140"], ["14"]),
        (1450.0, ["so\n#### 1,450"], ["145"]),
        (1e16, ["10000000000000000"], ["1"]),
        (0.5, ["0.50"], ["5"]),
        ("-1450000.5", ["#### -1,450,000.5"], []),
        ("160", [], ["#### 1,60"]),
        ("ab", [], ["#### a,b"]),
    ],
)
def test_exact_match_compares_final_answers_and_numbers_however_they_are_written(
    label, right, wrong, judge
):
    for reward, responses in ((1.0, right), (0.0, wrong)):
        assert [judge(verify_of("exact_match"), response, label) for response in responses] == [
            reward
        ] * len(responses)


@pytest.mark.parametrize(
    ("pattern", "label", "right", "wrong"),
    [
        (r"<think>.*</think>", None, ["<think>a</think>b"], ["<think>a\n</think>b"]),
        (r"(?s)<think>.*</think>", None, ["<think>a\n</think>b"], ["none"]),
        (
            r"<answer>(.*?)</answer>",
            "7",
            ["<answer> 7 </answer>"],
            ["<answer>7</answer><answer>8</answer>", "7"],
        ),
        (r"<answer>(.*?)</answer>", "7+1\n#### 8", ["<answer>7</answer><answer>8</answer>"], []),
        (r"a(b)?", "b", ["ab"], ["a"]),
        (r"([\d.]+)$", 145.0, ["145.0"], ["14.5"]),
    ],
)
def test_a_response_must_match_and_the_last_group_must_be_the_label(
    pattern, label, right, wrong, judge
):
    verify = verify_of(f"regex:{pattern}")
    for reward, responses in ((1.0, right), (0.0, wrong)):
        assert [judge(verify, response, label) for response in responses] == [reward] * len(
            responses
        )


@pytest.mark.parametrize("pattern", ["(a+)+$", "^(?:a|aa)+$"])
def test_an_expression_that_backtracks_for_ever_counts_as_wrong(pattern, judge, caplog):
    caplog.set_level(logging.WARNING, "openppo")
    verify = verify_of(f"regex:{pattern}")
    verify.seconds = 1.0
    ticks: list[float] = []
    threading.Timer(0.2, lambda: ticks.append(time.monotonic())).start()
    assert judge(verify, "a" * 4000 + "!", "aaa") == 0.0  # 2**4000 ways
    assert "the search took longer than 1 s" in caplog.text
    assert ticks and ticks[0] < time.monotonic() - 0.2, "other threads ran meanwhile"
    verify.seconds = 60.0
    assert judge(verify, "aaa", "aaa") == 1.0


def test_an_expression_with_several_groups_is_an_error():
    with pytest.raises(
        ValueError, match=r"^--verifiable_reward regex:\(a\)\(b\) has 2 groups; one at most"
    ):
        verify_of("regex:(a)(b)")


@pytest.mark.parametrize(("n", "reward"), [(4, 1.0), (3, 0.75), (6, 0.5), (8, 0.0), (12, -1.0)])
def test_length_counts_response_tokens(n, reward, make_sample):
    verify = verify_of("length:4")
    assert verify("", make_sample([4, 4], [5] * n)) == reward


@pytest.fixture(scope="module")
def math_reward():
    """With one process for all tests."""
    pytest.importorskip("math_verify")
    yield MathReward()


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("48/2 = 24\n48+24 = 72\n#### 72", ["48 + 24 = 72\n#### 72"], ["48 + 24 = 24"]),
        ("#### 72", ["So she sold $72$ clips.", "#### **72**"], ["#### 71"]),
        ("72", [], ["72, no, 71", "I do not know.", ""]),
        ("#### 1,234", ["\\boxed{1234}"], []),
        ("0.5", ["$\\frac{2}{4}$"], []),
        ("$(x+1)^2$", ["\\boxed{x^2 + 2x + 1}"], []),
        ("(1,2)", ["\\boxed{(1, 2)}"], []),
        ("33", ["To give the answer as 33.3%\n#### 33", "#### 33 apples"], []),
        (r"\$36", [r"The answer is \boxed{\$36}."], []),
        # The final answer after the mark may be LaTeX, as a label may.
        (r"\sqrt{2}", [r"#### \sqrt{2}"], []),
        (r"(3, \frac{\pi}{2})", [r"#### (3,\frac{\pi}{2})"], []),
        ("B", ["#### B"], ["#### C"]),
        ("3", [], [r"#### 3\sqrt{2}"]),
        (r"3\sqrt{2}", [], ["#### 3"]),
        ("7", ["#### seven 7"], []),
        (r"\$18.90", ["#### 18.90", r"#### \$18.90"], []),
    ],
)
def test_math_compares_values(label, right, wrong, math_reward, judge):
    for reward, responses in ((1.0, right), (0.0, wrong)):
        assert [judge(math_reward, response, label) for response in responses] == [reward] * len(
            responses
        )


def test_math_works_in_the_background(math_reward, make_sample, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f" {n}" for n in range(3)])
    ids = tokenizer.convert_tokens_to_ids([f" {n}" for n in range(3)])
    samples = [make_sample([4], [n, 1], label="#### 1") for n in ids]
    scores = start_scoring(VerifiableScorer(math_reward, tokenizer, "math"), samples)()
    assert scores == [Score({"math": 0.0}), Score({"math": 1.0}), Score({"math": 0.0})]


def test_math_that_never_ends_counts_as_wrong_and_the_next_answer_is_judged_again(judge, caplog):
    pytest.importorskip("math_verify")
    caplog.set_level(logging.WARNING, "openppo")
    reward = MathReward()
    tower = "\\boxed{9^{9^{9^{9}}}}"  # math-verify itself would give up after 2 s
    for response, seconds in (("#### 72", 60.0), (tower, 0.2), ("#### 72", 60.0)):
        reward.seconds = seconds
        assert judge(reward, response, 72) == float(response != tower)
    assert "the answer took too long" in caplog.text


def test_math_without_its_package_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ValueError, match="^--verifiable_reward math needs .* pip install math-verify"
    ):
        verify_of("math")


def test_gsm8k_answers_are_right_as_they_stand_and_wrong_for_the_next_question(
    assets, math_reward, judge
):
    lines = (assets / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()[:512]
    answers = [json.loads(line)["answer"] for line in lines]
    finals = [final_answer(answer) for answer in answers]
    for verify in (math_reward, verify_of("exact_match")):
        assert [judge(verify, answer, answer) for answer in answers] == [1.0] * 512
        others = [judge(verify, answer, other) for answer, other in pairwise(answers)]
        assert others == [float(a == b) for a, b in pairwise(finals)]


@pytest.mark.parametrize("label", [None, " ", "####", ["72"], {"a": 1}, math.nan])
@pytest.mark.parametrize("verifier", ["exact_match", "math", "regex"])
def test_a_label_that_is_no_answer_is_an_error_before_the_run(verifier, label):
    prompts = [Prompt("good", [1], "72"), Prompt("bad", [1], label)]
    with pytest.raises(
        ValueError, match=f"^--verifiable_reward {verifier} .* prompt 'bad' is .*--label_key"
    ):
        make_verify(verifier, "(a)", prompts)
    make_verify("length", "3", prompts)
    make_verify("regex", "a", prompts)  # without a group


def test_verifiers_count_and_read_the_actions(game, make_tokenizer):
    for verify in (
        length_reward(6),
        lambda response, sample: float(response == sample.prompt.label),
    ):
        assert VerifiableScorer(verify, make_tokenizer()).score([game]) == [Score({"reward": 1.0})]


def test_verifiers_read_the_last_answer_of_an_episode(episode, game, make_tokenizer):
    tokenizer = make_tokenizer()
    for verify, reward in (
        (verify_of("exact_match"), 1.0),
        (verify_of("regex:^czd$"), 1.0),
        (verify_of("length:4"), 1.0),  # of "czd<eos>"
    ):
        assert VerifiableScorer(verify, tokenizer).score([episode]) == [Score({"reward": reward})]
    assert VerifiableScorer(verify_of("length:4"), tokenizer).score([game]) == [
        Score({"reward": 0.5})
    ]
