"""A real pretrained model, a Python reward, real openings: the stories get happier and stay English.

The README's command with half its steps, so a smaller rise is asked for.
"""

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.slow
def test_stories_get_happier_and_stay_likely_under_the_untouched_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assets: Path
) -> None:
    model = str(assets / "models" / "stories260K")
    monkeypatch.syspath_prepend(str(REPO / "examples"))
    import stories

    command = ["bash", str(REPO / "examples/scripts/stories.sh"), "--num_episodes", "6"]
    environment = os.environ | {"MODEL": model, "SAVE_PATH": str(tmp_path / "happy"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "mean sentiment" in done.stdout

    heldout = tmp_path / "happy" / "data" / "heldout.jsonl"
    before = stories.evaluate(model, model, heldout, new_tokens=96, seed=0)
    after = stories.evaluate(str(tmp_path / "happy"), model, heldout, new_tokens=96, seed=0)
    assert 0.35 < before["sentiment"] < 0.6
    assert after["sentiment"] - before["sentiment"] > 0.15
    assert abs(after["base_log_prob"] - before["base_log_prob"]) < 0.5
