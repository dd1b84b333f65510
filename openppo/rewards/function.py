"""Scores from a user's Python function."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.rewards.function_values import Values, values_of
from openppo.rewards.reward_function import RewardFunction
from openppo.rewards.scoring import (
    check_number,
    finite_number,
    is_number,
    name_sample,
    score_of_steps,
    step_tokens,
)
from openppo.types import Sample, Score

_EXTRA = "extra"
_SCORE = "score"
"""Key of the reward in verl's dicts."""
_LONGEST_NOTE = 500
_OF_OTHER_THREADS = ("main thread", "same thread", "no current event loop in thread")
"""Parts of the error messages of ``signal``, ``sqlite3`` and ``asyncio``."""
_MAIN_THREAD = "It needs the main thread: use --reward_workers 1, which calls a plain function of a file on one."


@dataclass
class FunctionScorer:
    """Rewards from ``function``, which runs on a thread of its own or in processes.

    An async function runs in one event loop.

    For each sample the function returns a number, a dict of named numbers, or a list with one number per sampled token
    or per step (see ``step_ends``); or a dict of "reward", any of these, and "extra", named numbers that are only
    logged; or a dict with "score", which alone is the reward. A function of a batch returns a list of these, or a dict
    of lists; if the dict has "rewards", only these (and a dict "extra") count. ``name`` is given to rewards without
    one. When the function raises for a batch, it is called again with each sample alone; a sample for which it raises
    gets ``error_value``, if set. Rewards of tokens and steps are multiplied by ``token_weight``. ``weighted`` holds the
    names in ``--reward_weights`` (None: the option does not apply here): if they include a key other than "score",
    all numbers of the dict are rewards.
    """

    function: RewardFunction
    tokenizer: PreTrainedTokenizerBase
    name: str = "reward"
    error_value: float | None = None
    step_separator: str = "\n\n"
    token_weight: float = 1.0
    weighted: Collection[str] | None = ()
    collective = False

    def __post_init__(self) -> None:
        set_gpu: partial[None] | None = None
        if torch.cuda.is_available():
            # On a new thread "cuda" is GPU 0, whatever the thread that loaded the function has chosen.
            set_gpu = partial(torch.cuda.set_device, torch.cuda.current_device())
        n_threads = max(1, self.function.n_processes)  # each thread waits for one process
        self._thread = ThreadPoolExecutor(n_threads, "reward_fn", initializer=set_gpu)
        # One loop for all calls, since clients belong to the loop that they were made in.
        self._loop = asyncio.new_event_loop() if self.function.is_async else None
        self._has_logged_keys = False

    def __str__(self) -> str:
        return self.function.where

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Return one score per sample.

        ``RuntimeError`` from an exception of the function, and ``ValueError`` for a return value of another kind or a
        number that is not finite, name the sample.
        """
        if not samples:
            return []

        results = self._results([values_of(sample, self.tokenizer) for sample in samples])
        pairs = zip(results, samples, strict=True)
        scores = [self._score(result, sample) for result, sample in pairs]
        failed = [score for score in scores if score.failed]
        if failed:
            logger.warning(
                "%s raised on %d of %d samples, whose reward is --reward_error_value %g; the first: %s",
                self,
                len(failed),
                len(scores),
                self.error_value,
                failed[0].error,
            )
        return scores

    def _results(self, samples: Sequence[Values]) -> list[Any]:
        """Results of the function for the values of each sample, or the exceptions that it raised."""
        alone = [[sample] for sample in samples]
        if not self.function.is_batch:
            return self._call(alone)

        [result] = self._call([samples])
        if not isinstance(result, BaseException):
            return _split(result, len(samples), str(self))

        answers = self._call(alone)
        n_raised = sum(isinstance(answer, BaseException) for answer in answers)
        if self.error_value is None and n_raised == 0:
            raise RuntimeError(
                f"{self} raised {result!r} for a batch of {len(samples)} samples, but for none of them alone."
            ) from result
        results = []
        for answer in answers:
            is_result = not isinstance(answer, BaseException)
            results.append(_split(answer, 1, str(self))[0] if is_result else answer)
        return results

    def _call(self, batches: Sequence[Sequence[Values]]) -> list[Any]:
        """Result or exception of the function for each batch; an async function runs on all at the same time."""
        if self._loop is not None:
            future = self._thread.submit(self._loop.run_until_complete, self._gather(batches))
            try:
                return future.result()
            except SystemExit as error:
                # Uncaught, it would end the run with its own exit status, perhaps 0.
                raise RuntimeError(
                    f"{self} raised {error!r}. Take the call of sys.exit() out."
                ) from error

        futures = [self._thread.submit(self.function, batch) for batch in batches]
        wait(futures)
        return [future.exception() or future.result() for future in futures]

    async def _gather(self, batches: Sequence[Sequence[Values]]) -> list[Any]:
        """Await the function on all batches; exceptions are results."""
        return await asyncio.gather(*map(self.function, batches), return_exceptions=True)

    def _score(self, result: Any, sample: Sample) -> Score:
        """Score from a result of the function, or from its exception."""
        if isinstance(result, BaseException):
            return self._score_of_error(result, sample)
        if isinstance(result, Mapping):
            extras = result.get(_EXTRA)
            if isinstance(extras, Mapping):
                return self._score_with_extras(result, extras, sample)
            values = {str(name): value for name, value in result.items()}
            return self._score_of_dict(values, sample)
        is_array = getattr(result, "ndim", 0) == 1 and len(result) != 1
        if isinstance(result, list | tuple) or is_array:
            return self._score_of_tokens(list(result), sample)
        return Score({self.name: self._number(result, sample)})

    def _number(self, value: Any, sample: Sample) -> float:
        """Reward as float; ``ValueError`` names the sample unless it is a finite number."""
        return check_number(value, sample, str(self))

    def _score_of_error(self, error: BaseException, sample: Sample) -> Score:
        """Score of a sample for which the function raised; ``RuntimeError`` without ``error_value``."""
        name = name_sample(sample)
        text = f"{error!r} for {name}"
        has_remedy = self.function.n_processes == 0 and _needs_main_thread(error)
        if has_remedy:
            text = f"{text}. {_MAIN_THREAD}"

        if self.error_value is not None and isinstance(error, Exception):
            return Score({self.name: self.error_value}, failed=True, error=text)
        if has_remedy:
            raise RuntimeError(f"{self} raised {text}") from error
        raise RuntimeError(
            f"{self} raised {error!r} for {name}. With --reward_error_value such samples get a reward instead."
        ) from error

    def _score_with_extras(
        self, result: Mapping[Any, Any], extras: Mapping[Any, Any], sample: Sample
    ) -> Score:
        """Score of a dict with a key "extra" of numbers that are only logged."""
        rewards: Any = {name: value for name, value in result.items() if name != _EXTRA}
        if rewards.keys() == {"reward"}:
            rewards = rewards["reward"]
        score = self._score(rewards, sample)

        numbers = {}
        for name, value in extras.items():
            where = f"{self}, as extra {name!r},"
            numbers[str(name)] = check_number(value, sample, where)
        return replace(score, extras=score.extras | numbers)

    def _score_of_dict(self, values: Mapping[str, Any], sample: Sample) -> Score:
        """Score of named rewards; only "score" is a reward, unless ``weighted`` names other keys."""
        if _SCORE not in values:
            rewards = {name: self._number(value, sample) for name, value in values.items()}
            return Score(rewards)

        named = values.keys() & set(self.weighted or ())
        if named - {_SCORE}:
            numbers = {name for name, value in values.items() if is_number(value)}
            rewarded = numbers | named | {_SCORE}
            rewards = {}
            notes = {}
            for name, value in values.items():
                if name in rewarded:
                    rewards[name] = self._number(value, sample)
                else:
                    notes[name] = _note(value)
            return Score(rewards, notes=notes)

        others = {name: value for name, value in values.items() if name != _SCORE}
        extras, notes = _numbers_and_notes(others)
        self._log_keys(others, numbers=extras)

        score = self._score(values[_SCORE], sample)
        if named and score.token_rewards is not None:
            remedy = f"use --reward_weights {self.name}=NUMBER"
            raise ValueError(
                f"{self} returned a list as 'score', and rewards of tokens have no such name: {remedy}."
            )
        if named and score.rewards.keys() == {self.name}:
            score = replace(score, rewards={_SCORE: score.rewards[self.name]})
        return replace(score, extras=score.extras | extras, notes=score.notes | notes)

    def _log_keys(self, others: Collection[str], numbers: Collection[str]) -> None:
        """Log once that ``others`` beside "score" are not rewards, and how ``numbers`` can become rewards."""
        if self._has_logged_keys or not others:
            return
        self._has_logged_keys = True

        remedy = ""
        if numbers and self.weighted is None:
            remedy = " To sum them, return no key 'score'."
        elif numbers:
            weights = " ".join(f"{name}=1" for name in (_SCORE, *numbers))
            remedy = f" To sum them, name them: --reward_weights {weights}."
        logger.info(
            "%s returns a dict with 'score', which alone is the reward: %s %s only logged.%s",
            self,
            ", ".join(others),
            "is" if len(others) == 1 else "are",
            remedy,
        )

    def _score_of_tokens(self, numbers: Sequence[Any], sample: Sample) -> Score:
        """Score with rewards of action tokens, from one number per token or per step."""
        rewards = [self.token_weight * self._number(number, sample) for number in numbers]
        mask = sample.last.action_mask
        if len(rewards) == sum(mask):
            remaining = iter(rewards)
            token_rewards = [next(remaining) if is_action else 0.0 for is_action in mask]
            return Score(token_rewards=token_rewards)

        ends = step_tokens(sample, self.tokenizer, self.step_separator)
        if len(rewards) != len(ends):
            raise ValueError(
                f"{self} returned {len(rewards)} numbers for {name_sample(sample)}, whose response has {sum(mask)} "
                f"tokens and {len(ends)} steps (text between --step_separator {self.step_separator!r}); give one for "
                "each token or one for each step."
            )
        return score_of_steps(sample.last, ends, rewards)


def _split(result: Any, n: int, where: str) -> list[Any]:
    """Split the result for a batch of ``n`` into one for each sample; ``where`` names the function."""
    if isinstance(result, Mapping):
        extras = result.get(_EXTRA)
        if "rewards" in result and isinstance(extras, Mapping):
            return _rows({"reward": result["rewards"], _EXTRA: extras}, n, where)
        if "rewards" not in result:
            return _rows(result, n, where)
        result = result["rewards"]

    if not isinstance(result, Iterable) or isinstance(result, str):
        raise ValueError(
            f"{where} returned {result!r}; a list with one result per sample is needed."
        )
    results = list(result)
    if len(results) != n:
        raise ValueError(
            f"{where} returned {len(results)} scores for {n} samples; one each is needed."
        )
    return results


def _rows(columns: Mapping[Any, Any], n: int, where: str) -> list[dict[Any, Any]]:
    """Split a dict of lists, or of such dicts, into a dict for each of ``n`` samples."""
    rows: list[dict[Any, Any]] = [{} for _ in range(n)]
    for name, column in columns.items():
        split = _rows if isinstance(column, Mapping) else _split
        for row, value in zip(rows, split(column, n, where), strict=True):
            row[name] = value
    return rows


def _numbers_and_notes(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Finite numbers among values that are only logged, and texts of all others."""
    numbers = {}
    notes = {}
    for name, value in values.items():
        number = finite_number(value)
        if number is None:
            notes[name] = _note(value)
        else:
            numbers[name] = number
    return numbers, notes


def _needs_main_thread(error: BaseException) -> bool:
    """True if ``error``, or a cause of it, is raised only outside the main thread."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(text in str(each) for each in causes for text in _OF_OTHER_THREADS)


def _note(value: Any) -> str:
    """Text of a value that is only logged, without halves of characters and at most 500 characters long."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > _LONGEST_NOTE:
        text = f"{text[: _LONGEST_NOTE - 3]}..."
    return text.encode(errors="replace").decode()
