"""Metrics of held-out prompts, and the commands that answer prompts without training."""
