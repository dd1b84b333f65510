"""Gradients in a fixed order: what is switched on, and what is as before afterwards."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils import deterministic

from openppo.strategy.determinism import fixed_order


def settings():
    on, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    return on, warns, deterministic.fill_uninitialized_memory


def test_algorithms_are_an_error_inside_and_as_before_outside():
    before = settings()
    with pytest.raises(KeyError), fixed_order():
        assert settings() == (True, False, False), "a warning would leave FlashAttention as it is"
        raise KeyError
    assert settings() == before


STARTS = """
import os
from openppo.config import DeepSpeedConfig
from openppo.strategy import get_strategy
get_strategy(DeepSpeedConfig(deterministic={on}))
print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("FLASH_ATTENTION_DETERMINISTIC"))
"""


@pytest.mark.parametrize(("on", "expected"), [(True, ":4096:8 1"), (False, "None None")])
def test_libraries_read_it_before_anything_is_on_a_gpu(on, expected):
    left_out = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    command = [sys.executable, "-c", STARTS.format(on=on)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == expected
