"""What may and what may not differ between a run and the checkpoint that it resumes from."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import uint8, zeros

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.datasets import TokenExample
from openppo.trainer.resume.compatible import (
    check_compatible,
    examples_fingerprint,
    measured_otherwise,
    model_fingerprint,
)

PATH = Path("ckpt/step_00000004")
ROWS, TEXTS, WEIGHTS = (
    {"--prompt_data": "other rows"},
    {"--pretrain_data": "texts"},
    {"--pretrain": "other weights"},
)


def identity(contents: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    config = from_options(
        TrainPPOConfig, **{"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", **options}
    )
    known = {"--pretrain": "weights", "--prompt_data": "rows"}
    return {"kind": "ppo", "options": flat_dict(config), "contents": known | (contents or {})}


@pytest.mark.parametrize(
    ("contents", "options", "said"),
    [
        (
            {},
            {"lora_rank": 8, "seed": 1, "gamma": 0.5},
            "--lora_rank was 0, is 8; --seed was 42, is 1",
        ),
        ({}, {"target_modules": ("q_proj",)}, "--target_modules was ['all-linear'], is ['q_proj']"),
        ({}, {"ema_beta": 0.992}, "--ema_beta was None, is 0.992"),
        (WEIGHTS, {}, "--pretrain m has other contents"),
        (ROWS, {"prompt_data": "e"}, "--prompt_data was d, is e"),
        ({"--reward_pretrain": "r"}, {"reward_pretrain": "r"}, "--reward_pretrain was None, is r"),
        (TEXTS, {"pretrain_data": "t", "ptx_coef": 0.05}, "--pretrain_data was None, is t"),
        (
            ROWS,
            {"prompt_max_len": 8},
            "--prompt_max_len was 1024, is 8",
        ),  # not the data, which nobody has touched
        (ROWS, {"input_template": "Q: {}"}, "--input_template was None, is Q: {}"),
        (
            ROWS | WEIGHTS,
            {"max_samples": 5},
            "--max_samples was None, is 5; --pretrain m has other contents",
        ),
    ],
)
def test_all_that_contradicts_a_checkpoint_is_named_once(
    contents: Any, options: Any, said: str
) -> None:
    with pytest.raises(
        ValueError, match=f"this run contradicts its checkpoint {PATH}: .*another --ckpt_path"
    ) as error:
        check_compatible(PATH, identity(), identity(contents, **options))
    named = str(error.value).split(f"{PATH}: ")[1].split(". Restore")[0]
    assert "; ".join(sorted(named.split("; "))) == said


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (
            {"micro_train_batch_size": 1, "load_checkpoint": True},
            "--micro_train_batch_size None -> 1",
        ),
        (
            {"gamma": 0.5, "actor_learning_rate": 1e-7},
            "--actor_learning_rate 1e-06 -> 1e-07, --gamma 1.0 -> 0.5",
        ),
        ({"pretrain": "elsewhere/m"}, "--pretrain m -> elsewhere/m"),  # the same weights
        ({"prompt_max_len": 2048}, "--prompt_max_len 1024 -> 2048"),  # the same rows all the same
        (
            {"contents": TEXTS, "ptx_coef": 0.1},
            "--ptx_coef 0.0 -> 0.1",
        ),  # documents that were not read
    ],
)
def test_what_may_differ_is_listed(
    options: Any, changes: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"pretrain_data": "t", "ptx_coef": 0.0}
    with caplog.at_level(logging.INFO, "openppo"):
        check_compatible(PATH, identity(**given), identity(**(given | options)))
    assert (
        ", ".join(sorted(caplog.messages[0].split("in force from now on: ")[1].split(", ")))
        == changes
    )


@pytest.mark.parametrize(("lora_rank", "merge"), [(0, ""), (8, " --merge")])
@pytest.mark.parametrize("difference", [{"contents": ROWS}, {"seed": 1}, {"kind": "sft"}])
def test_a_contradiction_names_pretrain_for_the_weights(
    difference: Any, lora_rank: int, merge: str
) -> None:
    options = {name: value for name, value in difference.items() if name != "kind"}
    now = identity(**options, lora_rank=lora_rank) | {"kind": difference.get("kind", "ppo")}
    path = Path("my runs/step_00000004")
    with pytest.raises(ValueError) as error:
        check_compatible(path, identity(lora_rank=lora_rank), now)
    assert str(error.value).endswith(
        "another --ckpt_path. A new run continues with its weights: "
        f"openppo export 'my runs/step_00000004' FOLDER{merge}, then --pretrain FOLDER."
    )


def test_the_checkpoint_of_another_command_is_refused() -> None:
    with pytest.raises(
        ValueError, match="is a checkpoint of train_ppo, not of train_sft: give another --ckpt_path"
    ):
        check_compatible(PATH, identity(), identity() | {"kind": "sft"})


def test_a_models_fingerprint_is_that_of_its_weights_wherever_one_changes(tmp_path: Path) -> None:
    """As by the merge of a LoRA of some modules: a hundredth of the file."""
    (tmp_path / "m").mkdir()
    whole, found = zeros(24 * 2**20, dtype=uint8), []
    n = len(whole) // 100
    for place in (None, 0.0, 0.1, 0.37, 0.5, 0.83, 1.0):
        changed = whole.clone()
        if place is not None:
            changed[int(place * (len(whole) - n)) :][:n] = 1
        save_file({"weights": changed}, tmp_path / "m" / "model.safetensors")
        found.append(model_fingerprint(str(tmp_path / "m")))
    assert len(set(found)) == 7
    (tmp_path / "m" / "README.md").write_text("moved")
    (tmp_path / "m").rename(tmp_path / "moved")
    assert model_fingerprint(str(tmp_path / "moved")) == found[-1]


def test_a_hub_model_is_known_by_its_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two sessions may find different weights under one name."""
    for missing in ("owner/model", str(tmp_path / "none")):
        assert model_fingerprint(missing) == missing, "left to those who load it"
    cached = (f"/cache/snapshots/{commit}/config.json" for commit in ("3f2a", "9c01"))
    monkeypatch.setattr(
        "openppo.trainer.resume.compatible.try_to_load_from_cache", lambda *_: next(cached)
    )
    assert [model_fingerprint("owner/model") for _ in range(2)] == [
        "owner/model@3f2a",
        "owner/model@9c01",
    ]


def test_fingerprints_of_data_know_their_order_and_contents() -> None:
    one, again, two = (
        TokenExample([1, 2], [is_target, True]) for is_target in (False, False, True)
    )
    assert examples_fingerprint([one, two]) == examples_fingerprint([again, two])
    others = ([one, two], [two, one], [one], [one, one], [[[1, 2], "2"]], [[[1, 2], "3"]])
    assert len(set(map(examples_fingerprint, others))) == len(others)


def test_scores_of_another_evaluation_are_no_match() -> None:
    evaluated = {"eval_data": "e", "keep_best": "eval_reward"}
    saved = json.loads(json.dumps(identity(**evaluated)))
    assert list(measured_otherwise(saved, identity(**evaluated, seed=3))) == []
    other = identity(**evaluated | {"eval_data": "f", "reward_weights": ("a=2",)})
    assert sorted(measured_otherwise(saved, other)) == ["eval_data", "reward_weights"]


def test_scores_of_an_edited_reward_are_no_match() -> None:
    saved, same, edited = (
        identity()
        | {
            "user_files": {
                "hashes": {"--reward_fn": {"f.py": digest}, "--dataset_class": {"d.py": digest}}
            }
        }
        for digest in ("1", "1", "2")
    )
    assert measured_otherwise(saved, same) == []
    assert measured_otherwise(saved, edited) == ["reward_fn"]
