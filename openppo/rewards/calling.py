"""Reward functions of users: where they are, and what they are called with, which their parameters name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.types import Trajectory
from openppo.user_code import copied, load_callable

_IN_BOTH_FORMS = {"messages": "messages", "token_ids": "token_ids"}
BATCH_NAMES = {
    "prompts": "prompt",
    "responses": "response",
    "completions": "completion",
    "labels": "label",
    "queries": "query",
    "rows": "row",
    **_IN_BOTH_FORMS,
}
"""Parameter of a function for a batch -> what it gets a list of."""
SINGLE_NAMES = {name: name for name in BATCH_NAMES.values()}
"""The same for a function that is called for each sample."""
_BY_POSITION = ("prompts", "responses", "labels")


@dataclass(frozen=True)
class Sample:
    """What a reward function may ask for about one trajectory.

    ``own`` by the names of ``SINGLE_NAMES``: prompt, response and completion (the response again) are texts without
    special tokens of the response; query is the text of all tokens, special ones included, as OpenRLHF gives it;
    messages is None without a chat template; token_ids are those of the response. ``row`` holds the data columns.
    """

    own: dict[str, Any]
    row: dict[str, Any]


def make_samples(trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """One sample per trajectory, decoded with the policy's tokenizer."""
    responses = tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
    queries = tokenizer.batch_decode([t.token_ids for t in trajectories], skip_special_tokens=False)
    return [
        Sample(
            own={
                "prompt": t.prompt.text,
                "response": response,
                "completion": response,
                "label": t.prompt.label,
                "query": query,
                "row": t.prompt.row,
                "messages": t.prompt.messages,
                "token_ids": t.response_ids,
            },
            row=t.prompt.row,
        )
        for t, response, query in zip(trajectories, responses, queries, strict=True)
    ]


@dataclass(frozen=True)
class RewardFunction:
    """A user's function and how it wants to be called. ``source`` is its flag and file, for messages."""

    function: Callable[..., Any]
    source: str
    is_batch: bool
    """Called once with lists; otherwise once for each sample."""
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    takes_all: bool
    """Has ``**kwargs``: gets all names of its form and all columns."""

    @property
    def is_async(self) -> bool:
        """Calling it gives a coroutine."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 (an object whose __call__ is async)
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def describe(self) -> str:
        """How it is called, for the log."""
        names = [*self.positional, *self.keywords, *(["everything else"] if self.takes_all else [])]
        return f"{'lists of' if self.is_batch else 'each sample alone:'} {', '.join(names)}"

    def __call__(self, samples: Sequence[Sample]) -> Any:
        """Call the function with copies of ``samples``."""
        keywords = dict.fromkeys(self.keywords)
        if self.takes_all:
            columns = (column for sample in samples for column in sample.row)
            keywords |= dict.fromkeys(columns) | dict.fromkeys(BATCH_NAMES if self.is_batch else SINGLE_NAMES)
        keywords = {name: None for name in keywords if name not in self.positional}
        result = self.function(
            *(self._value(name, samples) for name in self.positional),
            **{name: self._value(name, samples) for name in keywords},
        )
        return list(result) if isinstance(result, Iterator) else result  # so that errors of generators come up here

    def _value(self, name: str, samples: Sequence[Sample]) -> Any:
        own = (BATCH_NAMES if self.is_batch else SINGLE_NAMES).get(name)
        values = [copied(sample.row.get(name) if own is None else sample.own[own]) for sample in samples]
        return values if self.is_batch else values[0]


def load_reward_function(
    location: str, columns: Collection[str], flag: str = "--reward_fn", default_name: str = "reward_fn"
) -> RewardFunction:
    """The function of ``path.py`` or ``path.py:name``, for data with ``columns``.

    ``ValueError`` naming ``flag`` if there is none, or if it has parameters that nothing is known for.
    """
    return as_reward_function(load_callable(location, flag, default_name), f"{flag} {location}", columns)


def as_reward_function(function: Callable[..., Any], source: str, columns: Collection[str]) -> RewardFunction:
    """How ``function`` is to be called, by the names of its parameters.

    With names of ``BATCH_NAMES`` it is called once with lists, with names of ``SINGLE_NAMES`` once for each sample;
    further parameters may name data columns, and ``**kwargs`` gets everything. ``*args``, or three parameters of
    which no name is known, get prompts, responses and labels by position.
    """
    parameters = _parameters(function)
    if _is_positional(parameters, known={*BATCH_NAMES, *SINGLE_NAMES, *columns}):
        return RewardFunction(function, source, True, positional=_BY_POSITION, keywords=(), takes_all=False)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    decisive = {p.name for p in named} - _IN_BOTH_FORMS.keys()
    is_batch = not decisive.isdisjoint(BATCH_NAMES)
    own = BATCH_NAMES if is_batch else SINGLE_NAMES
    _check_parameters(named, source, own, columns)
    known = [p for p in named if p.name in own or p.name in columns]
    return RewardFunction(
        function,
        source,
        is_batch,
        positional=tuple(p.name for p in known if p.kind is p.POSITIONAL_ONLY),
        keywords=tuple(p.name for p in known if p.kind is not p.POSITIONAL_ONLY),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # some built-in functions do not tell
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


def _is_positional(parameters: Sequence[inspect.Parameter], known: set[str]) -> bool:
    """No name is known, but three values can be given by position."""
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return (
        known.isdisjoint(p.name for p in parameters)
        and all(p.kind is not p.KEYWORD_ONLY for p in required)
        and (len(required) == 3 or (takes_more and len(required) < 3))
    )


def _check_parameters(
    named: Sequence[inspect.Parameter], source: str, own: Mapping[str, str], columns: Collection[str]
) -> None:
    """Each parameter without default must be known, and one of them must tell a batch from a single sample."""
    unknown = [p.name for p in named if p.default is p.empty and p.name not in own and p.name not in columns]
    if not unknown and not (own.keys() - _IN_BOTH_FORMS.keys()).isdisjoint(p.name for p in named):
        return
    what = f"its parameter {unknown[0]!r} is unknown" if unknown else "its parameters do not say what it scores"
    if unknown and unknown[0] in {*BATCH_NAMES, *SINGLE_NAMES}:
        what = f"its parameter {unknown[0]!r} is for one sample, and others are for a batch"
    raise ValueError(
        f"{source}: {what}. Use {', '.join(BATCH_NAMES)} for lists of a whole batch, or {', '.join(SINGLE_NAMES)} for "
        "one sample at a time; further parameters may have defaults or name columns of the data "
        f"({', '.join(sorted(columns)) or 'none'})."
    )
