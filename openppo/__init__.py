"""OpenPPO: PPO for language models on one node, on DeepSpeed, without Ray."""

import sys

from openppo.lazy import MovedModules

__version__ = "0.1.0"

sys.meta_path.insert(0, MovedModules())
