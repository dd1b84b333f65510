"""The program ``openppo``: finds a command and runs it as ``python -m openppo.cli.COMMAND`` does."""

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
    asked, known = sys.argv[1:2], commands()
    if asked in ([], ["-h"], ["--help"], ["--version"]):
        signal.signal(
            signal.SIGPIPE, signal.SIG_DFL
        )  # end quietly if the reader leaves: --help | head
        if asked == ["--version"]:
            return print_versions()
        listed = "\n".join(f"  {name:<10}  {purpose}" for name, purpose in known.items())
        print(_USAGE.format(commands=listed), end="")
        sys.exit(0 if asked else 2)
    command = asked[0].replace("-", "_")
    if command not in known:
        near = difflib.get_close_matches(asked[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
        print(f"error: openppo has no command {asked[0]}; {hint}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"openppo {command}", *sys.argv[2:]]
    import_module(f"openppo.cli.{command}").main()


def commands() -> dict[str, str]:
    """Purpose of each module of ``openppo.cli`` that runs, by the command's name; none is imported."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(_CLI.glob("*.py"))}
    runnable = {name: text for name, text in texts.items() if '__name__ == "__main__"' in text}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        for name, text in runnable.items()
    }


if __name__ == "__main__":
    main()
