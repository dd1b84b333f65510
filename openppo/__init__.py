"""OpenPPO: PPO for language models on one node, on DeepSpeed, without Ray."""

import logging
import sys

from openppo.lazy import MovedModules

__version__ = "0.1.0"

logger = logging.getLogger("openppo")
"""Of all modules; ``setup_logging`` configures it in commands, elsewhere the importing program does."""

sys.meta_path.insert(0, MovedModules())
