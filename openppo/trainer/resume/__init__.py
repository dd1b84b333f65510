"""Resume of a run from a checkpoint, and export of a checkpoint as a model."""
