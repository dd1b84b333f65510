"""Estimated memory of a run, and sizes of batches by it."""
