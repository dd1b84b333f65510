"""Checkpoints of whole runs, in JSON and safetensors only, so that reading one never runs code."""
