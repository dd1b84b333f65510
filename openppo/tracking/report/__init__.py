"""What a run did, for people: rules that warn in words, and a page that shows curves and samples."""
