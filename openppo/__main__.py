"""The program ``openppo``: finds a command, and runs it like ``python -m openppo.cli.COMMAND``."""

import ast
import difflib
import signal
import sys
from importlib import import_module
from pathlib import Path

from openppo.cli.versions import print_versions

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
    words = sys.argv[1:]
    known = commands()
    if not words or words[0] in ("-h", "--help", "--version"):
        # End quietly if the reader leaves: --help | head.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if words and words[0] == "--version":
            return print_versions()
        listed = "\n".join(f"  {name:<10}  {purpose}" for name, purpose in known.items())
        print(_USAGE.format(commands=listed), end="")
        sys.exit(0 if words else 2)

    word = words[0]
    command = word.replace("-", "_")
    if command not in known:
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
        print(f"error: openppo has no command {word}; {hint}", file=sys.stderr)
        sys.exit(2)

    sys.argv = [f"openppo {command}", *words[1:]]
    import_module(f"openppo.cli.{command}").main()


def commands() -> dict[str, str]:
    """Return the purpose of each module of ``openppo.cli`` that runs, by the command's name; none is imported."""
    purposes = {}
    for file in sorted(_CLI.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            purposes[file.stem] = docstring.split("\n")[0]
    return purposes


if __name__ == "__main__":
    main()
