"""Command lines to frozen configs: flags made from the dataclasses by tyro, YAML files, errors in one line."""

import argparse
import contextlib
import dataclasses
import difflib
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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro
import yaml

from openppo import __version__
from openppo.cli.openrlhf import without_foreign_flags
from openppo.cli.versions import print_versions
from openppo.config import Options, RunConfig, TrainPPOConfig, flat_dict
from openppo.config.commands import TrainingConfig
from openppo.config.fields import KEY_FROM_ELSEWHERE, SPELLINGS, declared_options
from openppo.strategy.launcher_summary import is_summarized, record_cause

_SECONDS_FOR_FIRST_RANK = 20
"""To print its error and leave; on a loaded machine Python takes seconds to do so."""
_ABOUT_FILES = "--config FILE.yaml reads 'option: value' lines, as logs/config.yaml has them; flags override them."
_OF_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

_ALONE = {
    "use_wandb": f"use_wandb={KEY_FROM_ELSEWHERE}",
    "overlap_comm": "overlap_comm=on",
    "compile": "compile=on",
    "no_compile": "compile=off",
}
"""Options that may stand without a value, and what they stand for."""

Config = TypeVar("Config", bound=Options)


def run_command(config_type: type[Options], build: str, *markers: Any) -> NoReturn:
    """Read the command line, build, run, and end the process.

    ``build``, as "module:name", makes the job of the config, which has ``fit`` and ``close``; it is imported after
    parsing, because it loads torch. A ``ValueError`` of it is the user's too. ``markers``: see ``parse_options``.
    """
    config = read_command(config_type, *markers)
    if isinstance(config, TrainingConfig) and _rank() == 0:  # libraries load for some seconds
        command = f"train_{_kind(config)}"
        ranks, name = (
            f" on {_world_size()} ranks" if _world_size() > 1 else "",
            f"OpenPPO {__version__}",
        )
        shown = f"\x1b[1m{name}\x1b[0m" if sys.stderr.isatty() else f"[openppo] {name}"
        print(f"{shown}  {command}{ranks}", file=sys.stderr, flush=True)
    try:
        _run(config, build)
    except SystemExit as ended:
        _end_process(_status(ended))
    _end_process(0)


def read_command(config_type: type[Config], *markers: Any) -> Config:
    """Parse and check ``sys.argv``; a ``ValueError`` is the user's: one line on stderr and exit status 2."""
    arguments = sys.argv[1:]
    if {"-h", "--help", "--version"} & {*arguments}:
        signal.signal(
            signal.SIGPIPE, signal.SIG_DFL
        )  # end quietly if the reader leaves: --help | head
    if arguments == ["--version"]:
        print_versions()
        sys.exit()
    try:
        config = parse_options(config_type, arguments, *markers)
        _check_launch()
        config.validate(
            config.training_ranks(_world_size())
            if isinstance(config, TrainingConfig)
            else _world_size()
        )
    except ValueError as error:
        leave(str(error))
    except SystemExit as ended:  # tyro has printed the error on the first rank of each host
        if ended.code:
            _wait_for_first_rank()
        raise
    return config


def _run(config: Options, build: str) -> None:
    """Build the job and do its work."""
    _set_allocator(config)
    from openppo.strategy.watchdog import Watchdog  # with torch: after parsing
    from openppo.tracking.phase import current, phase

    limits = RunConfig(stall_timeout=0)  # a server without requests makes no progress
    if isinstance(config, TrainingConfig):
        limits = config.run

    def how_to_resume() -> str:
        has_begun = (
            current.step > 0
        )  # before that, checkpoints in the folder may be of an earlier run
        return _how_to_resume(config, has_begun) if isinstance(config, TrainingConfig) else ""

    with Watchdog(limits, current, flat_dict(config), how_to_resume=how_to_resume) as watchdog:
        try:
            with phase("loading"):
                from openppo.trainer.quiet import quiet_libraries  # seconds of imports

                quiet_libraries()
                job = pkgutil.resolve_name(build)(config)
        except ValueError as error:
            watchdog.refuse(str(error))
        watchdog.explain_memory = getattr(job, "explain_memory", watchdog.explain_memory)
        watchdog.saves_on_signal = isinstance(config, TrainingConfig)
        job.fit()
        watchdog.saves_on_signal = False
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
    """Let a GPU's memory grow in place, which wastes less; before torch looks.

    Neither over a setting of the user nor with vLLM, whose sleep refuses it. torch 2.8 to 2.13 all read this name.
    """
    names = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
    if names.isdisjoint(os.environ) and flat_dict(config).get("rollout_engine") != "vllm":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def _end_process(status: int) -> NoReturn:
    """End without the interpreter's shutdown.

    It waits for threads, such as one of a reward function that never returns, and those of gloo may abort in it. All
    that a command writes is closed by now.
    """
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where a shell has closed it: >&-
        with contextlib.suppress(OSError):  # the reader has closed the pipe
            stream.flush()
    os._exit(status)


def _status(ended: SystemExit) -> int:
    """The exit status of ``sys.exit``, whose text goes to stderr."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def parse_options(config_type: type[Config], arguments: Sequence[str], *markers: Any) -> Config:
    """Parse a command line; options of ``--config FILE.yaml`` come first, so that the command line wins.

    ``markers`` are further ones of ``tyro.conf``.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--config", type=Path)
    try:
        found, given = files.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ValueError("--config needs a file: --config FILE.yaml.") from error
    given, notices = without_foreign_flags(given, all_of_them=config_type is TrainPPOConfig)
    first_rank = _local_rank() == 0
    for notice in notices if first_rank else []:
        print(notice, file=sys.stderr, flush=True)
    known = declared_options(config_type)
    for i, (argument, following) in enumerate(itertools.pairwise([*given, "--"])):
        flag, *value_of_flag = argument.split("=", 1)
        name = flag[2:].replace("-", "_")
        if argument.startswith("--") and SPELLINGS.get(name) in known:
            name = SPELLINGS[name]
            given[i] = "=".join([f"--{name}", *value_of_flag])
        if argument.startswith("--") and name.removeprefix("no_") not in ("", "help", *known):
            raise ValueError(f"unknown flag --{name}; {_nearest(name, known, '--')}")
        if (
            argument.startswith("--")
            and name in _ALONE
            and not value_of_flag
            and following.startswith("--")
        ):
            given[i] = f"--{_ALONE[name]}"
    called = sys.argv[0]  # by "openppo COMMAND" that
    arguments = [*(_arguments_of_file(found.config, known) if found.config else []), *given]
    with _tyro_errors(first_rank):
        return tyro.cli(
            config_type,
            args=arguments,
            prog=f"python -m openppo.cli.{Path(called).stem}" if called.endswith(".py") else called,
            description=f"{config_type.__doc__}\n{_ABOUT_FILES}",
            use_underscores=True,
            config=(tyro.conf.OmitArgPrefixes, *markers),
            console_outputs=first_rank,
        )


@contextlib.contextmanager
def _tyro_errors(first_rank: bool) -> Iterator[None]:
    """Show what tyro prints on the first rank only, and record its error for torchrun's summary."""
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
    """The message of an error that tyro has framed: what stands between the title and the first rule."""
    lines = [line.strip("│ ") for line in text.splitlines()[1:]]
    return " ".join(
        itertools.takewhile(lambda line: line and not line.startswith(("─", "╰")), lines)
    )


def _nearest(name: str, known: Iterable[str], dashes: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {dashes}{near[0]}?" if near else "see --help for all options."


def _arguments_of_file(file: Path, known: dict[str, dataclasses.Field]) -> list[str]:
    """Turn the options of a YAML file into command-line arguments."""
    try:
        options = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {file}: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"--config {file}: it must hold 'option: value' lines.")
    options = {SPELLINGS.get(name, name): value for name, value in options.items()}
    for name in options:
        if name not in known:
            raise ValueError(
                f"unknown option in --config {file}: {name}; {_nearest(str(name), known)}"
            )
    return [
        part
        for name, value in options.items()
        for part in _arguments_of_option(known[name], value, file)
    ]


def _arguments_of_option(option: dataclasses.Field, value: Any, file: Path) -> list[str]:
    name, kind = option.name, str(option.type)
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"--config {file}: --{name} must be true or false, got {value!r}.")
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, bool) and "Literal" in kind:
        value = "on" if value else "off"  # YAML reads them as bools
    if value is False and option.default is None:
        return []
    if isinstance(value, dict) and name == "chat_template_kwargs":
        value = json.dumps(value, default=str)
    if isinstance(value, dict) or (value is True and name != "use_wandb"):
        raise ValueError(
            f"--config {file}: --{name} takes a text or number, got {value}; write a text in quotes."
        )
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]  # in one piece, because a text may start with dashes


def _check_launch() -> None:
    """Raise ``ValueError`` where the environment has a part of what a launcher sets."""
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
    """Wait on the other ranks of a host: torchrun ends all with the first, whose error should be printed by then."""
    if _local_rank() > 0:
        time.sleep(_SECONDS_FOR_FIRST_RANK)


def leave(message: str) -> NoReturn:
    """Print the message once on each host, whether one rank or all of them got it, and exit with status 2."""
    _wait_for_first_rank()
    who = "" if _rank() == 0 else f" on rank {_rank()}"
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # of torchrun: the number of hosts
        who = f" on rank {_rank()} ({socket.gethostname()})"
    record_cause(message)
    print(f"error{who}: {message}", file=sys.stderr, flush=True)
    sys.exit(2)
