"""How options are declared and checked, and how a command's options are listed, written and read."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, TypeVar

KEY_FROM_ELSEWHERE = "True"
"""Value of --use_wandb whose key is in WANDB_API_KEY or stored by 'wandb login', or is not needed."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
"""Finite numbers, as a regular expression."""

SPELLINGS = {"init_kl_coeff": "init_kl_coef", "ptx_coeff": "ptx_coef"}
"""Other trainers' spelling of an option -> its name here."""

Command = TypeVar("Command")


def require(condition: object, message: str) -> None:
    """Raise ``ValueError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Bound:
    """A limit on values, with its words in an error."""

    says: str
    holds: Callable[[Any], bool]


positive = Bound("must be positive", lambda value: value > 0)
not_negative = Bound("must not be negative", lambda value: value >= 0)
not_empty = Bound("must not be empty", lambda value: value != "")
a_path = Bound(
    'must be the path of a folder; "~" is not expanded here',
    lambda value: value[:1] not in ("", "~"),
)


def at_least(least: float, other: float | None = None) -> Bound:
    """Values from ``least`` on, and the one value ``other``."""
    says = f"must be at least {least}" if other is None else f"must be {other} or at least {least}"
    return Bound(says, lambda value: value >= least or value == other)


def inside(interval: str) -> Bound:
    """Values in an interval such as ``[0, 1)``."""
    low, high = map(float, interval[1:-1].split(","))
    above = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    return Bound(f"must lie in {interval}", lambda value: above(value, low) and below(value, high))


@dataclass(frozen=True)
class Rules:
    """Everything about an option besides its name, type, default and help."""

    bound: Bound | None = None
    """Limit on the value, or on each value of a tuple; None as value is always allowed."""
    note: str = ""
    """End of the error about ``bound``: a remedy, or a reason."""
    may_be_infinite: bool = False
    """Whether inf is allowed; nan never is."""
    resume: Literal["may change", "must match"] = "may change"
    """Whether a run may resume from a checkpoint that was written with another value."""
    rows_of: tuple[str, ...] = ()
    """Options of data whose rows depend on this one."""
    measures: bool = False
    """Whether it changes what evaluation scores mean."""
    of_critic: bool = False
    """Whether it has an effect only where there is a critic."""
    place: bool = False
    """Whether it is a path or address that may differ between hosts."""


def option(
    default: Any = dataclasses.MISSING, bound: Bound | None = None, note: str = "", **given: Any
) -> Any:
    """Declare an option with rules: ``seed: int = option(42, not_negative, resume="must match")``."""
    return field(default=default, metadata={"rules": Rules(bound, note, **given)})


def rules_of(declared: dataclasses.Field) -> Rules:
    """Rules of an option; those of no rule for a plain field."""
    return typing.cast(Rules, declared.metadata.get("rules", Rules()))


@dataclass(frozen=True)
class Options:
    """Options of a command, or a group of them; a command has options of its own, groups, or both."""

    def validate(self, world_size: int = 1) -> None:
        """Raise ``ValueError`` for the first option, or combination of them, that cannot work on so many ranks."""
        hints = typing.get_type_hints(type(self))
        for declared in dataclasses.fields(self):
            value = vars(self)[declared.name]
            if isinstance(value, Options):
                value.validate()
            else:
                _check_value(declared.name, value, hints[declared.name], allowed=rules_of(declared))
        raise_first(self.problems())

    def problems(self) -> Iterator[str]:
        """Messages about options that cannot work together, each with a remedy."""
        return iter(())


def is_group(hint: Any) -> TypeGuard[type[Options]]:
    """Whether a field of this type is a group of options."""
    return isinstance(hint, type) and issubclass(hint, Options)


def raise_first(problems: Iterator[str]) -> None:
    """Raise ``ValueError`` with the first message, if there is one."""
    for message in problems:
        raise ValueError(message)


def _check_value(name: str, value: Any, hint: Any, allowed: Rules) -> None:
    require(_fits(value, hint), f"--{name} must be {_words(hint)}, got {value!r}.")
    values = [one for one in (value if isinstance(value, tuple) else (value,)) if one is not None]
    shown = " ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
    if allowed.bound is not None and not all(map(allowed.bound.holds, values)):
        raise ValueError(
            f"--{name} {allowed.bound.says}{', got ' * (shown != '')}{shown}{allowed.note}."
        )
    infinite = allowed.may_be_infinite
    for number in [one for one in values if isinstance(one, float)]:
        finite = math.isfinite(number) or (infinite and not math.isnan(number))
        require(finite, f"--{name} must be a {'' if infinite else 'finite '}number, got {shown}.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the type ``hint``, one of those that options have."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Literal:
        return any(value == one and type(value) is type(one) for one in inner)
    if kind is tuple:
        each = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_fits, value, each))
    return (
        hint is bool
        if isinstance(value, bool)
        else isinstance(value, (int, float) if hint is float else hint)
    )


def _words(hint: Any) -> str:
    """A type in the words of an error: choices with "or"."""
    if typing.get_origin(hint) is Literal:
        *others, last = map(str, typing.get_args(hint))
        return f"{', '.join(others)} or {last}"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def declared_options(command: type) -> dict[str, dataclasses.Field]:
    """All options of a command by name, in the order of its groups."""
    options: dict[str, dataclasses.Field] = {}
    hints = typing.get_type_hints(command)
    for declared in dataclasses.fields(command):
        group = hints[declared.name]
        options |= declared_options(group) if is_group(group) else {declared.name: declared}
    return options


def given_options(config: Options) -> dict[str, Any]:
    """All values of a command by option name, in the order of its groups."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        values |= given_options(value) if isinstance(value, Options) else {name: value}
    return values


def flat_dict(config: Options) -> dict[str, object]:
    """``given_options`` for files and logs; reads back through ``--config``.

    Secrets in URLs are masked, and a key of --use_wandb is left out.
    """
    values = {
        n: mask_credentials(v) if isinstance(v, str) else v
        for n, v in given_options(config).items()
    }
    return values if values.get("use_wandb") is None else values | {"use_wandb": KEY_FROM_ELSEWHERE}


def mask_credentials(text: str) -> str:
    """Put stars for secrets in the URLs of ``text``: user and password, values of the query."""
    text = re.sub(r"(\w://)[^\s/]+@", r"\1***@", text)
    return re.sub(r"(\w://[^\s?]*\?)[^\s,]+", r"\1***", text)


def from_options(command: type[Command], **options: Any) -> Command:
    """Make the config of a command from its options by name; the inverse of ``flat_dict``.

    A list, or one text, may stand for a tuple, a path for a text, a bool for on or off, and one of ``SPELLINGS`` for
    its option. Raises ``ValueError`` for an option that the command does not have, or that is given under two names,
    and ``TypeError`` if a required option is missing; ``validate`` checks values.
    """
    for other in SPELLINGS.keys() & options.keys():
        require(
            SPELLINGS[other] not in options,
            f"{other} is {SPELLINGS[other]} under another name: give one of them.",
        )
        options[SPELLINGS[other]] = options.pop(other)
    if unknown := sorted(options.keys() - declared_options(command)):
        raise ValueError(
            f"{command.__name__} has no option {', '.join(unknown)}; see --help for all options."
        )
    given: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(command).items():
        if is_group(hint):
            own = declared_options(hint).keys() & options.keys()
            given[name] = from_options(hint, **{option: options[option] for option in own})
        elif name in options:
            given[name] = _as_parsed(hint, options[name])
    return command(**given)


def _as_parsed(hint: Any, value: Any) -> Any:
    """Give ``value`` the form that the command line gives it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str) and typing.get_args(hint)[1:] == (...,):
        return (value,)
    if isinstance(value, bool) and "on" in typing.get_args(hint):
        return "on" if value else "off"
    return tuple(value) if isinstance(value, list) else value
