"""OpenPPO: PPO for language models on one node, on DeepSpeed, without Ray."""

import logging

__version__ = "0.1.0"

logger = logging.getLogger("openppo")
"""The log of all modules; ``setup_logging`` configures it in commands, elsewhere the importing program does."""
