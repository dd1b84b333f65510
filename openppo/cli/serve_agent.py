"""Serve a model to an agent under OpenAI's address, to debug it before training."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import ServeAgentConfig

main = partial(run_command, ServeAgentConfig, "openppo.jobs.serve_agent:AgentServer")

if __name__ == "__main__":
    main()
