"""Checks of options, models and objects before weights are loaded."""
