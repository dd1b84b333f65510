"""Scores from a Python function, called with what the names of its parameters say."""

import asyncio
import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.rewards.answer_process import FunctionProcesses
from openppo.rewards.function_values import (
    BATCH_NAMES,
    BEHIND_COLUMNS,
    IN_BOTH_FORMS,
    SINGLE_NAMES,
    VERL_NAMES,
    Sample,
    make_samples,
)
from openppo.rewards.scoring import (
    check_number,
    finite_number,
    is_number,
    name_sample,
    score_of_steps,
    step_tokens,
)
from openppo.types import Score, Trajectory

_EXTRA = "extra"
_SCORE = "score"  # of verl's dicts
_LONGEST_NOTE = 500
_OF_OTHER_THREADS = ("main thread", "same thread", "no current event loop in thread")
"""In errors of ``signal``, ``sqlite3`` and ``asyncio``."""
_MAIN_THREAD = "It needs the main thread: use --reward_workers 1, which calls a plain function of a file on one."


class RewardFunction:
    """A user's function, called with what the names of its parameters say.

    With names of ``BATCH_NAMES`` it is called once with lists (``is_batch``), with names of ``SINGLE_NAMES`` once for
    each sample; further parameters may name data ``columns``, and ``**kwargs`` gets everything, but not under verl's
    names. A column named as a parameter of ``BEHIND_COLUMNS`` goes before it. ``source`` is the flag and file of the
    function, for messages; ``ValueError`` names it and a parameter that nothing is known for.
    """

    def __init__(self, function: Callable[..., Any], source: str, columns: Collection[str]) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        telling = {p.name for p in named} - IN_BOTH_FORMS
        columns_first = BEHIND_COLUMNS.intersection(columns)
        if columns_named := sorted(columns_first & {p.name for p in named}):
            are = "is a column" if len(columns_named) == 1 else "are columns"
            logger.info(
                "%s: %s %s of the data here, and gets its values",
                source,
                " and ".join(columns_named),
                are,
            )
        self.is_batch = not telling.isdisjoint(BATCH_NAMES.keys() - columns_first)
        known = BATCH_NAMES if self.is_batch else SINGLE_NAMES
        self.known = {name: own for name, own in known.items() if name not in columns_first}
        self.names = [p.name for p in named if p.name in self.known or p.name in columns]
        unknown = [p.name for p in named if p.default is p.empty and p.name not in self.names]
        if unknown or telling.isdisjoint(self.known):
            what = "its parameters do not say what it scores"
            if unknown:
                why = (
                    "for one sample, and others are for a batch"
                    if unknown[0] in SINGLE_NAMES
                    else "unknown"
                )
                what = f"its parameter {unknown[0]!r} is {why}"
            raise ValueError(
                f"{source}: {what}. Use {', '.join(BATCH_NAMES)} for lists of a whole batch, or "
                f"{', '.join(SINGLE_NAMES)} for one sample at a time; further parameters may have defaults or name "
                f"columns of the data ({', '.join(sorted(columns)) or 'none'})."
            )
        self.function, self.source = function, source
        self.processes: FunctionProcesses | None = None
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        call = getattr(function, "__call__", None)  # noqa: B004 (an object whose __call__ is async)
        self.is_async = any(map(inspect.iscoroutinefunction, (function, call)))

    def start_processes(self, file: Path, name: str, n: int, seconds: float | None) -> None:
        """Call ``name`` of ``file`` in ``n`` processes from now on, unless it is async or an object.

        A call may take so many ``seconds`` for each of its samples.
        """
        if self.is_async or not inspect.isfunction(self.function):
            kind = "async" if self.is_async else "an object, which may hold state of the run"
            logger.warning(
                "%s is %s: it stays in this process, without --reward_workers and time limit",
                self.source,
                kind,
            )
            return
        if self.is_batch:
            logger.info(
                "%s scores whole batches, each in one of --reward_workers %d", self.source, n
            )
        self.processes = FunctionProcesses(
            self.source, str(file.resolve()), name, n=n, seconds=seconds
        )

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """Call the function with copies of ``samples``."""
        columns = [column for sample in samples for column in sample["row"]]
        arguments = {}
        known = [name for name in self.known if name not in VERL_NAMES]
        for name in dict.fromkeys(
            [*self.names, *columns, *known] if self.takes_all else self.names
        ):
            own = self.known.get(name)
            values = [
                copy.deepcopy(sample["row"].get(name) if own is None else sample[own])
                for sample in samples
            ]
            arguments[name] = values if self.is_batch else values[0]
        if self.processes is not None:
            return self.processes(arguments, len(samples))
        result = self.function(**arguments)
        return (
            list(result) if isinstance(result, Iterator) else result
        )  # so that errors of generators come up here


@dataclass
class FunctionScorer:
    """Rewards from ``function``, which runs on one thread of its own, an async one in one event loop, or in processes.

    For each sample it returns a number, a dict of named numbers, or a list with one number per sampled token or per
    step (see ``step_ends``); or a dict of "reward", any of these, and "extra", named numbers that are only logged; or a
    dict with "score", which alone is the reward. A function of a batch returns a list of these, or a dict of lists, of
    which "rewards" (and a dict "extra") alone counts if present. ``name`` is that of rewards without one. When the
    function raises for a batch, it is called again with each sample alone; a sample for which it raises gets
    ``error_value``, if given. Rewards of tokens and steps are multiplied by ``token_weight``. ``weighted`` are the
    names in ``--reward_weights`` (None: it does not count here): where they name another key beside "score", all
    numbers of the dict are rewards.
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
        # On a new thread "cuda" is GPU 0, whatever the thread that loaded the function has chosen.
        gpu: Any = (
            (torch.cuda.set_device, (torch.cuda.current_device(),))
            if torch.cuda.is_available()
            else ()
        )
        n = (
            1 if self.function.processes is None else self.function.processes.n
        )  # each thread waits for one
        self._thread = ThreadPoolExecutor(n, "reward_fn", *gpu)
        self._loop = (
            asyncio.new_event_loop() if self.function.is_async else None
        )  # kept: clients belong to their loop
        self._has_logged_keys = False

    def __str__(self) -> str:
        return self.function.source

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory. Raises ``RuntimeError`` from what the function raised, naming the sample.

        ``ValueError`` names the sample for a return value of another kind, or a number that is not finite.
        """
        if not trajectories:
            return []
        results = self._results(make_samples(trajectories, self.tokenizer))
        scores = [self._score(result, t) for result, t in zip(results, trajectories, strict=True)]
        failed = [i for i, score in enumerate(scores) if score.failed]
        if failed:
            logger.warning(
                "%s raised on %d of %d samples, whose reward is --reward_error_value %g; the first: %s",
                *(self, len(failed), len(scores), self.error_value, scores[failed[0]].error),
            )
        return scores

    def _results(self, samples: Sequence[Sample]) -> list[Any]:
        """What the function returned for each sample, or the exception that it raised."""
        alone = [[sample] for sample in samples]
        if not self.function.is_batch:
            return self._call(alone)
        [result] = self._call([samples])
        if not isinstance(result, BaseException):
            return self._split(result, len(samples))
        answers = self._call(alone)
        if self.error_value is None and not any(
            isinstance(answer, BaseException) for answer in answers
        ):
            raise RuntimeError(
                f"{self} raised {result!r} for a batch of {len(samples)} samples, but for none of them alone."
            ) from result
        return [
            answer if isinstance(answer, BaseException) else self._split(answer, 1)[0]
            for answer in answers
        ]

    def _call(self, batches: Sequence[Sequence[Sample]]) -> list[Any]:
        """The function's result or exception for each batch; an async function works on all at the same time."""
        if self._loop is not None:
            try:
                return self._thread.submit(
                    self._loop.run_until_complete, self._gather(batches)
                ).result()
            except (
                SystemExit
            ) as error:  # it would end the run with the status that it holds, 0 perhaps
                raise RuntimeError(
                    f"{self} raised {error!r}. Take the call of sys.exit() out."
                ) from error
        futures = [self._thread.submit(self.function, batch) for batch in batches]
        wait(futures)
        return [future.exception() or future.result() for future in futures]

    async def _gather(self, batches: Sequence[Sequence[Sample]]) -> list[Any]:
        return await asyncio.gather(*map(self.function, batches), return_exceptions=True)

    def _split(self, result: Any, n: int) -> list[Any]:
        """The function's result for a batch of ``n`` as one result for each sample."""
        if isinstance(result, Mapping):
            if "rewards" in result and isinstance(result.get(_EXTRA), Mapping):
                result = {"reward": result["rewards"], _EXTRA: result[_EXTRA]}
            if "rewards" not in result:
                return self._rows(result, n)
            result = result["rewards"]
        if not isinstance(result, Iterable) or isinstance(result, str):
            raise ValueError(
                f"{self} returned {result!r}; a list with one result per sample is needed."
            )
        results = list(result)
        if len(results) != n:
            raise ValueError(
                f"{self} returned {len(results)} scores for {n} samples; one each is needed."
            )
        return results

    def _rows(self, columns: Mapping[Any, Any], n: int) -> list[dict[Any, Any]]:
        """A dict of lists, or of such dicts, as a dict for each of ``n`` samples."""
        split = {
            k: (self._rows if isinstance(v, Mapping) else self._split)(v, n)
            for k, v in columns.items()
        }
        return [{name: column[i] for name, column in split.items()} for i in range(n)]

    def _score(self, result: Any, trajectory: Trajectory) -> Score:
        if isinstance(result, BaseException):
            sample = name_sample(trajectory)
            error = f"{result!r} for {sample}"
            has_remedy = self.function.processes is None and _needs_main_thread(result)
            if has_remedy:
                error = f"{error}. {_MAIN_THREAD}"
            if self.error_value is not None and isinstance(result, Exception):
                return Score({self.name: self.error_value}, failed=True, error=error)
            if has_remedy:
                raise RuntimeError(f"{self} raised {error}") from result
            raise RuntimeError(
                f"{self} raised {result!r} for {sample}. With --reward_error_value such samples get a reward instead."
            ) from result
        if isinstance(result, Mapping) and isinstance(extra := result.get(_EXTRA), Mapping):
            others = {name: value for name, value in result.items() if name != _EXTRA}
            score = self._score(
                others["reward"] if others.keys() == {"reward"} else others, trajectory
            )
            where = f"{self}, as extra {{!r}},".format
            extras = {
                str(name): check_number(value, trajectory, where(name))
                for name, value in extra.items()
            }
            return replace(score, extras=score.extras | extras)
        if isinstance(result, Mapping):
            return self._score_of_dict(
                {str(name): value for name, value in result.items()}, trajectory
            )
        if isinstance(result, list | tuple) or (
            getattr(result, "ndim", 0) == 1 and len(result) != 1
        ):
            return self._score_of_tokens(list(result), trajectory)
        return Score({self.name: check_number(result, trajectory, str(self))})

    def _score_of_dict(self, values: Mapping[str, Any], trajectory: Trajectory) -> Score:
        """Named rewards; of a dict with "score" that alone, unless ``weighted`` names other keys."""
        if _SCORE not in values:
            return Score(
                {name: check_number(value, trajectory, str(self)) for name, value in values.items()}
            )

        named = values.keys() & set(self.weighted or ())
        if named - {_SCORE}:
            rewarded = (
                {name for name, value in values.items() if is_number(value)} | named | {_SCORE}
            )
            rewards = {
                name: check_number(values[name], trajectory, str(self))
                for name in values
                if name in rewarded
            }
            return Score(
                rewards,
                notes={name: _note(values[name]) for name in values if name not in rewarded},
            )

        others = {name: value for name, value in values.items() if name != _SCORE}
        numbers = {name: finite_number(value) for name, value in others.items()}
        extras = {name: number for name, number in numbers.items() if number is not None}
        notes = {name: _note(value) for name, value in others.items() if name not in extras}
        self._log_keys(others, numbers=extras)

        score = self._score(values[_SCORE], trajectory)
        if named and score.token_rewards is not None:
            remedy = f"use --reward_weights {self.name}=NUMBER"
            raise ValueError(
                f"{self} returned a list as 'score', and rewards of tokens have no such name: {remedy}."
            )
        if named and score.rewards.keys() == {self.name}:
            score = replace(score, rewards={_SCORE: score.rewards[self.name]})
        return replace(score, extras=score.extras | extras, notes=score.notes | notes)

    def _log_keys(self, others: Collection[str], numbers: Collection[str]) -> None:
        """Log once that ``others`` beside "score" are no rewards, and how ``numbers`` among them become some."""
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
            *(self, ", ".join(others), "is" if len(others) == 1 else "are", remedy),
        )

    def _score_of_tokens(self, numbers: Sequence[Any], trajectory: Trajectory) -> Score:
        """Rewards of action tokens, from as many numbers or from one per step."""
        rewards = [
            self.token_weight * check_number(number, trajectory, str(self)) for number in numbers
        ]
        mask = trajectory.action_mask
        if len(rewards) == sum(mask):
            given = iter(rewards)
            return Score(token_rewards=[next(given) if is_action else 0.0 for is_action in mask])
        ends = step_tokens(trajectory, self.tokenizer, self.step_separator)
        if len(rewards) != len(ends):
            raise ValueError(
                f"{self} returned {len(rewards)} numbers for {name_sample(trajectory)}, whose response has {sum(mask)} "
                f"tokens and {len(ends)} steps (text between --step_separator {self.step_separator!r}); give one for "
                "each token or one for each step."
            )
        return score_of_steps(trajectory, ends, rewards)


def _needs_main_thread(error: BaseException) -> bool:
    """Test for an error, or a cause of it, that only threads other than the main one raise."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(text in str(each) for each in causes for text in _OF_OTHER_THREADS)


def _note(value: Any) -> str:
    """Text of a value that is only logged, without half characters and at most 500 characters long."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > _LONGEST_NOTE:
        text = f"{text[: _LONGEST_NOTE - 3]}..."
    return text.encode(errors="replace").decode()
