"""The report of a run, for people: rules that warn in words, and a page with curves and samples."""
