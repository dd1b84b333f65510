"""Sources of rewards, alone or several at the same time."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from openppo.datasets.templates import Message, shortened, text_of
from openppo.rewards.response_text import decoded, text_of_ids, written_ids, written_spans
from openppo.types import Interrupted, Score, StopCheck, Trajectory

T = TypeVar("T")

_SECONDS_BETWEEN_LOOKS = 0.5
LARGEST_REWARD = 3.4e38  # of what float32 can hold, in which rewards are added up
_MOST_BYTES = 4  # of one character in UTF-8


class Scorer(Protocol):
    """A source of rewards. ``str(scorer)`` is its name in messages, best the flag that it came from.

    ``collective`` scorers run forwards of partitioned weights: all ranks call ``score`` together, on the thread that
    trains. The others are independent on each rank, never touch the process group, and may run on any thread.
    """

    collective: bool

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in their order."""


def start_scoring(
    scorer: Scorer, trajectories: Sequence[Trajectory], stop: StopCheck | None = None
) -> Callable[[], list[Score]]:
    """Begin to score: in the background if the scorer allows it, else at once, on this thread.

    Returns a function that blocks until the scores are there and returns them, or raises what the scorer raised;
    ``Interrupted`` if they are not there yet and a signal has arrived on this rank.
    """
    if isinstance(scorer, CombinedScorer):
        parts = [start_scoring(part, trajectories, stop) for part in scorer.scorers]
        return lambda: [
            scorer.merged(scores)
            for scores in zip(*(wait_for() for wait_for in parts), strict=True)
        ]
    if scorer.collective:
        scores = scorer.score(trajectories)
        return lambda: scores
    thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
    future = thread.submit(scorer.score, trajectories)
    thread.shutdown(wait=False)

    def result() -> list[Score]:
        while not wait([future], _SECONDS_BETWEEN_LOOKS).done:
            if stop is not None and stop.requested():
                raise Interrupted("a signal")
        return future.result()

    return result


class CombinedScorer:
    """Several sources: named rewards and extras side by side, token rewards summed.

    ``ValueError`` when two sources give a trajectory rewards or extras of the same name.
    """

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self.scorers = sorted(
            scorers, key=lambda scorer: scorer.collective
        )  # background parts start first
        self.collective = any(scorer.collective for scorer in scorers)

    def __str__(self) -> str:
        return " and ".join(map(str, self.scorers))

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in their order."""
        return start_scoring(self, trajectories)()

    def merged(self, scores: Sequence[Score]) -> Score:
        """The scores of all sources for one trajectory as one."""
        rewards = self._side_by_side([score.rewards for score in scores], kind="a reward")
        extras = self._side_by_side([score.extras for score in scores], kind="an extra")
        notes = self._side_by_side([score.notes for score in scores], kind="a text")
        per_token = [score.token_rewards for score in scores if score.token_rewards is not None]
        ends = [
            s.step_ends or [True] * len(s.token_rewards)
            for s in scores
            if s.token_rewards is not None
        ]
        return Score(
            rewards,
            token_rewards=[math.fsum(of_token) for of_token in zip(*per_token, strict=True)]
            if per_token
            else None,
            step_ends=[any(of_token) for of_token in zip(*ends, strict=True)] if ends else None,
            failed=any(score.failed for score in scores),
            error=next((score.error for score in scores if score.failed), ""),
            extras=extras,
            notes=notes,
        )

    def _side_by_side(self, parts: Sequence[Mapping[str, T]], kind: str) -> dict[str, T]:
        """The named values of all sources; ``ValueError`` where two of them have a value of one name."""
        joined: dict[str, T] = {}
        for part in parts:
            if twice := joined.keys() & part.keys():
                raise ValueError(
                    f"{self}: two of them give {kind} named {min(twice)!r}; give one another name."
                )
            joined |= part
        return joined


def check_scores(
    scores: Sequence[Any], trajectories: Sequence[Trajectory], source: str
) -> list[float]:
    """The scores as floats; ``ValueError`` naming ``source`` and the sample for a wrong number of them or a bad one."""
    if len(scores) != len(trajectories):
        raise ValueError(
            f"{source} returned {len(scores)} scores for {len(trajectories)} samples; one each is needed."
        )
    return [check_number(score, t, source) for score, t in zip(scores, trajectories, strict=True)]


def refuse_images(source: str, trajectories: Sequence[Trajectory]) -> None:
    """``ValueError`` for samples with images, which an agent may show, and ``source`` does not read."""
    if shown := [t for t in trajectories if t.prompt.media]:
        raise ValueError(
            f"{source} reads no images, and {name_sample(shown[0])} has some: use a --reward_fn."
        )


def check_number(score: Any, trajectory: Trajectory, source: str) -> float:
    """A score of Python, NumPy or torch as float; ``ValueError`` unless it is a finite number."""
    number = finite_number(score)
    if number is None:
        sample = name_sample(trajectory)
        raise ValueError(
            f"{source} returned {shortened(score)} for {sample}; a finite number is needed."
        )
    return number


def finite_number(value: Any) -> float | None:
    """Number of Python, NumPy or torch as float; None for anything else, NaN and infinities included."""
    number = _plain(value)
    is_finite = (
        isinstance(number, int | float) and abs(number) <= LARGEST_REWARD
    )  # false for NaN too
    return float(number) if is_finite else None


def is_number(value: Any) -> bool:
    """Test for a number of Python, NumPy or torch; a truth value is one, and so is NaN."""
    return isinstance(_plain(value), int | float)


def _plain(value: Any) -> Any:
    """The Python object of an array or tensor with one element; any other value as it is."""
    has_one = hasattr(value, "item") and math.prod(getattr(value, "shape", [0])) == 1
    return value.item() if has_one else value


def episode_messages(trajectory: Trajectory) -> list[Message]:
    """Messages of an episode after those of its prompt; none without an episode."""
    if trajectory.episode is None:
        return []
    asked, messages = trajectory.prompt.messages or [], trajectory.episode.messages
    return messages[len(asked) :] if messages[: len(asked)] == asked else messages


def turn_texts(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the policy said in each turn: the assistant's messages of an episode, else the text of each span."""
    if trajectory.episode is None:
        return span_texts(trajectory, tokenizer)
    said = [message for message in episode_messages(trajectory) if message["role"] == "assistant"]
    return [text_of(message.get("content")) for message in said]


def answer_text(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str:
    """What rewards of single responses read: all that the policy wrote, of an episode its last message."""
    texts = turn_texts(trajectory, tokenizer)
    return "\n".join(texts if trajectory.episode is None else texts[-1:])


def answer_length(trajectory: Trajectory) -> int:
    """Number of tokens of it."""
    spans = trajectory.spans if trajectory.episode is None else trajectory.spans[-1:]
    return sum(stop - start for start, stop in spans)


def span_texts(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of each span of actions, without what ended it."""
    return [text_of_ids(ids, tokenizer) for ids in written_spans(trajectory, tokenizer)]


def name_sample(trajectory: Trajectory) -> str:
    """Name of a sample in messages: its prompt, shortened, and its row."""
    prompt = trajectory.prompt
    row = f" (row {prompt.index + 1} of {prompt.source})" if prompt.source else ""
    return f"prompt {shortened(prompt.text)}{row}"


def step_tokens(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, separator: str
) -> list[int]:
    """Index in ``token_ids`` of the last token of each step, in order; a step lies within one span of actions."""
    return [
        start + end
        for (start, _), ids in zip(
            trajectory.spans, written_spans(trajectory, tokenizer), strict=True
        )
        for end in step_ends(ids, tokenizer, separator)
    ]


def score_of_steps(trajectory: Trajectory, ends: Sequence[int], rewards: Sequence[float]) -> Score:
    """Score with ``rewards`` of steps at the tokens ``ends`` of the trajectory."""
    token_rewards, step_ends = (
        [0.0] * len(trajectory.token_ids),
        [False] * len(trajectory.token_ids),
    )
    for end, reward in zip(ends, rewards, strict=True):
        token_rewards[end] += reward
        step_ends[end] = True
    return Score(token_rewards=token_rewards, step_ends=step_ends)


def step_ends(
    response_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, separator: str
) -> list[int]:
    """Index, within ``response_ids``, of the last token of each step, in order.

    Steps are the parts of the response's text (EOS and PAD at its end left out) between ``separator``, blank ones left
    out. A step's last token is the one that completes its text, separator and blanks at the end not counted. Places are
    found by decoding: a token may hold the end of a step and the separator, or two steps; a character may take several.
    """
    ids = written_ids(response_ids, tokenizer, is_complete=False)

    def decode(start: int, stop: int) -> str:
        return decoded(ids[start:stop], tokenizer)

    first, text = (
        0,
        decode(0, len(ids)),
    )  # the text of ids[first:], and where in it the next piece begins
    place, ends = 0, []
    for piece in text.split(separator):
        if piece.strip():
            until_here = text[: max(0, place + len(piece.rstrip()))]
            stop = _end(until_here, decode, first, last=len(ids))
            ends.append(stop - 1)
            rest = decode(stop, len(ids))
            if text.endswith(
                rest
            ):  # not within a character: text after it need not be decoded again
                place -= len(text) - len(rest)
                first, text = stop, rest
        place += len(piece) + len(separator)
    return ends


def _end(text: str, decode: Callable[[int, int], str], first: int, last: int) -> int:
    """The smallest ``stop`` in ``first..last`` for which the tokens ``first..stop`` begin with ``text``.

    Larger ones do so too, except where tokens of single bytes decode to replacement characters until a character is
    whole: up to three in a row may not.
    """

    def is_complete(stop: int) -> bool:
        return decode(first, stop).startswith(text)

    found = bisect_left(range(last + 1), True, lo=first, key=is_complete)
    while earlier := [
        stop for stop in range(max(first, found - _MOST_BYTES), found) if is_complete(stop)
    ]:
        found = earlier[0]
    return found


class TaskScorer:
    """Scores each trajectory with the source of its task; those of a task without one (None) get none."""

    collective = False

    def __init__(self, scorers: Mapping[str, Scorer | None]) -> None:
        assert not any(scorer is not None and scorer.collective for scorer in scorers.values()), (
            "one rank by itself"
        )
        self.scorers = scorers

    def __str__(self) -> str:
        return " and ".join(str(scorer) for scorer in self.scorers.values() if scorer is not None)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in their order."""
        scores: dict[int, Score] = {}
        for name, scorer in self.scorers.items():
            rows = [
                i for i, trajectory in enumerate(trajectories) if trajectory.prompt.task == name
            ]
            if rows and scorer is not None:
                scores.update(zip(rows, scorer.score([trajectories[i] for i in rows]), strict=True))
        return [scores.get(i, Score({})) for i in range(len(trajectories))]
