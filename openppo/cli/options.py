"""Command lines to frozen configs: flags made from the dataclasses by tyro, YAML files, errors in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import itertools
import json
import logging
import os
import socket
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import tyro
import yaml

from openppo import __version__
from openppo.cli.migration.openrlhf import without_foreign_flags
from openppo.cli.shell.cut_short import may_be_cut_short
from openppo.cli.shell.environment import environment
from openppo.config import RunConfig, SupervisedCommand, TrainPPOConfig, flat_dict
from openppo.config.fields import KEY_FROM_ELSEWHERE

_SECONDS_FOR_FIRST_RANK = 20
"""To print its error and leave; on a loaded machine Python takes seconds to do so."""
_ABOUT_FILES = "--config FILE.yaml reads 'option: value' lines, as logs/config.yaml has them; flags override them."
_HOW_TO_RESUME = "the same command with --load_checkpoint resumes from the newest checkpoint"


class CommandConfig(Protocol):
    """A tuple of groups of options."""

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option that cannot work on ``world_size`` ranks."""
        ...


Config = TypeVar("Config", bound=CommandConfig)


class Runnable(Protocol):
    """What a command builds."""

    def fit(self) -> None:
        """Do the work."""
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...


@runtime_checkable
class ExplainsMemory(Protocol):
    """A job that knows what its models take, and which flags lower it."""

    def explain_memory(self) -> list[str]:
        """Lines for people."""
        ...


def run_command(config_type: type[Config], build: Callable[[Config], Runnable], *markers: Any) -> None:
    """Parse ``sys.argv``, build, and run.

    A ``ValueError`` before training starts is the user's: one line on stderr and exit status 2, no traceback.
    ``markers`` as of ``parse_options``.
    """
    if sys.argv[1:] == ["--version"]:
        with may_be_cut_short():
            print(environment())
        return
    try:
        config = parse_options(config_type, sys.argv[1:], *markers)
        config.validate(_world_size())
    except ValueError as error:
        _leave(str(error))
    except SystemExit as ended:  # of tyro, which says on the first rank of each host what is wrong
        if ended.code:
            _let_first_rank_speak()
        raise
    was_stopped = _run(config, build)
    if was_stopped or _world_size() > 1:
        _end_process()


def greet(command: str) -> None:
    """Say on rank 0 what starts, while libraries load for some seconds."""
    if _rank() == 0:
        ranks = "" if _world_size() == 1 else f" on {_world_size()} ranks"
        name = f"OpenPPO {__version__}"
        shown = f"\x1b[1m{name}\x1b[0m" if sys.stderr.isatty() else f"[openppo] {name}"
        print(f"{shown}  {command}{ranks}", file=sys.stderr, flush=True)


def _run(config: Config, build: Callable[[Config], Runnable]) -> bool:
    """Whether a signal has ended the work before its end."""
    from openppo.strategy import signals
    from openppo.strategy.watchdog import Watchdog  # with torch: after parsing
    from openppo.tracking.phase import current, phase

    limits, resume, trains = RunConfig(stall_timeout=0), "", False  # a server without requests makes no progress
    if isinstance(config, TrainPPOConfig | SupervisedCommand):
        limits, resume, trains = config.run, _HOW_TO_RESUME, True
    with Watchdog(limits, current, flat_dict(config), resume) as watchdog:
        try:
            with phase("loading"):
                job = build(config)
        except ValueError as error:
            watchdog.refuse(str(error))
        if isinstance(job, ExplainsMemory):
            watchdog.explain_memory = job.explain_memory
        watchdog.saves_on_signal = trains
        job.fit()
        watchdog.saves_on_signal = False
        job.close()
    return signals.requested() is not None


def _end_process() -> NoReturn:
    """End without the interpreter's shutdown.

    Threads of gloo outlive the process group and may abort in it; after a signal it would wait for a reward function
    that never returns. All that a command writes is closed by then.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is where a shell has closed it: >&-
            with contextlib.suppress(OSError):  # nobody reads any more
                stream.flush()
    os._exit(0)


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def parse_options(config_type: type[Config], arguments: Sequence[str], *markers: Any) -> Config:
    """The config of a command line; ``--config FILE.yaml`` gives options that the command line may override.

    ``markers`` are those of ``tyro.conf`` that a command needs beside ours.
    """
    arguments, file = _take_config_file([_underscored(argument) for argument in arguments])
    if config_type is TrainPPOConfig:
        arguments = _without_foreign_flags(arguments)
    else:  # DeepSpeed's launcher adds it and says the same in LOCAL_RANK
        arguments = [argument for argument in arguments if not argument.startswith("--local_rank=")]
    arguments = _with_key_of_wandb(arguments)
    known = option_names(config_type)
    _check_flags(arguments, known)
    if file is not None:
        given = {argument.partition("=")[0] for argument in arguments}
        arguments = _arguments_of_file(file, known, given) + arguments
    if not markers:  # else some values have no flag
        _check_single_values(arguments, known)
    speaks = _local_rank() == 0
    quiet = contextlib.redirect_stderr(sys.stderr if speaks else io.StringIO())  # some errors ignore console_outputs
    with quiet, may_be_cut_short():
        return tyro.cli(
            config_type,
            args=arguments,
            prog=_command(),
            description=f"{config_type.__doc__}\n{_ABOUT_FILES}",
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes, *markers),
            console_outputs=speaks,
        )


def _command() -> str:
    """As it was called: ``openppo train_ppo``, or ``python -m openppo.cli.train_ppo``."""
    called = sys.argv[0]
    return f"python -m openppo.cli.{Path(called).stem}" if called.endswith(".py") else called


def option_names(config_type: type) -> dict[str, dataclasses.Field]:
    """All options of a command by name."""
    groups = typing.get_type_hints(config_type).values()
    return {option.name: option for group in groups for option in dataclasses.fields(group)}


def _without_foreign_flags(arguments: list[str]) -> list[str]:
    kept, notices = without_foreign_flags(arguments)
    for notice in notices if _local_rank() == 0 else []:
        print(notice, file=sys.stderr, flush=True)
    return kept


def _with_key_of_wandb(arguments: list[str]) -> list[str]:
    """``--use_wandb`` may stand alone."""
    return [
        f"{argument}={KEY_FROM_ELSEWHERE}" if argument == "--use_wandb" and following.startswith("--") else argument
        for argument, following in itertools.pairwise([*arguments, "--"])
    ]


def _take_config_file(arguments: list[str]) -> tuple[list[str], Path | None]:
    for i, argument in enumerate(arguments):
        if argument == "--config":
            if i + 1 == len(arguments):
                raise ValueError("--config needs a file: --config FILE.yaml.")
            return arguments[:i] + arguments[i + 2 :], Path(arguments[i + 1])
        if argument.startswith("--config="):
            return arguments[:i] + arguments[i + 1 :], Path(argument.partition("=")[2])
    return arguments, None


def _arguments_of_file(file: Path, known: dict[str, dataclasses.Field], given: set[str]) -> list[str]:
    """The options of a YAML file as command-line arguments, without those that are ``given`` there already."""
    try:
        text = file.read_text()
        options = yaml.safe_load(text)
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {file}: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"--config {file}: it must hold 'option: value' lines.")
    _check_keys(node, file)
    arguments = []
    for name, value in options.items():
        _check_known(str(name), known, f"option in --config {file}: ")
        if f"--{name}" not in given and f"--no_{name}" not in given:
            arguments += _arguments_of_option(known[name], value, file)
    return arguments


def _check_keys(node: Any, file: Path) -> None:
    """Refuse keys that stand twice: PyYAML takes the last one."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):  # aliases may lead back
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            first, line = lines.get(str(key.value)), key.start_mark.line + 1
            if first is not None:
                where = f"lines {first} and {line}" if first != line else f"line {line} twice"
                raise ValueError(f"--config {file}: {key.value} is in {where}; keep one of them.")
            lines[str(key.value)] = line
            waiting.append(value)


def _arguments_of_option(option: dataclasses.Field, value: Any, file: Path) -> list[str]:
    name = option.name
    if option.type == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"--config {file}: --{name} must be true or false, got {value!r}.")
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, bool) and not any(kind in str(option.type) for kind in ("float", "int", "tuple")):
        chosen = "on" if value else "off"  # which YAML reads as bools
        if f"'{chosen}'" in str(option.type):
            return [f"--{name}={chosen}"]
        if not value and option.default is None:
            return []
        if not value or name != "use_wandb":
            raise ValueError(f"--config {file}: --{name} is no switch, got {value}; write a text as '{value}'.")
    if isinstance(value, dict):
        if name != "chat_template_kwargs":
            raise ValueError(f"--config {file}: --{name} takes no mapping, got {value}.")
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"--config {file}: --{name} must be what JSON can hold ({error}).") from error
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]  # in one piece, because a text may start with dashes


def _check_flags(arguments: list[str], known: dict[str, dataclasses.Field]) -> None:
    for argument, following in itertools.pairwise([*arguments, "--"]):
        if not argument.startswith("--") or argument in ("--help", "--"):
            continue
        name, has_value, _ = argument[2:].partition("=")
        switch = name.removeprefix("no_")
        if not (switch in known and known[switch].type == "bool"):
            _check_known(name, known, "flag ", "--")
        elif has_value or not following.startswith("-"):
            raise ValueError(f"--{name} takes no value: use --{switch} or --no_{switch} alone.")


def _check_single_values(arguments: list[str], known: dict[str, dataclasses.Field]) -> None:
    name, values = "", []
    for argument in [*arguments, "--"]:
        if not argument.startswith("--"):
            values.append(argument)
            continue
        if name in known and known[name].type != "bool" and "tuple" not in str(known[name].type) and len(values) > 1:
            raise ValueError(f"--{name} takes one value, got {len(values)}: {' '.join(values)}. Leave the others out.")
        name, has_value, value = argument[2:].partition("=")
        values = [value] if has_value else []


def _check_known(name: str, known: dict[str, dataclasses.Field], what: str, dashes: str = "") -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {dashes}{near[0]}?" if near else "see --help for all options."
    raise ValueError(f"unknown {what}{dashes}{name}; {hint}")


def _underscored(argument: str) -> str:
    """``--zero-stage=2`` and ``--zero_stage=2`` are the same option."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name[:2] + name[2:].replace("-", "_") + equals + value


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", _rank()))


def _let_first_rank_speak() -> None:
    """Wait on all others of a host: torchrun ends them with the first that ends, which should have spoken by then."""
    if _local_rank() > 0:
        time.sleep(_SECONDS_FOR_FIRST_RANK)


def _leave(message: str) -> NoReturn:
    """Print the message once on each host, whether one rank or all of them got it, and exit with status 2."""
    _let_first_rank_speak()
    rank = _rank()
    who = "" if rank == 0 else f" on rank {rank}"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # of torchrun: the number of hosts
        who = f" on rank {rank} ({socket.gethostname()})"
    print(f"error{who}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
