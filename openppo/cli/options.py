"""Command lines to frozen configs: flags that tyro makes of the dataclasses, YAML files, errors in one line."""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import logging
import os
import pkgutil
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro
import yaml

from openppo import __version__
from openppo.cli.foreign import first_key, refuse_overrides, remedy_for, with_our_values
from openppo.cli.help import help_page
from openppo.cli.openrlhf import ALSO_FLAGS, without_foreign_flags
from openppo.cli.versions import print_versions
from openppo.config import Options, RunConfig, TrainPPOConfig, flat_dict
from openppo.config.fields import SPELLINGS, declared_options, rules_of, switched
from openppo.config.recipe_files import recipe_file, recipe_names
from openppo.config.training import TrainingConfig
from openppo.strategy.launcher_summary import is_summarized, record_cause

_SECONDS_FOR_FIRST_RANK = 20
"""Time for the first rank to print its error and leave, seconds on a loaded machine."""
_NEEDS_FILE = {
    "--config": "--config needs a file: --config FILE.yaml.",
    "--recipe": f"--recipe needs a name: {', '.join(recipe_names())}.",
}
"""Messages for these options without a value."""
_OF_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

Config = TypeVar("Config", bound=Options)


def run_command(config_type: type[Options], build: str, *markers: Any) -> NoReturn:
    """Read the command line, build, run, and end the process.

    ``build``, as "module:name", makes the job of the config, which has ``fit`` and ``close``; it is imported after
    parsing, because it loads torch. Its ``ValueError`` is the user's mistake, too. ``markers``: see ``parse_options``.
    """
    config = read_command(config_type, *markers)
    if isinstance(config, TrainingConfig) and _rank() == 0:
        _greet(config)
    try:
        _run(config, build)
    except SystemExit as ended:
        _end_process(_status(ended))
    _end_process(0)


def read_command(config_type: type[Config], *markers: Any) -> Config:
    """Parse and check ``sys.argv``; a mistake of the user gives one line on stderr and exit status 2."""
    arguments = sys.argv[1:]
    if {"-h", "--help", "--version"} & {*arguments}:
        # End quietly if the reader leaves: --help | head.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if arguments == ["--version"]:
        print_versions()
        sys.exit()

    try:
        config = parse_options(config_type, arguments, *markers)
        _check_launch()
        ranks = _world_size()
        if isinstance(config, TrainingConfig):
            ranks = config.training_ranks(ranks)
        config.validate(ranks)
    except ValueError as error:
        leave(str(error))
    except SystemExit as ended:  # tyro has printed the error on the first rank of each host
        if ended.code:
            _wait_for_first_rank()
        raise
    return config


def _greet(config: TrainingConfig) -> None:
    """Print version and command before libraries load, which takes some seconds."""
    name = f"OpenPPO {__version__}"
    shown = f"\x1b[1m{name}\x1b[0m" if sys.stderr.isatty() else f"[openppo] {name}"
    ranks = f" on {_world_size()} ranks" if _world_size() > 1 else ""
    print(f"{shown}  train_{_kind(config)}{ranks}", file=sys.stderr, flush=True)


def _run(config: Options, build: str) -> None:
    """Build the job and do its work."""
    _set_allocator(config)
    from openppo.strategy.watchdog import Watchdog  # with torch: after parsing
    from openppo.tracking.phase import current, phase

    limits = RunConfig(stall_timeout=0)  # a server without requests makes no progress
    if isinstance(config, TrainingConfig):
        limits = config.run

    def how_to_resume() -> str:
        if not isinstance(config, TrainingConfig):
            return ""
        # Before the first step, checkpoints in the folder may be of an earlier run.
        return _how_to_resume(config, has_begun=current.step > 0)

    with Watchdog(limits, current, flat_dict(config), how_to_resume=how_to_resume) as watchdog:
        try:
            with phase("loading"):
                from openppo.trainer.quiet import quiet_libraries  # seconds of imports

                quiet_libraries()
                job = pkgutil.resolve_name(build)(config)
        except ValueError as error:
            watchdog.refuse(str(error))

        if hasattr(job, "explain_memory"):
            watchdog.explain_memory_with(job.explain_memory)
        if isinstance(config, TrainingConfig):
            watchdog.save_on_signal()
        job.fit()
        watchdog.end_on_signal()
        job.close()


def _kind(config: TrainingConfig) -> str:
    """The part of a training command's name after ``train_``."""
    return type(config).__name__.removeprefix("Train").removesuffix("Config").lower()


def _how_to_resume(config: TrainingConfig, has_begun: bool) -> str:
    """Say how to continue after a failure; empty if the run has no checkpoint."""
    options = config.checkpoint
    folder = options.ckpt_path or Path(config.run.save_path) / f"checkpoints_{_kind(config)}"
    if not (has_begun or options.load_checkpoint) or not Path(folder, "latest").exists():
        return ""
    return "the same command with --load_checkpoint resumes from the newest checkpoint"


def _set_allocator(config: Options) -> None:
    """Let a GPU's memory grow in place, which wastes less; to be called before torch reads the environment.

    A setting of the user stays, and vLLM's sleep mode refuses the setting. torch 2.8 to 2.13 all read this name.
    """
    names = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
    if names.isdisjoint(os.environ) and flat_dict(config).get("rollout_engine") != "vllm":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def _end_process(status: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    The shutdown waits for threads, such as one of a reward function that never returns, and threads of gloo may abort
    in it. All files that a command writes are closed by now.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None where a shell has closed it: >&-
            with contextlib.suppress(OSError):  # the reader has closed the pipe
                stream.flush()
    os._exit(status)


def _status(ended: SystemExit) -> int:
    """Return the exit status of ``sys.exit``, whose text goes to stderr."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def parse_options(config_type: type[Config], arguments: Sequence[str], *markers: Any) -> Config:
    """Parse a command line, which wins over ``--config FILE.yaml``, and that over ``--recipe NAME`` of train_ppo.

    ``markers`` are further ones of ``tyro.conf``.
    """
    if {"-h", "--help"} & {*arguments}:
        _print_help(config_type, arguments, *markers)

    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--config", type=Path)
    if config_type is TrainPPOConfig:
        files.add_argument("--recipe")
    try:
        parsed, words = files.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError(_NEEDS_FILE[error.argument_name or "--config"]) from error

    words, notices = without_foreign_flags(words, all_of_them=config_type is TrainPPOConfig)
    known = declared_options(config_type)
    words = _completed(words, known)
    if issubclass(config_type, TrainingConfig):
        refuse_overrides(words, known)
    if parsed.config:
        words = [*_arguments_of_file(parsed.config, known), *words]
    if config_type is TrainPPOConfig and parsed.recipe:
        words = [*_arguments_of_file(recipe_file(parsed.recipe), known), *words]
    words, readings = with_our_values(words)

    is_first_rank = _local_rank() == 0
    if is_first_rank:
        for notice in (*notices, *readings):
            print(notice, file=sys.stderr, flush=True)

    with _tyro_errors(is_first_rank):
        return tyro.cli(
            config_type,
            args=words,
            prog=_program(),
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes, *markers),
            console_outputs=is_first_rank,
        )


def _program() -> str:
    """Return the command as it was started: ``openppo COMMAND``, or ``python -m openppo.cli.COMMAND``."""
    program = sys.argv[0]
    if program.endswith(".py"):
        return f"python -m openppo.cli.{Path(program).stem}"
    return program


def _print_help(config_type: type[Options], arguments: Sequence[str], *markers: Any) -> NoReturn:
    """Print the help of a command on the first rank, with ``--help all`` every option, and exit."""
    if _local_rank() == 0:
        page = help_page(
            config_type,
            _program(),
            everything="all" in arguments,
            positional=tyro.conf.PositionalRequiredArgs in markers,
        )
        sys.stdout.write(page)
    sys.exit(0)


def _completed(words: Iterable[str], known: Mapping[str, dataclasses.Field]) -> list[str]:
    """Write flags by their names here, and those that may stand alone with their value.

    Raises ``ValueError`` for a flag that is not ``known``, or whose option is a line of files.
    """
    completed = []
    for word, following in itertools.pairwise([*words, "--"]):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = flag.removeprefix("--").replace("-", "_")
            our_name = SPELLINGS.get(name, name)
            if our_name != name and our_name in known:
                name = our_name
                word = f"--{name}{equals}{value}"
            plain = name.removeprefix("no_")
            if plain not in ("", *known):
                raise ValueError(f"unknown flag --{name}; {remedy_for(name, known, '--')}")
            if plain:
                has_value = bool(equals) or not following.startswith("--")
                word = _switch(word, name, known[plain], has_value=has_value)
        completed.append(word)
    return completed


def _switch(word: str, name: str, option: dataclasses.Field, has_value: bool) -> str:
    """Give a flag that may stand alone its value; ``ValueError`` for an option of files."""
    rules = rules_of(option)
    if rules.of_files and option.name not in ALSO_FLAGS:
        raise ValueError(
            f"--{option.name} is no flag: write the line '{option.name}: VALUE' into a file, and give "
            "--config FILE.yaml."
        )
    if rules.alone is None or (has_value and name == option.name):
        return word
    return f"--{option.name}={switched(option, name == option.name)}"


@contextlib.contextmanager
def _tyro_errors(first_rank: bool) -> Iterator[None]:
    """Show the output of tyro on the first rank only, and record its error for torchrun's summary."""
    if first_rank and not is_summarized():
        yield  # straight to the terminal, in colours
        return
    printed = io.StringIO()  # some errors ignore console_outputs
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as ended:
        if first_rank and ended.code:
            record_cause(_message_in_box(printed.getvalue()))
        raise
    finally:
        if first_rank:
            sys.stderr.write(printed.getvalue())


def _message_in_box(text: str) -> str:
    """Return the message of an error that tyro has framed: the lines between its title and the first rule."""
    message = []
    for framed in text.splitlines()[1:]:
        line = framed.strip("│ ")
        if not line or line.startswith(("─", "╰")):
            break
        message.append(line)
    return " ".join(message)


def _arguments_of_file(file: Path, known: dict[str, dataclasses.Field]) -> list[str]:
    """Turn the options of a YAML file into command-line arguments."""
    try:
        options = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {file}: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"--config {file}: it must hold 'option: value' lines.")

    options = {SPELLINGS.get(name, name): value for name, value in options.items()}
    for name, value in options.items():
        if name not in known:
            key = first_key(name, value)
            raise ValueError(f"unknown option in --config {file}: {key}; {remedy_for(key, known)}")

    arguments = []
    for name, value in options.items():
        arguments += _arguments_of_option(known[name], value, file)
    return arguments


def _arguments_of_option(option: dataclasses.Field, value: Any, file: Path) -> list[str]:
    name = option.name
    kind = str(option.type)
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"--config {file}: --{name} must be true or false, got {value!r}.")
        return [f"--{name}" if value else f"--no_{name}"]

    value = switched(option, value)
    if isinstance(value, dict) and name == "chat_template_kwargs":
        value = json.dumps(value, default=str)
    if isinstance(value, (dict, bool)):
        raise ValueError(
            f"--config {file}: --{name} takes a text or number, got {value}; write a text in quotes."
        )
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]  # in one piece, because a text may start with dashes


def _check_launch() -> None:
    """Raise ``ValueError`` if the environment has only some of the variables that a launcher sets."""
    present = [name for name in _OF_LAUNCH if name in os.environ]
    missing = [name for name in _OF_LAUNCH if name not in os.environ]
    is_alone = "RANK" not in present and _world_size() == 1
    if missing and not is_alone:
        are_set = f"{' and '.join(present)} {'are' if len(present) > 1 else 'is'} set"
        are_not = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not"
        raise ValueError(
            f"{are_set}, and {are_not}: start with torchrun, which sets all three, or unset them."
        )


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", _rank()))


def _wait_for_first_rank() -> None:
    """Wait on the other ranks of a host until the first has printed its error.

    torchrun ends all ranks as soon as one of them ends.
    """
    if _local_rank() > 0:
        time.sleep(_SECONDS_FOR_FIRST_RANK)


def leave(message: str) -> NoReturn:
    """Print the message and exit with status 2; once on each host, even if all its ranks got it."""
    _wait_for_first_rank()
    where = "" if _rank() == 0 else f" on rank {_rank()}"
    has_many_hosts = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"  # set by torchrun
    if has_many_hosts:
        where = f" on rank {_rank()} ({socket.gethostname()})"
    record_cause(message)
    print(f"error{where}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
