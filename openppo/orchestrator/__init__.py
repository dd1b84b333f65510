"""Asynchronous runs: sampling does not wait for training."""
