"""Rewards that need no model; the mathematical one is asked from a thread, as in a run."""

import json
import logging
import math
import sys
from itertools import pairwise

import pytest

from openppo.config import RewardConfig
from openppo.rewards import VerifiableScorer, start_scoring
from openppo.rewards.verifiable import MathReward, final_answer, make_verify
from openppo.types import Prompt, Score


@pytest.fixture
def judge(make_trajectory):
    """The reward of a response to a prompt with a label."""

    def run(verify, response, label):
        return verify(response, make_trajectory([4], [1], label=label))

    return run


def verify_of(verifier, **options):
    """As the command line makes it."""
    return make_verify(verifier, RewardConfig(verifiable_reward=(verifier,), **options), prompts=[])


# Exact match


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (" 72\n", "72", 1.0),
        ("24 and 48 make\n#### 72", "48/2 = 24\n48+24 = 72\n#### 72", 1.0),
        ("#### 1\n#### 72 \n", "72", 1.0),
        ("#### 72 #### 71", "72", 0.0),
        ("72.", "72", 0.0),
        ("it is 72", "72", 0.0),
        ("", "72", 0.0),
        ("145", 145.0, 1.0),  # SVAMP and AddSub
        ("145.0", 145, 1.0),
        ("145", "145.0", 1.0),
        ("so\n#### 1,450", 1450.0, 1.0),
        ("10000000000000000", 1e16, 1.0),
        ("-7", -7.0, 1.0),
        ("0.50", 0.5, 1.0),
        ("14", 140.0, 0.0),
        ("145", 145.5, 0.0),
        ("1450", "145.0", 0.0),
        ("#### -1,450,000.5", "-1450000.5", 1.0),
        ("#### 1,60", "160", 0.0),
        ("#### a,b", "ab", 0.0),
    ],
)
def test_exact_match_compares_final_answers_and_numbers_however_they_are_written(response, label, reward, judge):
    assert judge(verify_of("exact_match"), response, label) == reward


# Regular expressions


@pytest.mark.parametrize(
    ("pattern", "response", "label", "reward"),
    [
        (r"<think>.*</think>", "<think>a</think>b", None, 1.0),
        (r"<think>.*</think>", "<think>a\n</think>b", None, 0.0),
        (r"(?s)<think>.*</think>", "<think>a\n</think>b", None, 1.0),
        (r"\d+", "none", None, 0.0),
        (r"<answer>(.*?)</answer>", "<answer> 7 </answer>", "7", 1.0),
        (r"<answer>(.*?)</answer>", "<answer>7</answer><answer>8</answer>", "7", 0.0),
        (r"<answer>(.*?)</answer>", "<answer>7</answer><answer>8</answer>", "7+1\n#### 8", 1.0),
        (r"<answer>(.*?)</answer>", "7", "7", 0.0),
        (r"a(b)?", "a", "b", 0.0),
        (r"([\d.]+)$", "145.0", 145.0, 1.0),
        (r"([\d.]+)$", "14.5", 145.0, 0.0),
    ],
)
def test_a_response_must_match_and_the_last_group_must_be_the_label(pattern, response, label, reward, judge):
    assert judge(verify_of("regex", verify_regex=pattern), response, label) == reward


@pytest.mark.parametrize("pattern", ["(a+)+$", "^(?:a|aa)+$"])
def test_an_expression_that_backtracks_for_ever_counts_as_wrong(pattern, judge, caplog):
    caplog.set_level(logging.WARNING, "openppo")
    verify = verify_of("regex", verify_regex=pattern)
    for response, seconds in (("aaa", 60.0), ("a" * 100 + "!", 0.2), ("aaa", 60.0)):  # 2**100 ways in the middle
        verify.seconds = seconds
        assert judge(verify, response, "aaa") == float(response == "aaa")
    assert "--verify_regex took too long" in caplog.text
    verify.process.process.kill()  # as the system does when memory is short
    verify.process.process.wait()
    assert judge(verify, "aaa", "aaa") == 1.0


@pytest.mark.parametrize(
    ("pattern", "message"), [("a(", "is not a regular expression: missing )"), ("(a)(b)", "has 2 groups; one at most")]
)
def test_a_bad_expression_is_an_error_naming_the_flag(pattern, message):
    with pytest.raises(ValueError, match="^--verify_regex ") as error:
        verify_of("regex", verify_regex=pattern)
    assert message in str(error.value)


# Length


@pytest.mark.parametrize(("n", "reward"), [(4, 1.0), (3, 0.75), (6, 0.5), (8, 0.0), (12, -1.0)])
def test_length_counts_response_tokens(n, reward, make_trajectory):
    verify = verify_of("length", verify_length=4)
    assert verify("", make_trajectory([4, 4], [5] * n)) == reward


# Mathematics


@pytest.fixture(scope="module")
def math_reward():
    """With one process for all tests."""
    pytest.importorskip("math_verify")
    yield MathReward()


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("48 + 24 = 72\n#### 72", "48/2 = 24\n48+24 = 72\n#### 72", 1.0),
        ("So she sold $72$ clips.", "#### 72", 1.0),
        ("\\boxed{1234}", "#### 1,234", 1.0),
        ("1,234", 1234, 1.0),
        ("0.5", "\\frac{1}{2}", 1.0),
        ("$\\frac{2}{4}$", "0.5", 1.0),
        ("\\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
        ("\\boxed{(1, 2)}", "(1,2)", 1.0),
        ("#### 71", "#### 72", 0.0),
        ("72, no, 71", "72", 0.0),
        ("To give the answer as 33.3%\n#### 33", "33", 1.0),
        ("#### 33 apples", "33", 1.0),
        ("I do not know.", "72", 0.0),
        (r"The answer is \boxed{\$36}.", r"\$36", 1.0),
        ("", "72", 0.0),
        # The final answer after the mark may be LaTeX, as a label may.
        (r"#### \sqrt{2}", r"\sqrt{2}", 1.0),
        (r"#### 3\pi", r"3\pi", 1.0),
        (r"#### (3,\frac{\pi}{2})", r"(3, \frac{\pi}{2})", 1.0),
        ("#### 1+x^2", "x^2+1", 1.0),
        ("#### B", "B", 1.0),
        ("#### C", "B", 0.0),
        (r"#### 3\sqrt{2}", "3", 0.0),
        ("#### 3", r"3\sqrt{2}", 0.0),
        ("#### **72**", "72", 1.0),
        ("#### seven 7", "7", 1.0),
        (r"#### \$18", "18", 1.0),
        ("#### 18.90", r"\$18.90", 1.0),
    ],
)
def test_math_compares_values(response, label, reward, math_reward, judge):
    assert judge(math_reward, response, label) == reward


def test_math_works_in_the_background(math_reward, make_trajectory, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f" {n}" for n in range(3)])
    trajectories = [
        make_trajectory([4], [*tokenizer.convert_tokens_to_ids([f" {n}"]), 1], label="#### 1") for n in range(3)
    ]
    scores = start_scoring(VerifiableScorer(math_reward, tokenizer, "math"), trajectories).wait()
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
    with pytest.raises(ValueError, match="^--verifiable_reward math needs .* pip install math-verify"):
        verify_of("math")


def test_math_whose_process_cannot_start_is_an_error(judge, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="its process ended with status 1"):
        judge(MathReward(), "72", 72)


def test_gsm8k_answers_are_right_as_they_stand_and_wrong_for_the_next_question(assets, math_reward, judge):
    lines = (assets / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()[:512]
    answers = [json.loads(line)["answer"] for line in lines]
    finals = [final_answer(answer) for answer in answers]
    for verify in (math_reward, verify_of("exact_match")):
        assert [judge(verify, answer, answer) for answer in answers] == [1.0] * 512
        others = [judge(verify, answer, other) for answer, other in pairwise(answers)]
        assert others == [float(a == b) for a, b in pairwise(finals)]


# Labels


@pytest.mark.parametrize("label", [None, "", " ", "####", ["72"], {"a": 1}, math.nan])
@pytest.mark.parametrize("verifier", ["exact_match", "math", "regex"])
def test_a_label_that_is_no_answer_is_an_error_before_the_run(verifier, label):
    prompts = [Prompt("good", [1], "72"), Prompt("bad", [1], label)]
    source = RewardConfig(verifiable_reward=(verifier,), verify_regex="(a)")
    with pytest.raises(ValueError, match=f"^--verifiable_reward {verifier} .* prompt 'bad' is .*--label_key"):
        make_verify(verifier, source, prompts)


def test_length_and_expressions_without_group_need_no_label():
    prompts = [Prompt("ask", [1])]
    for verifier, options in (("length", {"verify_length": 3}), ("regex", {"verify_regex": "a"})):
        make_verify(verifier, RewardConfig(verifiable_reward=(verifier,), **options), prompts)


def test_a_reward_that_is_no_finite_number_is_an_error_naming_its_sample(make_trajectory, make_tokenizer):
    samples = [make_trajectory([4], [5, 1], text=text) for text in "ab"]
    scorer = VerifiableScorer(
        lambda _, trajectory: 1.0 if trajectory.prompt.text == "a" else math.nan, make_tokenizer()
    )
    with pytest.raises(ValueError, match="^--verifiable_reward returned nan for prompt 'b'; a finite number is needed"):
        scorer.score(samples)
