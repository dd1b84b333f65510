"""Write one HTML file about one or several runs: curves, warnings, samples token by token, options."""

import sys
from pathlib import Path

import tyro

from openppo.cli.options import leave, parse_options
from openppo.cli.versions import print_versions
from openppo.config import ReportConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.report``. A ``ValueError`` is the user's: one line and exit status 2."""
    if sys.argv[1:] == ["--version"]:
        return print_versions()
    try:
        config = parse_options(ReportConfig, sys.argv[1:], tyro.conf.PositionalRequiredArgs)
        config.validate(1)
        print(_write(config))
    except ValueError as error:
        leave(str(error))


def _write(config: ReportConfig) -> Path:
    from openppo.tracking.report.page import write_report  # heavy: after parsing
    from openppo.tracking.report.run_data import find_logs

    folders = [Path(folder).expanduser() for folder in config.page.run_dirs]
    one = find_logs(folders[0]) / "report.html" if len(folders) == 1 else Path("report.html")
    output = one if config.page.output is None else Path(config.page.output).expanduser()
    try:
        return write_report(folders, output)
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written ({error}): choose another file.") from error


if __name__ == "__main__":
    main()
