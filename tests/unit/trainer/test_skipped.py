"""Optimizer steps that are not taken: counted by role, kept, bounded."""

import logging
import math

import pytest
import torch
from safetensors.torch import load_file

from openppo.config import RunConfig
from openppo.trainer.update import SkippedSteps
from openppo.types import SingleProcess


def skipped_steps(folder):
    return SkippedSteps(RunConfig(save_path=str(folder), max_skipped_steps=3), SingleProcess())


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_counted_and_its_batch_kept_if_it_can_be(tmp_path, norm, caplog):
    skipped, batch = skipped_steps(tmp_path), [{"sequences": torch.tensor([[1, 2, 3]])}]
    with caplog.at_level(logging.WARNING, "openppo"):
        assert skipped.accept(1.0, "actor", "global step 1", samples=batch)
        assert not skipped.accept(norm, "actor", "global step 2", samples=batch)
    (file,) = (tmp_path / "skipped").iterdir()
    assert file.name == "global_step_2_actor_rank0.safetensors"
    assert load_file(file)["samples/0/sequences"].tolist() == [[1, 2, 3]]
    assert "the gradient of the actor was not finite in global step 2" in caplog.text
    assert skipped.total == 1
    assert not skipped_steps(file).accept(norm, "actor", "step 1"), "no folder, and yet no end"
    assert "cannot be written" in caplog.text


def test_only_steps_in_a_row_of_one_role_end_the_run(tmp_path):
    skipped, again = skipped_steps(tmp_path), skipped_steps(tmp_path)
    for step in range(10):  # the actor always fails every second time, the critic never
        skipped.accept(math.nan if step % 2 else 1.0, "actor", f"step {step}")
        skipped.accept(1.0, "critic", f"step {step}")
    assert skipped.total == 5
    again.load_state_dict(skipped.state_dict())  # one in a row so far
    again.accept(math.nan, "actor", "step 10")
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row were skipped"):
        again.accept(math.nan, "actor", "step 11")
