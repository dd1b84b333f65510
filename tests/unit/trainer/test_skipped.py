"""Optimizer steps that are not taken: counted by role, kept, bounded."""

import logging
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openppo.config import RunConfig
from openppo.trainer.update import SkippedSteps
from openppo.types import SingleProcess

BATCH = {"0/sequences": torch.tensor([[1, 2, 3]])}


def skipped_steps(folder: Path, bound: int = 3) -> SkippedSteps:
    return SkippedSteps(RunConfig(save_path=str(folder), max_skipped_steps=bound), SingleProcess())


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_counted_and_its_batch_kept(
    tmp_path: Path, norm: float, caplog: pytest.LogCaptureFixture
) -> None:
    skipped = skipped_steps(tmp_path)
    with caplog.at_level(logging.WARNING, "openppo"):
        assert skipped.accept(1.0, "actor", "global step 1", BATCH)
        assert not skipped.accept(norm, "actor", "global step 2", BATCH)
    (file,) = (tmp_path / "skipped").iterdir()
    assert file.name == "global_step_2_actor_rank0.safetensors"
    assert load_file(file)["0/sequences"].tolist() == [[1, 2, 3]]
    assert "the gradient of the actor was not finite in global step 2" in caplog.text
    assert skipped.total == 1


def test_only_steps_in_a_row_of_one_role_end_the_run(tmp_path: Path) -> None:
    skipped = skipped_steps(tmp_path)
    for step in range(10):  # the actor always fails every second time, the critic never
        skipped.accept(math.nan if step % 2 else 1.0, "actor", f"step {step}", {})
        skipped.accept(1.0, "critic", f"step {step}", {})
    assert skipped.total == 5
    again = skipped_steps(tmp_path)
    again.load_state_dict(skipped.state_dict())  # one in a row so far
    again.accept(math.nan, "actor", "step 10", {})
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row were skipped"):
        again.accept(math.nan, "actor", "step 11", {})


def test_a_batch_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "skipped").write_text("a file")
    assert not skipped_steps(tmp_path).accept(math.nan, "actor", "step 1", BATCH)
    assert "cannot be written" in caplog.text
