"""The state of every random number generator of a process: Python, NumPy, torch, CUDA."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

RandomState = dict[str, Tensor]


def get_random_state() -> RandomState:
    """All generators as flat tensors by name."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = legacy
    state = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: RandomState) -> None:
    """Put all generators where ``get_random_state`` found them."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(
        (
            "MT19937",
            np.array(keys, dtype=np.uint32),
            position,
            has_gauss,
            state["numpy_gauss"].item(),
        )
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
