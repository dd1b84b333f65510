"""Checkpoints of whole runs, in JSON and safetensors only, so that reading one never runs code."""

from openppo.strategy.checkpoint.folder import CheckpointError, CheckpointFolder

__all__ = ["CheckpointError", "CheckpointFolder"]
