"""A small LLaVA learns to say what it sees, and is at chance with pictures of other rows."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "scripts" / "vision.sh"


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
@pytest.mark.parametrize("estimator", ["gae", "group_norm"])
def test_a_model_learns_to_count_squares_that_it_sees(
    tmp_path: Path, estimator: str, seed: str
) -> None:
    given = os.environ | {"SEED": seed, "SAVE_PATH": str(tmp_path)}
    command = ["bash", str(SCRIPT), "--advantage_estimator", estimator]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    lines = [
        json.loads(line)
        for line in (tmp_path / "trained/logs/metrics.jsonl").read_text().splitlines()
    ]
    right = [line["eval_pass@1"] for line in lines if "eval_pass@1" in line]
    print(f"{estimator} {seed}: {right}")
    assert right[0] < 0.85
    assert right[-1] >= 0.9
    heldout, shuffled = map(
        float, re.findall(r"^pass@1 +([\d.]+)", done.stdout, flags=re.MULTILINE)
    )
    assert heldout == pytest.approx(right[-1], abs=0.01)
    assert shuffled < 0.2  # 1 of 9 by chance
