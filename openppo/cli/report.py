"""Write one HTML file about one or several runs: curves, warnings, samples token by token, options."""

from pathlib import Path

import tyro

from openppo.cli.options import leave, read_command
from openppo.config import ReportConfig


def main() -> None:
    """Entry point of ``python -m openppo.cli.report``."""
    config = read_command(ReportConfig, tyro.conf.PositionalRequiredArgs)
    from openppo.tracking.output_files import check_output_file  # heavy: after parsing
    from openppo.tracking.report.page import is_report, write_report
    from openppo.tracking.report.run_data import find_logs

    folders = [Path(folder).expanduser() for folder in config.run_dirs]
    try:
        default = Path("report.html")
        if len(folders) == 1:
            default = find_logs(folders[0]) / "report.html"
        output = check_output_file(config.output or str(default), "--output", is_ours=is_report)
        print(write_report(folders, output))
    except ValueError as error:
        leave(str(error))


if __name__ == "__main__":
    main()
