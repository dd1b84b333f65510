"""Sources of rewards, one or several at the same time, and the texts and steps that they score."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from openppo.datasets.templates import Message, shortened, text_of
from openppo.rewards.response_text import decoded, text_of_ids, written_ids, written_spans
from openppo.types import Interrupted, Sample, Score, Segment, StopCheck

T = TypeVar("T")

LARGEST_REWARD = 3.4e38
"""Bound of float32, in which rewards are added up."""
_SECONDS_BETWEEN_LOOKS = 0.5
_MOST_BYTES = 4
"""Bytes of one character in UTF-8."""


class Scorer(Protocol):
    """A source of rewards. ``str(scorer)`` is its name in messages, preferably its flag.

    ``collective`` scorers run forwards of partitioned weights: all ranks call ``score`` together, on the thread that
    trains. The others are independent on each rank, never touch the process group, and may run on any thread.
    """

    collective: bool

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample, in their order."""


def start_scoring(
    scorer: Scorer, samples: Sequence[Sample], stop: StopCheck | None = None
) -> Callable[[], list[Score]]:
    """Start to score: in the background if the scorer allows it, else at once, on this thread.

    Returns a function that blocks until the scores are there and returns them, or raises the scorer's exception;
    ``Interrupted`` if they are not there yet and a signal has arrived on this rank.
    """
    if isinstance(scorer, CombinedScorer):
        combined = scorer
        waits = [start_scoring(each, samples, stop) for each in combined.scorers]

        def merged() -> list[Score]:
            by_scorer = [wait_for() for wait_for in waits]
            return [combined.merged(scores) for scores in zip(*by_scorer, strict=True)]

        return merged

    if scorer.collective:
        scores = scorer.score(samples)
        return lambda: scores

    thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
    future = thread.submit(scorer.score, samples)
    thread.shutdown(wait=False)

    def result() -> list[Score]:
        while not wait([future], _SECONDS_BETWEEN_LOOKS).done:
            if stop is not None and stop.requested():
                raise Interrupted("a signal")
        return future.result()

    return result


class CombinedScorer:
    """Several sources: named rewards and extras side by side, token rewards summed.

    ``ValueError`` when two sources give a sample rewards or extras of the same name.
    """

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        # Background scorers start first.
        self.scorers = sorted(scorers, key=lambda scorer: scorer.collective)
        self.collective = any(scorer.collective for scorer in scorers)

    def __str__(self) -> str:
        return " and ".join(map(str, self.scorers))

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample, in their order."""
        return start_scoring(self, samples)()

    def merged(self, scores: Sequence[Score]) -> Score:
        """Merge the scores of all sources for one sample."""
        token_rewards = []
        step_ends = []
        for score in scores:
            if score.token_rewards is not None:
                token_rewards.append(score.token_rewards)
                step_ends.append(score.step_ends or [True] * len(score.token_rewards))

        errors = [score.error for score in scores if score.failed]
        merged = Score(
            self._join([score.rewards for score in scores], kind="a reward"),
            extras=self._join([score.extras for score in scores], kind="an extra"),
            notes=self._join([score.notes for score in scores], kind="a text"),
            failed=len(errors) > 0,
            error=errors[0] if errors else "",
        )
        if not token_rewards:
            return merged
        return replace(
            merged,
            token_rewards=[math.fsum(rewards) for rewards in zip(*token_rewards, strict=True)],
            step_ends=[any(ends) for ends in zip(*step_ends, strict=True)],
        )

    def _join(self, parts: Sequence[Mapping[str, T]], kind: str) -> dict[str, T]:
        """Join the named values of all sources; ``ValueError`` if two of them use one name."""
        joined: dict[str, T] = {}
        for part in parts:
            duplicates = joined.keys() & part.keys()
            if duplicates:
                raise ValueError(
                    f"{self}: two of them give {kind} named {min(duplicates)!r}; give one another name."
                )
            joined |= part
        return joined


def check_scores(scores: Sequence[Any], samples: Sequence[Sample], where: str) -> list[float]:
    """Scores as floats; ``ValueError`` names ``where``, and the sample of a bad score.

    There must be one score per sample.
    """
    if len(scores) != len(samples):
        raise ValueError(
            f"{where} returned {len(scores)} scores for {len(samples)} samples; one each is needed."
        )
    pairs = zip(scores, samples, strict=True)
    return [check_number(score, sample, where) for score, sample in pairs]


def refuse_images(where: str, samples: Sequence[Sample]) -> None:
    """Raise ``ValueError`` for samples with images, for example an agent's, since ``where`` does not read images."""
    with_images = [sample for sample in samples if sample.last.media]
    if with_images:
        name = name_sample(with_images[0])
        raise ValueError(f"{where} reads no images, and {name} has some: use a --reward_fn.")


def check_number(score: Any, sample: Sample, where: str) -> float:
    """A score of Python, NumPy or torch as float; ``ValueError`` unless it is a finite number."""
    number = finite_number(score)
    if number is None:
        name = name_sample(sample)
        raise ValueError(
            f"{where} returned {shortened(score)} for {name}; a finite number is needed."
        )
    return number


def finite_number(value: Any) -> float | None:
    """Number of Python, NumPy or torch as float; None for anything else, NaN and infinities included."""
    number = _plain(value)
    if not isinstance(number, int | float):
        return None
    is_finite = abs(number) <= LARGEST_REWARD  # false for NaN too
    return float(number) if is_finite else None


def is_number(value: Any) -> bool:
    """True for a number of Python, NumPy or torch, including truth values and NaN."""
    return isinstance(_plain(value), int | float)


def _plain(value: Any) -> Any:
    """The Python object of an array or tensor with one element; any other value as it is."""
    if not hasattr(value, "item"):
        return value
    n_elements = math.prod(getattr(value, "shape", [0]))
    return value.item() if n_elements == 1 else value


def episode_messages(sample: Sample) -> list[Message]:
    """Messages of an episode after those of its prompt; none without an episode."""
    if sample.episode is None:
        return []
    messages = sample.episode.messages
    prompt = sample.prompt.messages or []
    return messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages


def turn_texts(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the policy's turns: the assistant's messages of an episode, else the text of each span."""
    if sample.episode is None:
        return span_texts(sample, tokenizer)
    return role_texts(sample, "assistant")


def role_texts(sample: Sample, role: str) -> list[str]:
    """Texts of an episode's messages of one role; none without an episode."""
    messages = [each for each in episode_messages(sample) if each["role"] == role]
    return [text_of(message.get("content")) for message in messages]


def answer_text(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text that rewards of single responses read: all turns of the policy, but only its last message in an episode."""
    texts = turn_texts(sample, tokenizer)
    return "\n".join(texts if sample.episode is None else texts[-1:])


def answer_length(sample: Sample) -> int:
    """Number of tokens of the answer: of all turns, or of an episode's last."""
    spans = sample.last.spans if sample.episode is None else sample.last.spans[-1:]
    return sum(stop - start for start, stop in spans)


def span_texts(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of each span of actions in the last segment, without the tokens that ended it."""
    return [text_of_ids(ids, tokenizer) for ids in written_spans(sample, tokenizer)]


def name_sample(sample: Sample) -> str:
    """Name of a sample in messages: its prompt, shortened, and its row."""
    prompt = sample.prompt
    row = f" (row {prompt.index + 1} of {prompt.source})" if prompt.source else ""
    return f"prompt {shortened(prompt.text)}{row}"


def step_tokens(sample: Sample, tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Index in the last segment's ``token_ids`` of the last token of each step, in order.

    A step lies within one span of actions.
    """
    tokens: list[int] = []
    written = written_spans(sample, tokenizer)
    for (start, _), ids in zip(sample.last.spans, written, strict=True):
        tokens += [start + end for end in step_ends(ids, tokenizer, separator)]
    return tokens


def score_of_steps(segment: Segment, ends: Sequence[int], rewards: Sequence[float]) -> Score:
    """Score with ``rewards`` of steps at the tokens ``ends`` of a sample's last segment."""
    n_tokens = len(segment.token_ids)
    token_rewards = [0.0] * n_tokens
    step_ends = [False] * n_tokens
    for end, reward in zip(ends, rewards, strict=True):
        token_rewards[end] += reward
        step_ends[end] = True
    return Score(token_rewards=token_rewards, step_ends=step_ends)


def step_ends(
    response_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, separator: str
) -> list[int]:
    """Index in ``response_ids`` of the last token of each step, in order.

    ``separator`` divides the response's text (without EOS and PAD at its end) into steps; blank ones are left out. A
    step's last token is the one that completes its text, without separator and blanks at the end. Places are found by
    decoding, since a token may hold the end of a step and the separator, or two steps, and a character may take several
    tokens.
    """
    ids = written_ids(response_ids, tokenizer, is_complete=False)

    def decode(start: int, stop: int) -> str:
        return decoded(ids[start:stop], tokenizer)

    first = 0
    text = decode(first, len(ids))  # text of ids[first:]
    place = 0  # of the next piece in the text
    ends = []
    for piece in text.split(separator):
        if piece.strip():
            until_here = text[: max(0, place + len(piece.rstrip()))]
            stop = _end(until_here, decode, first, last=len(ids))
            ends.append(stop - 1)

            remaining = decode(stop, len(ids))
            if text.endswith(remaining):
                # Not within a character: the text before it need not be decoded again.
                place -= len(text) - len(remaining)
                first = stop
                text = remaining
        place += len(piece) + len(separator)
    return ends


def _end(text: str, decode: Callable[[int, int], str], first: int, last: int) -> int:
    """Smallest ``stop`` in ``first..last`` for which the text of tokens ``first..stop`` begins with ``text``.

    So does the text for each larger ``stop``, except while single-byte tokens decode to replacement characters until a
    character is whole: up to three values of ``stop`` in a row may fail.
    """

    def is_complete(stop: int) -> bool:
        return decode(first, stop).startswith(text)

    stop = bisect_left(range(last + 1), True, lo=first, key=is_complete)
    while True:
        earlier = filter(is_complete, range(max(first, stop - _MOST_BYTES), stop))
        earliest = next(earlier, None)
        if earliest is None:
            return stop
        stop = earliest


class TaskScorer:
    """Scores each sample with the source of its task; a task without one (None) has no rewards."""

    collective = False

    def __init__(self, scorers: Mapping[str, Scorer | None]) -> None:
        self.scorers = {name: scorer for name, scorer in scorers.items() if scorer is not None}
        assert not any(scorer.collective for scorer in self.scorers.values()), "one rank by itself"

    def __str__(self) -> str:
        return " and ".join(map(str, self.scorers.values()))

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample, in their order."""
        scores = [Score() for _ in samples]
        for name, scorer in self.scorers.items():
            rows = [i for i, sample in enumerate(samples) if sample.prompt.task == name]
            if rows:
                task_scores = scorer.score([samples[i] for i in rows])
                for i, score in zip(rows, task_scores, strict=True):
                    scores[i] = score
        return scores
