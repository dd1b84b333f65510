"""The program ``openppo``: finds a command and runs it as ``python -m openppo.cli.COMMAND`` does."""

import ast
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from openppo.cli.versions import may_be_cut_short, versions

_CLI = Path(__file__).parent / "cli"

_USAGE = """usage: openppo COMMAND [OPTIONS]
       openppo COMMAND --help      all options of a command
       openppo --version           versions and machine, for bug reports

Commands:
{commands}

On several devices: torchrun --standalone --nproc_per_node 8 -m openppo COMMAND [OPTIONS]
"""


def main() -> None:
    """Entry point of ``openppo`` and of ``python -m openppo``."""
    asked = sys.argv[1:2]
    known = commands()
    if asked in ([], ["-h"], ["--help"]):
        with may_be_cut_short():
            print(_usage(known), end="")
        sys.exit(0 if asked else 2)
    if asked == ["--version"]:
        with may_be_cut_short():
            print(versions())
        return
    command = asked[0].replace("-", "_")
    if command not in known:
        print(_unknown(asked[0], list(known)), file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"openppo {command}", *sys.argv[2:]]
    import_module(f"openppo.cli.{command}").main()


def commands() -> dict[str, str]:
    """Purpose of each module of ``openppo.cli`` with a ``main``, by the command's name; none is imported."""
    trees = {file.stem: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(_CLI.glob("*.py"))}
    return {
        name: (ast.get_docstring(tree) or "").split("\n")[0]
        for name, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    }


def _usage(known: dict[str, str]) -> str:
    width = max(map(len, known))
    return _USAGE.format(commands="\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in known.items()))


def _unknown(command: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(command, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
    return f"error: openppo has no command {command}; {hint}"


if __name__ == "__main__":
    main()
