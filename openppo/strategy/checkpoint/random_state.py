"""The state of every random number generator of a process: Python, NumPy, torch, CUDA."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

RandomState = dict[str, Tensor]


def get_random_state() -> RandomState:
    """Return the states of all generators as flat tensors by name."""
    state: RandomState = {}

    version, words, gauss = random.getstate()
    state["python"] = torch.tensor([version, *words], dtype=torch.int64)
    state["python_gauss"] = torch.tensor([] if gauss is None else [gauss], dtype=torch.float64)

    legacy: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = legacy
    state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
    state["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)

    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: RandomState) -> None:
    """Restore all generators to a state from ``get_random_state``."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))

    *words, position, has_gauss = state["numpy"].tolist()
    keys = np.array(words, dtype=np.uint32)
    cached = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", keys, position, has_gauss, cached))

    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
