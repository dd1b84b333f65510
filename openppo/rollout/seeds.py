"""Seeds of samples."""

import numpy as np


def sample_seed(seed: int, number: int) -> int:
    """A seed for the ``number``-th sample of a run: the same whatever the ranks and batches it falls into."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
