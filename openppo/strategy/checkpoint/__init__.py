"""Checkpoints: what a run needs to go on as if it had never stopped.

Only JSON and safetensors, so that reading one never runs code.
"""

from openppo.strategy.checkpoint.folder import CheckpointError, CheckpointFolder
from openppo.strategy.checkpoint.fragments import Fragment, FragmentReader, write_fragments

__all__ = ["CheckpointError", "CheckpointFolder", "Fragment", "FragmentReader", "write_fragments"]
