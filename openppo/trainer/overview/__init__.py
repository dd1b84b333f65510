"""What a run shows of itself: roles and batch arithmetic at its start, then a self-check and distributions."""
