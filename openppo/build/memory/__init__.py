"""Memory estimates of a run, and the batch sizes that follow from them."""
