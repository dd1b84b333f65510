"""Serve a model to an agent under OpenAI's address, to debug it before training."""

from functools import partial

from openppo.cli.options import run_command
from openppo.config import ServeAgentConfig

main = partial(run_command, ServeAgentConfig, "openppo.agents.gateway.serve:AgentServer")

if __name__ == "__main__":
    main()
