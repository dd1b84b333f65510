"""What may and what may not differ between a run and the checkpoint that it resumes from."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import ones, uint8, zeros

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.datasets import TokenExample
from openppo.trainer.resume.compatible import (
    check_compatible,
    examples_fingerprint,
    measured_otherwise,
    model_fingerprint,
)

PATH = Path("ckpt/step_00000004")


def identity(contents: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    config = from_options(TrainPPOConfig, **{"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", **options})
    known = {"--pretrain": "weights", "--prompt_data": "rows"}
    return {"kind": "ppo", "options": flat_dict(config), "contents": known | (contents or {})}


def refused(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Why ``now`` does not resume from ``then``."""
    with pytest.raises(ValueError, match=f"--load_checkpoint: this run contradicts its checkpoint {PATH}: ") as error:
        check_compatible(PATH, then, now)
    assert "another --ckpt_path" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora_rank": 8, "seed": 1}, ["--lora_rank was 0, is 8", "--seed was 42, is 1"]),
        ({"target_modules": ("q_proj",)}, ["--target_modules was ['all-linear'], is ['q_proj']"]),
        ({"advantage_estimator": "rloo"}, ["--advantage_estimator was gae, is rloo"]),
        ({"ref_pretrain": "r"}, ["--ref_pretrain was None, is r"]),
        ({"enable_ema": True}, ["--enable_ema was False, is True"]),
    ],
)
def test_all_that_contradicts_a_checkpoint_is_named(changed: dict[str, Any], said: list[str]) -> None:
    error = refused(identity(), identity(**changed))
    assert all(part in error for part in said)


def test_harmless_differences_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    now = identity(micro_train_batch_size=1, actor_learning_rate=1e-7, load_checkpoint=True)
    with caplog.at_level(logging.INFO, "openppo"):
        check_compatible(PATH, identity(), now)
    changes = "--micro_train_batch_size 4 -> 1, --actor_learning_rate 1e-06 -> 1e-07"
    assert set(caplog.messages[0].split(": ")[1].split(", ")) == set(changes.split(", "))
    assert "in force from now on" in caplog.text


def test_a_folder_that_has_moved_is_the_same() -> None:
    then = identity()
    check_compatible(PATH, then, identity(pretrain="elsewhere/m"))
    for contents, options, said in (
        ({"--pretrain": "other weights"}, {}, "--pretrain m has other contents"),
        ({"--prompt_data": "other rows"}, {"prompt_data": "e"}, "--prompt_data was d, is e"),
        ({"--reward_pretrain": "reward"}, {"reward_pretrain": "r"}, "--reward_pretrain was None, is r"),
    ):
        assert said in refused(then, identity(contents, **options))
    with pytest.raises(ValueError, match="is a checkpoint of train_ppo, not of train_sft: give another --ckpt_path"):
        check_compatible(PATH, then, then | {"kind": "sft"})


def test_options_that_give_other_rows_of_the_same_data_are_named() -> None:
    """Not the data, which nobody has touched."""
    other, then = {"--prompt_data": "other rows"}, identity()
    said = refused(then, identity(other, apply_chat_template=True, prompt_max_len=8, gamma=0.5))
    assert "--apply_chat_template was False, is True, which gives other rows of --prompt_data" in said
    assert "--prompt_max_len was 1024, is 8, which gives other rows of --prompt_data" in said
    assert "other contents" not in said and "gamma" not in said
    check_compatible(PATH, then, identity(apply_chat_template=True, prompt_max_len=2048))  # the same rows all the same
    assert refused(then, identity(other, max_samples=5)).count("--max_samples") == 1
    said = refused(then, identity(other | {"--pretrain": "other"}, input_template="Q: {}"))
    assert "--pretrain m has other contents; --input_template was None, is Q: {}, which" in said


def test_documents_that_were_not_read_before_may_come_in() -> None:
    with_documents = identity({"--pretrain_data": "texts"}, pretrain_data="t", ptx_coef=0.05)
    check_compatible(PATH, identity(pretrain_data="t", ptx_coef=0.0), with_documents)
    check_compatible(PATH, with_documents, identity(pretrain_data="t", ptx_coef=0.0))
    assert "--pretrain_data was None, is t" in refused(identity(), with_documents)


def test_a_models_fingerprint_is_that_of_its_weights(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("copy", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"w": ones(50_000) * value}, tmp_path / name / "model.safetensors")
    (tmp_path / "copy" / "README.md").write_text("moved")
    prints = {name: model_fingerprint(str(tmp_path / name)) for name in ("a", "copy", "other")}
    assert prints["a"] == prints["copy"] != prints["other"]
    for missing in ("owner/model", str(tmp_path / "none")):
        assert model_fingerprint(missing) == missing, "left to those who load it"


def test_fingerprints_of_data_know_their_order_and_contents() -> None:
    one, again, two = (TokenExample([1, 2], [is_target, True]) for is_target in (False, False, True))
    assert examples_fingerprint([one, two]) == examples_fingerprint([again, two])
    others = ([one, two], [two, one], [one], [one, one], [[[1, 2], "2"]], [[[1, 2], "3"]])
    assert len(set(map(examples_fingerprint, others))) == len(others)


def test_a_hub_model_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions may find different weights under one name."""
    cached = (f"/cache/snapshots/{commit}/config.json" for commit in ("3f2a", "3f2a", "9c01"))
    monkeypatch.setattr("openppo.trainer.resume.compatible.try_to_load_from_cache", lambda *_: next(cached))
    found = [model_fingerprint("owner/model") for _ in range(3)]
    assert found == ["owner/model@3f2a", "owner/model@3f2a", "owner/model@9c01"]


def test_a_matrix_changed_anywhere_makes_another_model(tmp_path: Path) -> None:
    """As by the merge of a LoRA of some modules: a hundredth of the file."""
    whole, found = zeros(24 * 2**20, dtype=uint8), set()
    n = len(whole) // 100
    for place in (None, 0.0, 0.1, 0.37, 0.5, 0.83, 1.0):
        changed = whole.clone()
        if place is not None:
            changed[int(place * (len(whole) - n)) :][:n] = 1
        save_file({"weights": changed}, tmp_path / "model.safetensors")
        found.add(model_fingerprint(str(tmp_path)))
    assert len(found) == 7


def test_scores_of_another_evaluation_are_no_match() -> None:
    then = identity(eval_data="e", keep_best="eval_reward")["options"]
    saved = json.loads(json.dumps(then))
    assert measured_otherwise(saved, identity(eval_data="e", keep_best="eval_reward", seed=3)["options"]) == []
    now = identity(eval_data="harder", keep_best="eval_reward", reward_weights=("a=2", "b=1"))["options"]
    assert set(measured_otherwise(saved, now)) == {"eval_data", "reward_weights"}
