"""Commands: parse, build, call."""
