"""State of a run that resumes, its match with a checkpoint, and export of a checkpoint as a model."""
