"""Built-in rewards that need no model: a response is right or wrong, or has the right length."""

import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import RewardConfig, Verifier
from openppo.rewards.answer_process import AnswerProcess
from openppo.rewards.scoring import answer_length, answer_text, name_sample
from openppo.types import Prompt, Score, Trajectory

Verify = Callable[[str, Trajectory], float]
"""The reward of a response's text, special tokens left out; of an episode, of the policy's last message."""

_ANSWER_MARK = "####"
_LATEX = re.compile(
    r"(?<!\\)\$.+(?<!\\)\$|\\boxed|\\\(|\\\[", re.DOTALL
)  # an escaped dollar is money
_THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_FRACTION = re.compile(r"-?\d+\.\d+")
_LONGEST_QUOTE = 200


@dataclass
class VerifiableScorer:
    """Rewards named ``name`` from ``verify``, one of ``make_verify``."""

    verify: Verify
    tokenizer: PreTrainedTokenizerBase
    name: str = "reward"
    collective = False

    def __str__(self) -> str:
        return "--verifiable_reward"

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory."""
        return [
            Score({self.name: self.verify(answer_text(t, self.tokenizer), t)}) for t in trajectories
        ]


def make_verify(verifier: Verifier, source: RewardConfig, prompts: Iterable[Prompt]) -> Verify:
    """The check named ``verifier``; ``ValueError`` naming the flag for options or labels that it cannot use."""
    if verifier == "length":
        assert source.verify_length is not None, "validated before"
        return length_reward(source.verify_length)
    regex = RegexReward(source.verify_regex or "") if verifier == "regex" else None
    if regex is None or regex.n_groups > 0:
        for prompt in prompts:
            label_of(prompt, verifier)
    return regex or (exact_match if verifier == "exact_match" else MathReward())


def label_of(prompt: Prompt, verifier: Verifier) -> str:
    """The final answer of the prompt's label; ``ValueError`` if it has none that is a text or a number."""
    label = prompt.label
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    answer = (
        final_answer(str(label)) if isinstance(label, str | int | float) and label == label else ""
    )  # not NaN
    if not answer:
        raise ValueError(
            f"--verifiable_reward {verifier} compares with a text or number, and the label of prompt "
            f"{prompt.text[:80]!r} is {label!r}. Name the column that has it with --label_key."
        )
    return answer


def final_answer(text: str) -> str:
    """Text after the last ``####``, as in GSM8K, or all of ``text``; stripped."""
    return text.rpartition(_ANSWER_MARK)[2].strip()


def exact_match(response: str, trajectory: Trajectory) -> float:
    """1 if both final answers are the same text or number."""
    return float(
        _plain(final_answer(response)) == _plain(label_of(trajectory.prompt, "exact_match"))
    )


def _plain(answer: str) -> str:
    """``answer`` without commas between thousands, nor zeros at the end of a fraction."""
    answer = answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
    return answer.rstrip("0").removesuffix(".") if _FRACTION.fullmatch(answer) else answer


def length_reward(target: int) -> Verify:
    """``1 - |n - target| / target`` for a response of n tokens."""
    return lambda response, trajectory: 1.0 - abs(answer_length(trajectory) - target) / target


class RegexReward:
    """1 if the response contains ``pattern``, else 0; with a group, its last match must hold the label.

    A search that takes longer than ``seconds`` counts as no match. ``ValueError`` for a pattern that cannot be used.
    """

    def __init__(self, pattern: str, seconds: float = 5.0) -> None:
        try:
            self.n_groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(
                f"--verify_regex {pattern!r} is not a regular expression: {error}."
            ) from error
        if self.n_groups > 1:
            raise ValueError(
                f"--verify_regex {pattern!r} has {self.n_groups} groups; one at most is compared with the label. Write "
                "the others as (?:...)."
            )
        self.seconds = seconds
        self.process = AnswerProcess("--verifiable_reward regex", "regex", pattern)

    def __call__(self, response: str, trajectory: Trajectory) -> float:
        in_time, found = self.process.ask(response, self.seconds)
        if not in_time:
            _warn_wrong("regex", "--verify_regex took too long", response, trajectory=trajectory)
        if found is None or self.n_groups == 0:
            return float(found is not None)
        return float(_plain(found.strip()) == _plain(label_of(trajectory.prompt, "regex")))


class MathReward:
    """1 if the final answers of response and label are equal as mathematics, else 0.

    math-verify decides, in a process; an answer that takes longer than ``seconds`` counts as wrong. Raises
    ``ValueError`` if math-verify is missing.
    """

    def __init__(self, seconds: float = 20.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            flag, remedy = "--verifiable_reward math", "pip install math-verify"
            raise ValueError(
                f"{flag} needs the package math-verify, which is not installed: {remedy}"
            )
        self.seconds = seconds
        self.process = AnswerProcess("--verifiable_reward math", "math")

    def __call__(self, response: str, trajectory: Trajectory) -> float:
        label = label_of(trajectory.prompt, "math")
        in_time, same = self.process.ask([_as_latex(label), _readings(response)], self.seconds)
        if same is None:
            why = (
                f"the label {label!r} is no mathematics" if in_time else "the answer took too long"
            )
            _warn_wrong("math", why, response, trajectory=trajectory)
        return float(same is True)


def _warn_wrong(verifier: Verifier, why: str, response: str, trajectory: Trajectory) -> None:
    what = f"{why}, so {response[-_LONGEST_QUOTE:]!r} counts as wrong for {name_sample(trajectory)}"
    logger.warning("--verifiable_reward %s: %s", verifier, what)


def _as_latex(text: str) -> str:
    """math-verify reads LaTeX only where it is marked as such."""
    return text if _LATEX.search(text) else f"\\boxed{{{text}}}"


def _readings(response: str) -> list[str]:
    """Meanings of the final answer: words around a number, or unmarked LaTeX, as in a label."""
    answer = final_answer(response)
    if _ANSWER_MARK not in response or _LATEX.search(answer):
        return [answer]
    return [_as_latex(answer)] if "\\" in answer else [answer, _as_latex(answer)]
