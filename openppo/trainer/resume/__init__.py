"""Stopping and going on: checkpoints of whole runs, and what a new run must share with one."""
