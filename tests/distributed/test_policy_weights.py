"""Weights that are partitioned over two ranks reach an engine whole, with their adapters."""

import json
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).with_name("run_policy_weights.py")


def test_partitioned_weights_are_handed_over_whole_on_every_rank(
    tiny: Path, tmp_path: Path, launch: Callable[..., str]
) -> None:
    launch(2, SCRIPT, tiny / "actor", tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    for case in ("whole", "adapted"):
        assert result[case] == [{"names": True, "different": [], "gathered afterwards": []}] * 2
