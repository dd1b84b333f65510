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
    prompts_fingerprint,
)
from openppo.types import Prompt

PATH = Path("ckpt/step_00000004")


def identity(contents: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    config = from_options(TrainPPOConfig, **{"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", **options})
    known = {"--pretrain": "weights", "--prompt_data": "rows"}
    return {"options": flat_dict(config), "contents": known | (contents or {})}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora_rank": 8}, "--lora_rank was 0, is 8"),
        ({"lora_alpha": 32}, "--lora_alpha was 16, is 32"),
        ({"target_modules": ("q_proj",)}, "--target_modules was ['all-linear'], is ['q_proj']"),
        ({"advantage_estimator": "rloo"}, "--advantage_estimator was gae, is rloo"),
        ({"seed": 1}, "--seed was 42, is 1"),
        ({"ref_pretrain": "r"}, "--ref_pretrain was None, is r"),
        ({"rollout_batch_size": 64}, "--rollout_batch_size was 512, is 64"),
        ({"enable_ema": True}, "--enable_ema was False, is True"),
        ({"prompt_data_probs": "1"}, "--prompt_data_probs was None, is 1"),
    ],
)
def test_what_contradicts_a_checkpoint_is_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="--load_checkpoint: this run contradicts its checkpoint") as error:
        check_compatible(PATH, identity(), identity(**changed))
    assert said in str(error.value)
    assert str(PATH) in str(error.value)
    assert "another --ckpt_path" in str(error.value)


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="--lora_rank was 0, is 8; --seed was 42, is 1|--seed .*; --lora_rank"):
        check_compatible(PATH, identity(), identity(lora_rank=8, seed=1))


def test_harmless_differences_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "openppo"):
        check_compatible(
            PATH, identity(), identity(micro_train_batch_size=1, actor_learning_rate=1e-7, load_checkpoint=True)
        )
    assert "in force from now on" in caplog.text
    assert "--micro_train_batch_size 4 -> 1" in caplog.text
    assert "--actor_learning_rate 1e-06 -> 1e-07" in caplog.text
    assert "--load_checkpoint" not in caplog.text


def test_a_folder_that_has_moved_is_the_same_and_another_under_its_name_is_not() -> None:
    check_compatible(PATH, identity(), identity(pretrain="elsewhere/m"))
    with pytest.raises(ValueError, match="--pretrain m has other contents"):
        check_compatible(PATH, identity(), identity({"--pretrain": "other weights"}))
    with pytest.raises(ValueError, match="--prompt_data was d, is e"):
        check_compatible(PATH, identity(), identity({"--prompt_data": "other rows"}, prompt_data="e"))
    with pytest.raises(ValueError, match="--reward_pretrain was None, is r"):
        check_compatible(PATH, identity(), identity({"--reward_pretrain": "reward"}, reward_pretrain="r"))


def test_options_that_give_other_rows_of_the_same_data_are_named() -> None:
    """Not the data, which nobody has touched."""
    other, same = {"--prompt_data": "other rows"}, identity()
    with pytest.raises(ValueError, match="contradicts") as error:
        check_compatible(PATH, same, identity(other, apply_chat_template=True, prompt_max_len=8, gamma=0.5))
    assert "--apply_chat_template was False, is True, which gives other rows of --prompt_data" in str(error.value)
    assert "--prompt_max_len was 1024, is 8, which gives other rows of --prompt_data" in str(error.value)
    assert "other contents" not in str(error.value)
    assert "gamma" not in str(error.value)
    check_compatible(PATH, same, identity(apply_chat_template=True, prompt_max_len=2048))  # the same rows all the same
    with pytest.raises(ValueError, match="--chat_template_kwargs was None, is {}, which gives other rows"):
        check_compatible(PATH, same, identity(other, chat_template_kwargs="{}"))
    with pytest.raises(ValueError, match="contradicts") as error:
        check_compatible(PATH, same, identity(other, max_samples=5))
    assert str(error.value).count("--max_samples") == 1
    with pytest.raises(ValueError, match="--pretrain m has other contents; --input_template was None, is Q: {}, which"):
        check_compatible(PATH, same, identity(other | {"--pretrain": "other"}, input_template="Q: {}"))


def test_documents_that_were_not_read_before_may_come_in() -> None:
    with_documents = identity({"--pretrain_data": "texts"}, pretrain_data="t", ptx_coef=0.05)
    check_compatible(PATH, identity(pretrain_data="t", ptx_coef=0.0), with_documents)
    check_compatible(PATH, with_documents, identity(pretrain_data="t", ptx_coef=0.0))
    with pytest.raises(ValueError, match="--pretrain_data was None, is t"):
        check_compatible(PATH, identity(), with_documents)


def test_a_models_fingerprint_is_that_of_its_weights(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("copy", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"w": ones(50_000) * value}, tmp_path / name / "model.safetensors")
    (tmp_path / "copy" / "README.md").write_text("moved")
    prints = {name: model_fingerprint(str(tmp_path / name)) for name in ("a", "copy", "other")}
    assert prints["a"] == prints["copy"] != prints["other"]
    assert model_fingerprint("owner/model") == "owner/model"


def test_fingerprints_of_data_know_their_order_and_labels() -> None:
    prompts = [Prompt("a", [1, 2], label=1), Prompt("b", [3], label=2)]
    relabelled = [Prompt("a", [1, 2], label=2), Prompt("b", [3], label=2)]
    made = {prompts_fingerprint(rows) for rows in (prompts, prompts[::-1], relabelled, prompts[:1])}
    assert len(made) == 4
    one, two = TokenExample([1, 2], [False, True]), TokenExample([1, 2], [True, True])
    assert examples_fingerprint([one]) == examples_fingerprint([TokenExample([1, 2], [False, True])])
    assert examples_fingerprint([one]) != examples_fingerprint([two])


def test_a_hub_model_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions may find different weights under one name."""
    commits = iter(["3f2a", "3f2a", "9c01"])
    monkeypatch.setattr(
        "openppo.trainer.resume.compatible.try_to_load_from_cache",
        lambda name, file: f"/cache/models--{name.replace('/', '--')}/snapshots/{next(commits)}/{file}",
    )
    first, again, later = (model_fingerprint("owner/model") for _ in range(3))
    assert first == again == "owner/model@3f2a"
    assert later == "owner/model@9c01"


def test_a_folder_that_is_not_there_is_left_to_those_who_load_it(tmp_path: Path) -> None:
    assert model_fingerprint(str(tmp_path / "none")) == str(tmp_path / "none")


@pytest.mark.parametrize("place", [0.0, 0.1, 0.37, 0.5, 0.83, 1.0])
def test_a_matrix_that_was_changed_anywhere_in_large_weights_is_another_model(tmp_path: Path, place: float) -> None:
    """As by the merge of a LoRA of some modules: a hundredth of the file."""
    whole = zeros(24 * 2**20, dtype=uint8)
    start = int(place * (len(whole) - len(whole) // 100))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({"weights": whole}, tmp_path / name / "model.safetensors")
        whole[start : start + len(whole) // 100] = 1
    assert model_fingerprint(str(tmp_path / "a")) != model_fingerprint(str(tmp_path / "b"))


def test_scores_of_another_evaluation_are_no_match() -> None:
    then = identity(eval_data="e", keep_best="eval_reward")["options"]
    saved = json.loads(json.dumps(then))
    assert measured_otherwise(saved, identity(eval_data="e", keep_best="eval_reward", seed=3)["options"]) == []
    now = identity(eval_data="harder", keep_best="eval_reward", reward_weights=("a=2", "b=1"))["options"]
    assert set(measured_otherwise(saved, now)) == {"eval_data", "reward_weights"}
