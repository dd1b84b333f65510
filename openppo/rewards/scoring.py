"""Sources of rewards, alone or several at the same time."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from openppo.tracking import progress_bar
from openppo.types import Interrupted, NeverStops, Score, StopCheck, Trajectory

_LONGEST_QUOTE = 200
_SECONDS_BETWEEN_LOOKS = 0.5
_LARGEST = 3.4e38
"""Of what float32 can hold, in which rewards are added up."""


class Scorer(Protocol):
    """A source of rewards. ``str(scorer)`` is what messages call it, best the flag that it came from.

    ``collective`` scorers run forwards of partitioned weights: all ranks call ``score`` together, on the thread that
    trains. The others are independent on each rank, never touch the process group, and may run on any thread.
    """

    collective: bool

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in their order."""
        ...


@runtime_checkable
class CountsSamples(Protocol):
    """A scorer that says how far it is."""

    n_scored: int
    """Samples of the call of ``score`` under way, or of the last one, that are done; read from another thread."""


@dataclass(frozen=True)
class PendingScores:
    """Scores that may still be under way."""

    wait: Callable[[], list[Score]]
    """Blocks until the scores are there and returns them; raises what the scorer raised.

    ``Interrupted`` if they are not there yet and a signal has arrived on this rank.
    """


def start_scoring(
    scorer: Scorer, trajectories: Sequence[Trajectory], stop: StopCheck | None = None, show_progress: bool = False
) -> PendingScores:
    """Begin to score: in the background if the scorer allows it, else at once, on this thread.

    Parts of a ``CombinedScorer`` that run in the background start first. ``show_progress`` shows a bar while scores of
    the background are waited for.
    """
    if isinstance(scorer, CombinedScorer):
        return scorer.start(trajectories, stop, show_progress)
    if scorer.collective:
        scores = scorer.score(trajectories)
        return PendingScores(lambda: scores)
    thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
    future = thread.submit(scorer.score, trajectories)
    thread.shutdown(wait=False)
    shown = len(trajectories) if show_progress else None
    return PendingScores(lambda: _result(future, stop or NeverStops(), scorer, shown))


def _result(future: Future[list[Score]], stop: StopCheck, scorer: Scorer, shown: int | None) -> list[Score]:
    """``shown`` is how many samples a bar counts, None for no bar."""
    n_seen = 0
    with progress_bar(shown or 0, "scoring", enabled=shown is not None and not future.done()) as bar:
        while not wait([future], _SECONDS_BETWEEN_LOOKS).done:
            if stop.requested():
                raise Interrupted("a signal")
            if isinstance(scorer, CountsSamples):
                n_new = max(0, scorer.n_scored - n_seen)
                n_seen += n_new
                if n_new:
                    bar.update(n_new)
    return future.result()


class CombinedScorer:
    """Several sources: named rewards side by side, token rewards summed.

    ``ValueError`` when two sources give a trajectory rewards of the same name.
    """

    def __init__(self, scorers: Sequence[Scorer]) -> None:
        self.scorers = sorted(scorers, key=lambda scorer: scorer.collective)  # background parts start first
        self.collective = any(scorer.collective for scorer in scorers)

    def __str__(self) -> str:
        return " and ".join(map(str, self.scorers))

    def start(
        self, trajectories: Sequence[Trajectory], stop: StopCheck | None = None, show_progress: bool = False
    ) -> PendingScores:
        """Start all sources; ``start_scoring`` calls this."""
        parts = [start_scoring(scorer, trajectories, stop, show_progress) for scorer in self.scorers]
        return PendingScores(lambda: [self._merge(scores) for scores in zip(*(p.wait() for p in parts), strict=True)])

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in their order."""
        return self.start(trajectories).wait()

    def _merge(self, scores: Sequence[Score]) -> Score:
        """The scores of all sources for one trajectory as one."""
        origin: dict[str, Scorer] = {}
        for scorer, score in zip(self.scorers, scores, strict=True):
            for name in score.rewards:
                if name in origin:
                    raise ValueError(
                        f"{origin[name]} and {scorer} both give a reward named {name!r}; give one another name."
                    )
                origin[name] = scorer
        per_token = [score.token_rewards for score in scores if score.token_rewards is not None]
        ends = [s.step_ends or [True] * len(s.token_rewards) for s in scores if s.token_rewards is not None]
        return Score(
            rewards={name: reward for score in scores for name, reward in score.rewards.items()},
            token_rewards=[math.fsum(rewards) for rewards in zip(*per_token, strict=True)] if per_token else None,
            step_ends=[any(of_token) for of_token in zip(*ends, strict=True)] if ends else None,
            failed=any(score.failed for score in scores),
        )


def check_scores(scores: Sequence[Any], trajectories: Sequence[Trajectory], source: str) -> list[float]:
    """The scores as floats; ``ValueError`` naming ``source`` and the sample for a wrong number of them or a bad one."""
    if len(scores) != len(trajectories):
        raise ValueError(f"{source} returned {len(scores)} scores for {len(trajectories)} samples; one each is needed.")
    return [check_number(score, t, source) for score, t in zip(scores, trajectories, strict=True)]


def check_number(score: Any, trajectory: Trajectory, source: str) -> float:
    """A score of Python, NumPy or torch as float; ``ValueError`` unless it is a finite number."""
    single = hasattr(score, "item") and math.prod(score.shape) == 1  # of NumPy or torch
    number = score.item() if single else score
    if not (isinstance(number, int | float) and abs(number) <= _LARGEST):  # false for NaN too
        raise ValueError(
            f"{source} returned {shortened(score)} for {name_sample(trajectory)}; a finite number is needed."
        )
    return float(number)


def policy_text(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text that the policy wrote, without special tokens; a line break between spans of actions."""
    return "\n".join(span_texts(trajectory, tokenizer))


def span_texts(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of each span of actions, without special tokens."""
    ids = trajectory.token_ids
    return [str(tokenizer.decode(ids[start:stop], skip_special_tokens=True)) for start, stop in trajectory.spans]


def name_sample(trajectory: Trajectory) -> str:
    """Name of a sample in messages: its prompt, shortened, and its row."""
    prompt = trajectory.prompt
    row = f" (row {prompt.index + 1} of {prompt.source})" if prompt.source else ""
    return f"prompt {shortened(prompt.text)}{row}"


def shortened(value: Any) -> str:
    """``value`` for a message."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."
