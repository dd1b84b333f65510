"""Command lines of other libraries."""
