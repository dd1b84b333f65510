"""What a run must share with its checkpoint, and export of a checkpoint as a model."""
