"""Scores from a Python function: sync or async, of a batch or a sample, of the whole response, its tokens or steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openppo.rewards.calling import RewardFunction, Sample, make_samples
from openppo.rewards.scoring import check_number, name_sample, score_of_steps
from openppo.rewards.steps import step_ends
from openppo.types import Score, Trajectory
from openppo.user_code import no_silent_end

logger = logging.getLogger("openppo")


class FunctionScorer:
    """Asks ``function`` for rewards. It always runs on one thread of its own, an async one in one event loop.

    For each sample it returns a number, a dict of named numbers, or a list with one number per response token or per
    step (see ``step_ends``); a function of a batch returns a list of these, or a dict of lists, of which "rewards"
    alone counts if it is there. ``name`` is that of rewards without one. When the function raises for a batch, it is
    called again with each sample alone. A sample for which it raises gets ``error_value``, if that is given. Rewards
    of tokens and steps are multiplied by ``token_weight``.
    """

    collective = False

    def __init__(
        self,
        function: RewardFunction,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "reward",
        *,
        error_value: float | None = None,
        step_separator: str = "\n\n",
        token_weight: float = 1.0,
    ) -> None:
        self.function = function
        self.tokenizer = tokenizer
        self.name = name
        self.error_value = error_value
        self.step_separator = step_separator
        self.token_weight = token_weight
        self.n_scored = 0
        self._thread = ThreadPoolExecutor(1, "reward_fn", _use_gpu, (_current_gpu(),))
        self._loop = asyncio.new_event_loop() if function.is_async else None  # kept: clients belong to their loop

    def __str__(self) -> str:
        return self.function.source

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory. Raises ``RuntimeError`` from what the function raised, naming the sample.

        ``ValueError`` names the sample for a return value of another kind, or a number that is not finite.
        """
        self.n_scored = 0
        if not trajectories:
            return []
        results = self._results(make_samples(trajectories, self.tokenizer))
        scores = [self._score(result, t) for result, t in zip(results, trajectories, strict=True)]
        n_failed = sum(score.failed for score in scores)
        if n_failed:
            first = next(i for i, score in enumerate(scores) if score.failed)
            logger.warning(
                "%s raised on %d of %d samples, whose reward is --reward_error_value %g; the first: %r for %s",
                *(self, n_failed, len(scores), self.error_value, results[first], name_sample(trajectories[first])),
            )
        return scores

    def _results(self, samples: Sequence[Sample]) -> list[Any]:
        """What the function returned for each sample, or the exception that it raised."""
        if not self.function.is_batch:
            return self._call([[sample] for sample in samples])
        (result,) = self._call([samples])
        if not isinstance(result, BaseException):
            return self._split(result, len(samples))
        alone = [
            answer if isinstance(answer, BaseException) else self._split(answer, 1)[0]
            for answer in self._call([[sample] for sample in samples])
        ]
        if self.error_value is None and not any(isinstance(answer, BaseException) for answer in alone):
            raise RuntimeError(
                f"{self} raised {result!r} for a batch of {len(samples)} samples, but for none of them alone."
            ) from result
        return alone

    def _call(self, batches: Sequence[Sequence[Sample]]) -> list[Any]:
        """The function's result or exception for each batch; an async function works on all at the same time."""
        if self._loop is not None:
            try:
                return self._run(self._loop.run_until_complete, self._gather(batches)).result()
            except SystemExit as error:  # of a task that the function has started; ours would end with status 0
                raise RuntimeError(f"{self} raised {error!r}. Take the call of sys.exit() out.") from error
        futures = [self._run(self.function, batch) for batch in batches]
        for future, batch in zip(futures, batches, strict=True):
            wait([future])
            self.n_scored += len(batch)
        return [future.exception() or future.result() for future in futures]

    def _run(self, call: Callable[[Any], Any], argument: Any) -> Future[Any]:
        """``call(argument)`` on the thread of the function."""

        def guarded() -> Any:
            with no_silent_end(str(self)):
                return call(argument)

        return self._thread.submit(guarded)

    async def _gather(self, batches: Sequence[Sequence[Sample]]) -> list[Any]:
        return await asyncio.gather(*map(self._ask, batches), return_exceptions=True)

    async def _ask(self, batch: Sequence[Sample]) -> Any:
        try:
            return await self.function(batch)
        except SystemExit as error:  # which the event loop would not keep for its sample
            return error
        finally:
            self.n_scored += len(batch)

    def _split(self, result: Any, n: int) -> list[Any]:
        """The function's result for a batch of ``n`` as one result for each sample."""
        if isinstance(result, Mapping):
            if "rewards" not in result:
                columns = {name: self._split(column, n) for name, column in result.items()}
                return [{name: column[i] for name, column in columns.items()} for i in range(n)]
            result = result["rewards"]
        if not isinstance(result, Iterable) or isinstance(result, str):
            raise ValueError(f"{self} returned {result!r}; a list with one result per sample is needed.")
        results = list(result)
        if len(results) != n:
            raise ValueError(f"{self} returned {len(results)} scores for {n} samples; one each is needed.")
        return results

    def _score(self, result: Any, trajectory: Trajectory) -> Score:
        if isinstance(result, BaseException):
            if self.error_value is None or not isinstance(result, Exception):
                raise RuntimeError(
                    f"{self} raised {result!r} for {name_sample(trajectory)}. With --reward_error_value such samples "
                    "get a reward instead."
                ) from result
            return Score({self.name: self.error_value}, failed=True)
        if isinstance(result, Mapping):
            return Score({str(name): check_number(value, trajectory, str(self)) for name, value in result.items()})
        if isinstance(result, list | tuple) or (getattr(result, "ndim", 0) == 1 and len(result) != 1):
            return self._score_of_tokens(list(result), trajectory)
        return Score({self.name: check_number(result, trajectory, str(self))})

    def _score_of_tokens(self, numbers: Sequence[Any], trajectory: Trajectory) -> Score:
        """Rewards of response tokens, from as many numbers or from one per step."""
        rewards = [self.token_weight * check_number(number, trajectory, str(self)) for number in numbers]
        n_tokens = len(trajectory.response_ids)
        if len(rewards) == n_tokens:
            return Score(token_rewards=rewards)
        ends = step_ends(trajectory.response_ids, self.tokenizer, self.step_separator)
        if len(rewards) != len(ends):
            raise ValueError(
                f"{self} returned {len(rewards)} numbers for {name_sample(trajectory)}, whose response has {n_tokens} "
                f"tokens and {len(ends)} steps (text between --step_separator {self.step_separator!r}); give one for "
                "each token or one for each step."
            )
        return score_of_steps(ends, rewards, n_tokens)


def _current_gpu() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _use_gpu(gpu: int | None) -> None:
    """On a new thread "cuda" is GPU 0, whatever the thread that loaded the function has chosen."""
    if gpu is not None:
        torch.cuda.set_device(gpu)
