"""Resume of a run from a checkpoint."""
