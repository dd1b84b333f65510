"""MkDocs hook: one page of options for each command, made at build time from the dataclasses and their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from importlib import import_module

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from openppo.__main__ import commands
from openppo.cli.help import default_text, value_form
from openppo.config.fields import declared_options, is_group, rules_of
from openppo.config.schema import docstrings

_LONGEST_CHOICE = 40
_OPTION = re.compile(r'(?<!">)(<code>--([a-z0-9_]+)(?: [^<]*)?</code>)')  # but not inside a link
_HEAD = """\
# {command}

{purpose}

```text
openppo {command} {options}
python -m openppo.cli.{command} {options}      the same
{ranks}```
"""
_RANKS = "torchrun --standalone --nproc_per_node 8 -m openppo.cli.{command} {options}      on eight devices\n"
_ARGUMENTS = {
    "report": "RUN_DIR [RUN_DIR ...]",
    "export": "CHECKPOINT FOLDER [OPTIONS]",
    "chat": "FOLDER [OPTIONS]",
    "check": "",
}
_HOW = """
An option with a value is given as `--name VALUE`, a list as `--name VALUE VALUE`. One without is a switch, which
`--no_name` turns off. `--config FILE.yaml` reads options from a file, under the same names; the command line wins. What
is written as `name: VALUE` is a line of such a file only. In
Python: `from_options({config}, name=value)` of `openppo.config`; the code reads them as `config.{option}`.
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the section of the navigation that mkdocs.yml leaves empty."""
    section = next(entry for entry in config.nav or [] if "Options" in entry)
    section["Options"] = [
        {command: f"flags/{command}.md"} for command in sorted(commands(), key=_train_first)
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, so that links to them are checked like others."""
    for command in commands():
        files.append(File.generated(config, f"flags/{command}.md", content=page(command)))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Options in code, as `--eps_clip 0.2`, lead to their line in the tables; those of train_ppo where it has them."""
    if page.file.src_uri.startswith("flags/"):
        return html
    homes = {
        name: command
        for command in sorted(commands(), key=_train_first, reverse=True)
        for name in _names(command)
    }

    def linked(match: re.Match[str]) -> str:
        name = match[2] if match[2] in homes else match[2].removeprefix("no_")
        if name not in homes:
            return match[0]
        target = get_relative_url(f"flags/{homes[name]}.html#{name}", page.file.url)
        return f'<a class="option" href="{target}">{match[1]}</a>'

    return _OPTION.sub(linked, html)


def page(command: str) -> str:
    """Markdown of all options of a command; of one without a dataclass of them what its ``--help`` prints."""
    config, options = config_type(command), _ARGUMENTS.get(command, "[OPTIONS]")
    ranks = _RANKS if command.startswith("train_") or command in ("generate", "evaluate") else ""
    ranks = ranks.format(command=command, options=options)
    head = _HEAD.format(command=command, purpose=commands()[command], options=options, ranks=ranks)
    if config is None or not declared_options(config):
        words = [sys.executable, "-m", f"openppo.cli.{command}", "--help"]
        help_text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return f"{head}\n```text\n{help_text}```\n"
    groups = {name: hint for name, hint in typing.get_type_hints(config).items() if is_group(hint)}
    if own := [option for option in dataclasses.fields(config) if option.name not in groups]:
        groups = {"options": config} | groups
    name, group = next(iter(groups.items()))
    how = _HOW.format(
        config=config.__name__,
        option=own[0].name if own else f"{name}.{dataclasses.fields(group)[0].name}",
    )
    positional = "PositionalRequiredArgs" in inspect.getsource(
        import_module(f"openppo.cli.{command}")
    )
    return "\n".join(
        [head, how, *(_table(name, group, positional) for name, group in groups.items())]
    )


def config_type(command: str) -> type | None:
    """The dataclass of a command's options, which its source imports from ``openppo.config``."""
    tree = ast.parse(inspect.getsource(import_module(f"openppo.cli.{command}")))
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "openppo.config"
    ]
    found = [
        getattr(import_module("openppo.config"), name.name)
        for node in imports
        for name in node.names
    ]
    return next((kind for kind in found if dataclasses.is_dataclass(kind)), None)


def _names(command: str) -> list[str]:
    config = config_type(command)
    return [] if config is None else list(declared_options(config))


def _train_first(command: str) -> tuple[bool, str]:
    return not command.startswith("train_"), command


def _table(name: str, group: type, positional: bool) -> str:
    """``positional``: what is required is given without its name."""
    meanings, types = docstrings(group), typing.get_type_hints(group)
    lines = [
        f"## {name}",
        "",
        inspect.getdoc(group) or "",
        "",
        "| option | default | meaning |",
        "| --- | --- | --- |",
    ]
    for option in dataclasses.fields(group):
        if is_group(types[option.name]):
            continue
        value, choices = value_form(types[option.name]), ""
        if len(value) > _LONGEST_CHOICE:
            value, choices = "NAME", f" One of: {value.strip('{}').replace(',', ', ')}."
        usage = f"--{option.name}" + ("" if option.type == "bool" else f" {value}")
        if rules_of(option).of_files:
            usage = f"{option.name}: {value or '{true,false}'}"
        required = option.default is dataclasses.MISSING
        if required and positional:
            usage = option.name.upper()
        default = "required" if required else f"`{default_text(option.default)}`"
        cells = (f'<a id="{option.name}"></a>`{usage}`', default, meanings[option.name] + choices)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])
