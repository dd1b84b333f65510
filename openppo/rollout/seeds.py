"""Seeds of samples."""

import numpy as np


def sample_seed(seed: int, number: int) -> int:
    """Seed of the ``number``-th sample of a run, independent of ranks and batches."""
    sequence = np.random.SeedSequence([seed, number])
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)
