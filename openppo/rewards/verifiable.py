"""Built-in rewards that need no model: a response is right or wrong, or has the right length."""

import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import regex
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import Verifier
from openppo.rewards.function_process import FunctionProcess, RaisedThere
from openppo.rewards.scoring import answer_length, answer_text, name_sample
from openppo.types import Prompt, Sample, Score

Verify = Callable[[str, Sample], float]
"""Reward of a response's text, or of the policy's last message in an episode."""

_ANSWER_MARK = "####"
_LATEX = re.compile(r"(?<!\\)\$.+(?<!\\)\$|\\boxed|\\\(|\\\[", re.DOTALL)
"""Marks of LaTeX; an escaped dollar is money."""
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

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample."""
        scores = []
        for sample in samples:
            reward = self.verify(answer_text(sample, self.tokenizer), sample)
            scores.append(Score({self.name: reward}))
        return scores


def make_verify(verifier: Verifier, argument: str, prompts: Iterable[Prompt]) -> Verify:
    """Make the check named ``verifier``, with its pattern or number as ``argument``.

    ``ValueError`` names the flag of options or labels that it cannot use.
    """
    if verifier == "length":
        return length_reward(int(argument))

    search = RegexReward(argument) if verifier == "regex" else None
    needs_labels = search is None or search.pattern.groups > 0
    if needs_labels:
        for prompt in prompts:
            label_of(prompt, verifier)

    if search is not None:
        return search
    return exact_match if verifier == "exact_match" else MathReward()


def label_of(prompt: Prompt, verifier: Verifier) -> str:
    """Final answer of the prompt's label; ``ValueError`` unless the label is a text or a number."""
    label = prompt.label
    if isinstance(label, float) and label.is_integer():
        label = int(label)

    answer = ""
    is_nan = isinstance(label, float) and math.isnan(label)
    if isinstance(label, str | int | float) and not is_nan:
        answer = final_answer(str(label))
    if not answer:
        raise ValueError(
            f"--verifiable_reward {verifier} compares with a text or number, and the label of prompt "
            f"{prompt.text[:80]!r} is {label!r}. Name the column that has it with --label_key."
        )
    return answer


def final_answer(text: str) -> str:
    """Text after the last ``####``, as in GSM8K, or all of ``text``; stripped."""
    return text.rpartition(_ANSWER_MARK)[2].strip()


def exact_match(response: str, sample: Sample) -> float:
    """Reward 1 if both final answers are the same text or number, else 0."""
    answer = _plain(final_answer(response))
    label = _plain(label_of(sample.prompt, "exact_match"))
    return float(answer == label)


def _plain(answer: str) -> str:
    """Remove commas between thousands, and zeros at the end of a fraction."""
    if _THOUSANDS.fullmatch(answer):
        answer = answer.replace(",", "")
    if _FRACTION.fullmatch(answer):
        answer = answer.rstrip("0").removesuffix(".")
    return answer


def length_reward(target: int) -> Verify:
    """Make the reward ``1 - |n - target| / target`` for a response of n tokens."""

    def reward(response: str, sample: Sample) -> float:
        distance = abs(answer_length(sample) - target)
        return 1.0 - distance / target

    return reward


class RegexReward:
    """Reward 1 if the response contains ``pattern``, else 0; the last match of its group must be the label.

    The package ``regex`` searches: it reads what ``re`` does, has a limit of time, and lets other threads run. A search
    that takes longer than ``seconds`` counts as no match. ``ValueError`` for a pattern that cannot be used.
    """

    def __init__(self, pattern: str, seconds: float = 5.0) -> None:
        try:
            self.pattern = regex.compile(pattern)
        except regex.error as error:
            raise ValueError(
                f"--verifiable_reward regex:{pattern} is not a regular expression: {error}."
            ) from error
        if self.pattern.groups > 1:
            raise ValueError(
                f"--verifiable_reward regex:{pattern} has {self.pattern.groups} groups; one at most is compared with "
                "the label. Write the others as (?:...)."
            )
        self.seconds = seconds

    def __call__(self, response: str, sample: Sample) -> float:
        last = None
        try:
            for match in self.pattern.finditer(response, timeout=self.seconds):
                last = match
        except TimeoutError:
            reason = f"the search took longer than {self.seconds:g} s"
            _warn_wrong("regex", reason, response, sample=sample)
            return 0.0
        if last is None:
            return 0.0
        if self.pattern.groups == 0:
            return 1.0
        label = label_of(sample.prompt, "regex")
        return float(_plain((last[1] or "").strip()) == _plain(label))


class MathReward:
    """Reward 1 if the final answers of response and label are equal as mathematics, else 0.

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
        file = Path(__file__).with_name("math_answers.py")
        self.process = FunctionProcess("--verifiable_reward math", file, "is_equal")

    def __call__(self, response: str, sample: Sample) -> float:
        label = label_of(sample.prompt, "math")
        arguments = {"label": _as_latex(label), "readings": _readings(response)}
        try:
            is_equal = self.process.call(arguments, self.seconds)
        except (TimeoutError, ChildProcessError, RaisedThere) as error:
            reason = f"the answer took too long, or failed ({error!r})"
            _warn_wrong("math", reason, response, sample=sample)
            return 0.0
        if is_equal is None:
            reason = f"the label {label!r} is no mathematics"
            _warn_wrong("math", reason, response, sample=sample)
        return float(is_equal is True)


def _warn_wrong(verifier: Verifier, reason: str, response: str, sample: Sample) -> None:
    """Warn about a response that counts as wrong although no verifier has judged it."""
    logger.warning(
        "--verifiable_reward %s: %s, so %r counts as wrong for %s",
        verifier,
        reason,
        response[-_LONGEST_QUOTE:],
        name_sample(sample),
    )


def _as_latex(text: str) -> str:
    """Mark text as LaTeX, which math-verify reads only where it is marked."""
    return text if _LATEX.search(text) else f"\\boxed{{{text}}}"


def _readings(response: str) -> list[str]:
    """Possible meanings of the final answer: words around a number, or unmarked LaTeX, as in a label."""
    answer = final_answer(response)
    if _ANSWER_MARK not in response or _LATEX.search(answer):
        return [answer]
    return [_as_latex(answer)] if "\\" in answer else [answer, _as_latex(answer)]
