"""Evaluations on held-out prompts, and their metrics."""
