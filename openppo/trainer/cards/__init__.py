"""Model cards of trained, exported and merged models."""
