"""Serve a reward model over HTTP, for --remote_rm_url."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import ServeRMConfig

main = partial(run_command, ServeRMConfig, "openppo.jobs.serve_rm:build_server")

if __name__ == "__main__":
    main()
