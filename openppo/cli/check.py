"""Print what a bug report needs: versions, devices, kernels, compilers, and a tiny training step."""

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from openppo.cli.options import read_command
from openppo.cli.versions import missing_packages, print_versions
from openppo.config import CheckConfig

_CAN = "A training can start here."
_CANNOT = "No training can start here until what is missing is mended."


def main() -> NoReturn:
    """Entry point of ``openppo check``: exit status 0 if a training can start here, else 1."""
    read_command(CheckConfig)
    print_versions()
    sys.stdout.flush()
    missing = missing_packages()
    if missing:
        _end(f"packages\n  missing   {' '.join(missing)}: pip install {' '.join(missing)}", 1)
    try:
        from openppo.build.machine import look_at_machine  # seconds of imports
        from openppo.trainer.quiet import quiet_libraries
    except (ImportError, OSError) as error:  # OSError: of a shared library
        _end(f"packages\n  missing   {' '.join(str(error).split())}: install it again", 1)

    quiet_libraries()
    _end(*_report(look_at_machine()))


def _report(findings: Iterable[Any]) -> tuple[str, int]:
    """Return the lines of ``findings`` by section, and the exit status."""
    lines: list[str] = []
    section = ""
    status = 0
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        remedy = f": {finding.remedy}" if finding.remedy else ""
        lines.append(f"  {finding.mark:<8}  {finding.name:<20}  {finding.value}{remedy}")
        if finding.mark == "missing":
            status = 1
    return "\n".join(lines), status


def _end(report: str, status: int) -> NoReturn:
    """Print the report and its conclusion, and end."""
    print(f"\n{report}\n\n{_CANNOT if status else _CAN}")
    sys.exit(status)


if __name__ == "__main__":
    main()
