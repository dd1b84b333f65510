"""How options are declared and checked, and how a command's options are listed, written and read."""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, TypeVar

from openppo.config.foreign import answer_by_meaning, our_value, reading_of

logger = logging.getLogger(__name__)

KEY_FROM_ELSEWHERE = "True"
"""Value of --use_wandb whose key is in WANDB_API_KEY or stored by 'wandb login', or is not needed."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
"""Regular expression of finite numbers."""

SPELLINGS = {"init_kl_coeff": "init_kl_coef", "ptx_coeff": "ptx_coef"}
"""Names of our options by their spelling in other trainers."""

_OFF = (None, False, 0, "", (), "none", "off")
"""Values of options that are not in use."""

Command = TypeVar("Command")


def require(condition: object, message: str) -> None:
    """Raise ``ValueError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Bound:
    """A limit on values, with the words that an error says about it."""

    says: str
    holds: Callable[[Any], bool]
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The same limit in keywords of JSON Schema, for editors."""


positive = Bound("must be positive", lambda value: value > 0, {"exclusiveMinimum": 0})
not_negative = Bound("must not be negative", lambda value: value >= 0, {"minimum": 0})
not_empty = Bound("must not be empty", lambda value: value != "", {"minLength": 1})
a_path = Bound(
    'must be the path of a folder; "~" is not expanded here',
    lambda value: value[:1] not in ("", "~"),
    {"pattern": "^[^~]"},
)


def above(limit: float) -> Bound:
    """Allow values above ``limit``."""
    return Bound(f"must be above {limit}", lambda value: value > limit, {"exclusiveMinimum": limit})


def at_least(least: float, other: float | None = None) -> Bound:
    """Allow values from ``least`` on, and the single value ``other``."""
    exception = "" if other is None else f"{other} or "
    schema: dict[str, Any] = {"minimum": least}
    if other is not None:
        schema = {"anyOf": [schema, {"const": other}]}
    return Bound(
        f"must be {exception}at least {least}",
        lambda value: value >= least or value == other,
        schema,
    )


_NAMES_FILE = r".+\.py:\w+"


def names_file(value: str) -> bool:
    """True for ``path.py:name``, a function or class of a user's file."""
    return re.fullmatch(_NAMES_FILE, value) is not None


file_name = Bound("must be path.py:name", names_file, {"pattern": f"^{_NAMES_FILE}$"})


def one_of_or_file(choices: Any) -> Bound:
    """Allow the names of a ``Literal``, and ``path.py:name``."""
    names = typing.get_args(choices)
    return Bound(
        f"must be {', '.join(names)}, or path.py:name of your own",
        lambda value: value in names or names_file(value),
        {"anyOf": [{"enum": list(names)}, {"pattern": f"^{_NAMES_FILE}$"}]},
    )


def inside(interval: str) -> Bound:
    """Allow values in an interval such as ``[0, 1)``."""
    low, high = map(float, interval[1:-1].split(","))
    reaches = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    schema = {
        "minimum" if interval[0] == "[" else "exclusiveMinimum": low,
        "maximum" if interval[-1] == "]" else "exclusiveMaximum": high,
    }
    return Bound(
        f"must lie in {interval}",
        lambda value: reaches(value, low) and below(value, high),
        schema,
    )


@dataclass(frozen=True)
class Rules:
    """Everything about an option besides its name, type, default and help."""

    bound: Bound | None = None
    """Limit on the value, or on each value of a tuple; None as value is always allowed."""
    note: str = ""
    """End of the error about ``bound``: a remedy, or a reason."""
    may_be_infinite: bool = False
    """True if inf is allowed; nan never is."""
    resume: Literal["may change", "must match"] = "may change"
    """Rule for a run that resumes from a checkpoint that was written with another value."""
    rows_of: tuple[str, ...] = ()
    """Options of data whose rows depend on this one."""
    measures: bool = False
    """True if the option changes the meaning of evaluation scores."""
    of_critic: bool = False
    """True if the option has an effect only where there is a critic."""
    place: bool = False
    """True if the option is a path or address that may differ between hosts."""
    needs: str | None = None
    """Option of the same command without which this one has no effect."""
    alone: str | int | None = None
    """Value of the flag when it stands without one; True, in Python and in files, is read as this."""
    of_files: bool = False
    """True for an option that few people turn: a line of ``--config FILE.yaml``, and no flag."""


def option(
    default: Any = dataclasses.MISSING, bound: Bound | None = None, note: str = "", **rules: Any
) -> Any:
    """Declare an option with rules: ``seed: int = option(42, not_negative, resume="must match")``."""
    return field(default=default, metadata={"rules": Rules(bound, note, **rules)})


def rules_of(declared: dataclasses.Field) -> Rules:
    """Return the rules of an option; a plain field has the defaults."""
    return typing.cast(Rules, declared.metadata.get("rules", Rules()))


@dataclass(frozen=True)
class Options:
    """Options of a command, or a group of them; a command may have both plain options and groups."""

    def validate(self, world_size: int = 1) -> None:
        """Raise ``ValueError`` for the first option, or combination of them, that cannot work on so many ranks."""
        hints = typing.get_type_hints(type(self))
        for declared in dataclasses.fields(self):
            value = vars(self)[declared.name]
            if isinstance(value, Options):
                value.validate()
            else:
                _check_value(declared, value, hints[declared.name])
        raise_first(unmet_needs(self))
        raise_first(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield messages about options that cannot work together, each with a remedy."""
        return iter(())


def unmet_needs(config: Options) -> Iterator[str]:
    """Yield messages about options without those that they need; groups that lack the latter say nothing."""
    values = given_options(config)
    options = declared_options(type(config))
    for name, declared in options.items():
        needed = rules_of(declared).needs
        is_default = values[name] == declared.default
        if needed is None or needed not in values or is_default:
            continue
        if values[needed] in _OFF:
            words = f"{spelling(declared)} {_shown(values[name])}".rstrip()
            other = spelling(options[needed])
            yield f"{words} has no effect without {other}: give {other} too, or leave it out."


def is_group(hint: Any) -> TypeGuard[type[Options]]:
    """True if a field of this type is a group of options."""
    return isinstance(hint, type) and issubclass(hint, Options)


def raise_first(problems: Iterator[str]) -> None:
    """Raise ``ValueError`` with the first message, if there is one."""
    for message in problems:
        raise ValueError(message)


def _shown(value: Any) -> str:
    """A value as people write it; nothing for a switch."""
    if isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def spelling(declared: dataclasses.Field) -> str:
    """Return the option as users write it: ``--name``, or ``name`` where it is a line of a file."""
    return declared.name if rules_of(declared).of_files else f"--{declared.name}"


def _check_value(declared: dataclasses.Field, value: Any, hint: Any) -> None:
    allowed = rules_of(declared)
    name = spelling(declared)
    require(_fits(value, hint), f"{name} must be {_words(hint)}, got {value!r}.")
    items = value if isinstance(value, tuple) else (value,)
    values = [item for item in items if item is not None]
    shown = " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in values)

    if allowed.bound is not None and not all(map(allowed.bound.holds, values)):
        got = f", got {shown}" if shown else ""
        raise ValueError(f"{name} {allowed.bound.says}{got}{allowed.note}.")

    kind = "number" if allowed.may_be_infinite else "finite number"
    for number in values:
        if isinstance(number, float):
            is_infinite_allowed = allowed.may_be_infinite and not math.isnan(number)
            is_allowed = math.isfinite(number) or is_infinite_allowed
            require(is_allowed, f"{name} must be a {kind}, got {shown}.")


def _fits(value: Any, hint: Any) -> bool:
    """True if ``value`` has the type ``hint``, one of those that options have."""
    kind = typing.get_origin(hint)
    inner = typing.get_args(hint)

    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in inner)
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner)
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        hints = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(value) == len(hints) and all(map(_fits, value, hints))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _words(hint: Any) -> str:
    """Name a type in the words of an error: choices with "or"."""
    if typing.get_origin(hint) is Literal:
        *others, last = map(str, typing.get_args(hint))
        return f"{', '.join(others)} or {last}"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def declared_options(command: type) -> dict[str, dataclasses.Field]:
    """Return all options of a command by name, in the order of its groups."""
    options: dict[str, dataclasses.Field] = {}
    hints = typing.get_type_hints(command)
    for declared in dataclasses.fields(command):
        hint = hints[declared.name]
        if is_group(hint):
            options |= declared_options(hint)
        else:
            options[declared.name] = declared
    return options


def given_options(config: Options) -> dict[str, Any]:
    """Return all values of a command by option name, in the order of its groups."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, Options):
            values |= given_options(value)
        else:
            values[name] = value
    return values


def flat_dict(config: Options) -> dict[str, object]:
    """Return ``given_options`` for files and logs, in a form that ``--config`` reads.

    Secrets in URLs are masked, and a key of --use_wandb is left out.
    """
    values: dict[str, object] = {}
    for name, value in given_options(config).items():
        values[name] = mask_credentials(value) if isinstance(value, str) else value
    if values.get("use_wandb") is not None:
        values["use_wandb"] = KEY_FROM_ELSEWHERE
    return values


def mask_credentials(text: str) -> str:
    """Replace secrets in the URLs of ``text`` by stars: user and password, values of the query."""
    text = re.sub(r"(\w://)[^\s/]+@", r"\1***@", text)
    return re.sub(r"(\w://[^\s?]*\?)[^\s,]+", r"\1***", text)


def from_options(command: type[Command], **options: Any) -> Command:
    """Make the config of a command from its options by name; the inverse of ``flat_dict``.

    A list, or one text, may stand for a tuple, a path for a text, a bool for on or off, one of ``SPELLINGS`` for its
    option, and another library's name for a value, which is logged. Raises ``ValueError`` for an option that the
    command does not have, or that is given under two names, and ``TypeError`` if a required option is missing;
    ``validate`` checks values.
    """
    for other in SPELLINGS.keys() & options.keys():
        require(
            SPELLINGS[other] not in options,
            f"{other} is {SPELLINGS[other]} under another name: give one of them.",
        )
        options[SPELLINGS[other]] = options.pop(other)

    known = declared_options(command)
    unknown = sorted(options.keys() - known)
    if unknown:
        answers = [answer_by_meaning(name, known) for name in unknown]
        remedy = next(filter(None, answers), "see --help all for every option.")
        raise ValueError(f"{command.__name__} has no option {', '.join(unknown)}; {remedy}")

    for name, value in options.items():
        if our_value(name, value) != value:
            logger.info(reading_of(name, value))
            options[name] = our_value(name, value)

    fields: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(command).items():
        if is_group(hint):
            group_names = declared_options(hint).keys() & options.keys()
            fields[name] = from_options(hint, **{option: options[option] for option in group_names})
        elif name in options:
            fields[name] = _as_parsed(known[name], hint, value=options[name])
    return command(**fields)


def switched(declared: dataclasses.Field, value: Any) -> Any:
    """Return what True or False means for an option that is no plain switch; any other value as it is.

    YAML 1.1 reads on and off as booleans.
    """
    if not isinstance(value, bool) or declared.type == "bool":
        return value
    alone = rules_of(declared).alone
    if value is True and alone is not None:
        return alone
    if re.search("[\"'](on|off)[\"']", str(declared.type)):
        return "on" if value else "off"
    if value is False and (alone is not None or declared.default is None):
        return declared.default
    return value


def _as_parsed(declared: dataclasses.Field, hint: Any, value: Any) -> Any:
    """Bring ``value`` into the form in which the command line gives it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = switched(declared, value)
    if isinstance(value, str) and typing.get_args(hint)[1:] == (...,):
        return (value,)
    return tuple(value) if isinstance(value, list) else value
