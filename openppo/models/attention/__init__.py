"""Attention written here, where the libraries have none that is fast."""
