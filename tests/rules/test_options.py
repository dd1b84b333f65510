"""One option, one name: every field is used, and every flag that we write about exists."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import openppo.config
from openppo.__main__ import commands
from openppo.config.fields import declared_options, rules_of

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "openppo"
TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "examples")
TEXT_SUFFIXES = {".md", ".rst", ".txt", ".sh", ".py", ".yaml", ".yml"}
OTHER_PROGRAMS = set(
    """
    nproc_per_node nnodes node_rank standalone master_addr master_port shutdown_timeout max_restarts signals_to_handle
    rdzv_backend rdzv_endpoint module
    job-name nodes ntasks-per-node gpus-per-node cpus-per-task time signal output kill-on-bad-exit requeue open-mode
    quiet version clear disable-pip-version-check no-deps upgrade editable index-url extra-index-url no-build-isolation
    update-aliases push slow import-mode durations check strict logdir shrink
    user map-current-user net pid fork kill-child rm network exclude
    tag build-arg gpus shm-size volume
    """.split()
)
"""Flags of torchrun, deepspeed; Slurm; pip; mike, pytest, ruff, mypy, tensorboard, our rules, hf; docker."""
FLAG = re.compile(r"(?<![\w!-])--([a-z][a-z0-9_-]*)")
OUR_COMMAND = re.compile(r"openppo(?:\.cli\.| )(\w+)")


@cache
def command_configs() -> dict[str, Any]:
    """The config of each command, by the import in its module."""
    files = {
        name: (PACKAGE / "cli" / f"{name}.py").read_text(encoding="utf-8") for name in commands()
    }
    names = {
        name: re.findall(r"^from openppo.config import (\w+)", text, re.MULTILINE)
        for name, text in files.items()
    }
    return {name: getattr(openppo.config, found[0]) for name, found in names.items()}


@cache
def flags_of(command: str) -> set[str]:
    """Field names but those of files, and ``no_`` before boolean ones and switches with a value."""
    declared = declared_options(command_configs()[command])
    options = {name: field for name, field in declared.items() if not rules_of(field).of_files}
    switches = {
        name for name, field in options.items() if field.type == "bool" or rules_of(field).alone
    }
    return {
        "config",
        *(["recipe"] if command == "train_ppo" else []),
        "help",
        "version",
        *options,
        *(f"no_{name}" for name in switches),
    }


def parts_that_use(file: Path) -> list[ast.AST]:
    """The whole file; of the config only methods that give an option another form, since checks are no use."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if file.parent.name != "config":
        return [tree]
    methods = [
        method for node in tree.body if isinstance(node, ast.ClassDef) for method in node.body
    ]
    return [
        m
        for m in methods
        if isinstance(m, ast.FunctionDef) and not re.search("problems|missing|validate", m.name)
    ]


def test_every_option_is_used():
    nodes = [
        node
        for file in PACKAGE.rglob("*.py")
        for part in parts_that_use(file)
        for node in ast.walk(part)
    ]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    options = {name for config in command_configs().values() for name in declared_options(config)}
    assert options - read == set()


def test_every_flag_in_documents_and_examples_exists():
    """Of any command or program; on a command line, after ``openppo.cli.X``, of X."""
    sources = [
        file
        for folder in ("examples", "benchmarks", "tests/golden")
        for file in (REPO / folder).rglob("*.py")
    ]
    declared = re.compile(r"add_argument\(\s*[\"']--([a-z][a-z0-9_-]*)")
    scripts = {
        flag for file in sources for flag in declared.findall(file.read_text(encoding="utf-8"))
    }
    scripts |= set(
        re.findall(
            r"^ +--([a-z]+)\)", (REPO / "benchmarks/gpu/run.sh").read_text("utf-8"), re.MULTILINE
        )
    )
    anywhere = set().union(*map(flags_of, commands()), OTHER_PROGRAMS, scripts)
    unknown = []
    for file in [
        file for entry in TEXTS for file in [REPO / entry, *sorted((REPO / entry).rglob("*"))]
    ]:
        if not file.is_file() or file.suffix not in TEXT_SUFFIXES or "hooks" in file.parts:
            continue
        text = re.sub(r"\\\n\s*", " ", file.read_text(encoding="utf-8"))
        for line in re.sub(r"(--agent_command) (\"[^\"]*\"|'[^']*')", r"\1", text).splitlines():
            command = None if "`" in line else OUR_COMMAND.search(line)
            for match in FLAG.finditer(line):
                of_command = command and command[1] in commands() and match.start() > command.end()
                if match[1] not in (flags_of(command[1]) if command and of_command else anywhere):
                    unknown.append(f"{file.relative_to(REPO)}: --{match[1]}")
    assert unknown == []
