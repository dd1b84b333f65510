"""No command overwrites a model that it reads, and none renames what no run has written."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from openppo.config import (
    MergeLoRAConfig,
    TrainPPOConfig,
    TrainPRMConfig,
    TrainRMConfig,
    TrainSFTConfig,
    from_options,
)
from openppo.config.run import refuse_own_checkpoints
from openppo.tracking import check_run_folder, set_aside_logs, set_aside_model
from openppo.tracking.card_file import write_card

SUPERVISED = {"pretrain": "other", "dataset": "d.jsonl"}
PPO = {
    "pretrain": "other",
    "prompt_data": "p.jsonl",
    "reward_fn": "r.py",
    "rollout_batch_size": 128,
}
READERS: list[tuple[type, str, dict[str, Any]]] = [
    *(
        (command, "pretrain", SUPERVISED)
        for command in (TrainSFTConfig, TrainRMConfig, TrainPRMConfig)
    ),
    *(
        (TrainPPOConfig, f"{model}pretrain", PPO)
        for model in ("", "critic_", "ref_", "reward_", "prm_")
    ),
    *((MergeLoRAConfig, option, {"lora_path": "adapters"}) for option in ("lora_path", "pretrain")),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that holds a model, and a link to it beside it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to("model")
    return tmp_path / "model"


def validate(command: type, **options: Any) -> None:
    from_options(command, **options).validate(1)


@pytest.mark.parametrize(
    ("command", "option", "more"), READERS, ids=lambda value: getattr(value, "__name__", None)
)
def test_an_input_model_as_save_path_is_refused_however_spelled(command, option, more, model):
    given = more | {option: str(model)}
    validate(command, **given, save_path=str(model.with_name("out")))
    link = str(model.with_name("link"))
    for path in (str(model), f"{model}/", os.path.relpath(model), f"{model}/../{model.name}", link):
        with pytest.raises(
            ValueError, match=rf"--save_path .* is --{option} .*overwritten: choose another folder"
        ):
            validate(command, **given, save_path=path)


def test_names_the_saved_critic_and_bases_of_adapters_count_too(model, tmp_path):
    with pytest.raises(ValueError, match="--save_path ./owner/name/ is --pretrain owner/name"):
        validate(
            TrainSFTConfig, **SUPERVISED | {"pretrain": "owner/name"}, save_path="./owner/name/"
        )
    critic = str(model.rename(tmp_path / "run_critic"))
    options = PPO | {"critic_pretrain": critic, "save_path": str(tmp_path / "run")}
    validate(TrainPPOConfig, **options)
    with pytest.raises(ValueError, match="--save_value_network: .*run_critic is --critic_pretrain"):
        validate(TrainPPOConfig, **options, save_value_network=True)
    (adapters := tmp_path / "adapters").mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": critic}))
    with pytest.raises(
        ValueError,
        match="--save_path .*run_critic is the base model of --reward_pretrain .*adapters",
    ):
        validate(TrainPPOConfig, **PPO, reward_pretrain=str(adapters), save_path=critic)


@pytest.mark.parametrize("inside", ["step_00000004/model", "best_step_00000002", "best", "link"])
def test_a_model_in_the_runs_own_checkpoints_is_refused(inside, tmp_path):
    checkpoints = tmp_path / "checkpoints_ppo"
    (checkpoints / "best_step_00000002").mkdir(parents=True)
    (checkpoints / "best").symlink_to("best_step_00000002")
    (checkpoints / "link").symlink_to("best")
    with pytest.raises(
        ValueError, match="--pretrain .* lies in a checkpoint .*choose another --save_path"
    ):
        refuse_own_checkpoints(
            {"--pretrain": str(checkpoints / inside)}, "--save_path", checkpoints
        )
    elsewhere = {
        "--pretrain": str(tmp_path / "a" / inside),
        "--critic_pretrain": None,
        "--prm_pretrain": "owner/name",
    }
    refuse_own_checkpoints(elsewhere, "--save_path", checkpoints)
    refuse_own_checkpoints(
        {"--pretrain": str(checkpoints / "models" / "a")}, "--ckpt_path", checkpoints
    )


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"save_path: {name}\n")


def check(folder: Path) -> None:
    check_run_folder(folder, {"--save_path": str(folder)})


MODEL = (
    "config.json",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
)
OTHERS = (
    "logs/config.yaml",
    "notes.txt",
    "reward.py",
    "run.log",
    "checkpoints_ppo/latest",
    "skipped/a.safetensors",
)


def test_the_model_of_an_earlier_run_is_set_aside_and_nothing_else(tmp_path):
    for number in (1, 2):
        fill(tmp_path, *MODEL, *OTHERS)
        check(tmp_path)
        set_aside_model(tmp_path)
        assert sorted(path.name for path in (tmp_path / f"model.{number}").iterdir()) == sorted(
            MODEL
        )
        assert not any((tmp_path / name).exists() for name in MODEL)
        assert all((tmp_path / name).read_text() == f"save_path: {name}\n" for name in OTHERS)
    set_aside_model(tmp_path)
    assert not (tmp_path / "model.3").exists()


def test_a_model_is_set_aside_with_our_card_and_not_with_one_of_a_person(tmp_path):
    fill(tmp_path, *MODEL)
    write_card(tmp_path, {"library_name": "transformers"}, "# A model\n")
    card = (tmp_path / "README.md").read_text()
    set_aside_model(tmp_path)
    assert (tmp_path / "model.1" / "README.md").read_text() == card
    fill(tmp_path, *MODEL, "README.md")
    set_aside_model(tmp_path)
    assert (tmp_path / "README.md").exists()
    assert not (tmp_path / "model.2" / "README.md").exists()


def test_a_model_that_no_run_has_written_is_refused_as_the_critics_too(tmp_path):
    folder, critic = tmp_path / "run", tmp_path / "run_critic"
    fill(critic, *MODEL)
    with pytest.raises(
        ValueError, match="holds a model that no run has written there .*: choose another folder"
    ):
        check(critic)
    folders = {"--save_path": str(folder), "--save_value_network: the critic's folder": str(critic)}
    with pytest.raises(
        ValueError, match="the critic's folder .*run_critic holds a model that no run has written"
    ):
        check_run_folder(folder, folders)
    fill(folder, "logs/config.yaml")  # of the run that wrote it
    check_run_folder(folder, folders)


def test_logs_that_are_no_runs_are_never_renamed(tmp_path):
    check(tmp_path / "nowhere")
    (tmp_path / "logs").mkdir()
    check(tmp_path)  # empty
    for name, text in (("slurm-12.out", ""), ("config.yaml", "of: another program\n")):
        (tmp_path / "logs" / name).write_text(text)
        set_aside_logs(tmp_path / "logs")
        assert (tmp_path / "logs" / name).exists()
        with pytest.raises(
            ValueError, match="'logs' in it is not of a run: rename it, or choose another folder"
        ):
            check(tmp_path)
    fill(tmp_path, "logs/config.yaml")
    check(tmp_path)
