"""The memory estimate against memory measured in real processes, as its benchmark does it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_estimate.py"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measuring peaks needs Linux's /proc")
@pytest.mark.parametrize("case", ["float32, ZeRO-2, 1 ranks", "bf16, ZeRO-3, 2 ranks"])
def test_estimated_memory_is_within_20_percent_of_measured(case: str, launch: Callable[..., str]) -> None:
    (row,) = re.findall(r"^\| .*ZeRO.*$", launch(0, BENCHMARK, "--only", case), flags=re.MULTILINE)
    _, *others = [(float(a), float(b)) for a, b in re.findall(r"(\d+) / (\d+)", row)]
    assert len(others) == 4, "generation, experience, training, and their peak"
    assert others[3][1] > 100, "the model and its batch take that many MiB, else this measures noise"
    for estimated, measured in others:
        assert estimated == pytest.approx(measured, rel=0.2), row
