"""Responses to held-out prompts: their metrics in training, and the commands that answer prompts without training."""
