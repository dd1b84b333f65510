"""The commands as users run them: on two ranks, or without torchrun. The first one is started by a real torchrun."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

Launch = Callable[..., str]
PACKAGE = Path(__file__).resolve().parents[2] / "openppo"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
PPO_METRICS = """
    reward reward_std kl kl_k3 policy_loss value_loss ptx_loss clip_fraction ratio_max explained_variance entropy
    advantages response_length truncated_fraction actor_grad_norm critic_grad_norm actor_learning_rate
    critic_learning_rate time/step_s
    time/generation_s time/scoring_s time/experience_s time/training_s
    speed/generation_tokens_per_s speed/scoring_tokens_per_s speed/experience_tokens_per_s speed/training_tokens_per_s
""".split()


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(("time/", "speed/"))} for line in lines]


def command(name: str, arguments: str) -> list[str]:
    return ["-m", f"openppo.cli.{name}", *arguments.split()]


@pytest.fixture(scope="module")
def sft_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """A model fine-tuned on two ranks."""
    folder = tmp_path_factory.mktemp("sft")
    arguments = f"""--pretrain {tiny}/actor --dataset {tiny}/sft.jsonl --eval_dataset {tiny}/sft.jsonl
        --max_epochs 3 --train_batch_size 10 --micro_train_batch_size 2 --learning_rate 1e-2
        --zero_stage 3 --gradient_checkpointing --save_path {folder}/model --use_tensorboard {folder}/events"""
    launch(2, *command("train_sft", arguments), real=True)
    return folder


@pytest.fixture(scope="module")
def rm_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """A reward model trained on two ranks, from a model without a scalar head."""
    folder = tmp_path_factory.mktemp("rm")
    arguments = f"""--pretrain {tiny}/actor --dataset {tiny}/preference.jsonl --eval_dataset {tiny}/preference.jsonl
        --prompt_key prompt --margin_key margin --max_epochs 8 --train_batch_size 10 --micro_train_batch_size 2
        --learning_rate 1e-2 --zero_stage 2 --save_path {folder}/model"""
    launch(2, *command("train_rm", arguments))
    return folder


@pytest.fixture(scope="module")
def ppo_run(tiny: Path, rm_run: Path, tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """PPO against that reward model on two ranks, with everything that is logged and saved."""
    folder = tmp_path_factory.mktemp("ppo")
    arguments = f"""--pretrain {tiny}/actor --reward_pretrain {rm_run}/model --prompt_data {tiny}/prompts.jsonl
        --pretrain_data {tiny}/documents.jsonl --num_episodes 1 --rollout_batch_size 8 --train_batch_size 4
        --micro_train_batch_size 2 --micro_rollout_batch_size 3 --max_epochs 2 --generate_max_len 8
        --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --temperature 0.9 --value_clip None
        --reward_clip_range -5 5 --zero_stage 3 --seed 5 --save_value_network --save_path {folder}/model
        --use_tensorboard {folder}/events"""
    launch(2, *command("train_ppo", arguments))
    return folder


@pytest.mark.parametrize("run", ("sft_run", "rm_run", "ppo_run"))
def test_a_command_leaves_a_model_its_tokenizer_and_its_options(run: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(run) / "model"
    assert [name for name in MODEL_FILES if not (folder / name).is_file()] == []
    assert AutoTokenizer.from_pretrained(folder).decode([3, 4, 5]) == "abc"
    assert yaml.safe_load((folder / "logs" / "config.yaml").read_text())["save_path"] == str(folder)


def test_train_sft_lowers_the_loss(sft_run: Path, tiny: Path) -> None:
    lines = logged(sft_run / "model")
    assert [line["step"] for line in lines] == list(range(1, 10))  # 26 rows: steps of 10, 10 and 6, three times
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["speed/step_tokens_per_s"] > 0
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 9]
    model = AutoModelForCausalLM.from_pretrained(sft_run / "model")
    tokenizer = AutoTokenizer.from_pretrained(sft_run / "model")
    total, n_targets = 0.0, 0
    for row in map(json.loads, (tiny / "sft.jsonl").read_text().splitlines()):
        ids = tokenizer.convert_tokens_to_ids([*row["input"], *row["output"], tokenizer.eos_token])
        labels = torch.tensor([[-100] * len(row["input"]) + ids[len(row["input"]) :]])
        n = len(row["output"]) + 1
        with torch.no_grad():
            total += model(torch.tensor([ids]), labels=labels).loss.item() * n
        n_targets += n
    assert lines[-1]["eval_loss"] == pytest.approx(total / n_targets, rel=1e-4)  # the saved model is the trained one


def test_train_rm_learns_and_its_folder_is_a_plain_classifier(rm_run: Path, tiny: Path) -> None:
    last = logged(rm_run / "model")[-1]
    model = AutoModelForSequenceClassification.from_pretrained(rm_run / "model")
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(rm_run / "model")
    pairs = [json.loads(line) for line in (tiny / "preference.jsonl").read_text().splitlines()]
    with torch.no_grad():
        chosen, rejected = (
            model(**tokenizer([p["prompt"] + p[side] + "<eos>" for p in pairs], padding=True, return_tensors="pt"))
            for side in ("chosen", "rejected")
        )
    accuracy = (chosen.logits > rejected.logits).float().mean().item()
    assert last["eval_accuracy"] == pytest.approx(accuracy)
    assert last["eval_chosen_reward"] == pytest.approx(chosen.logits.mean().item(), abs=1e-4)
    assert accuracy > 0.8
    scores = torch.cat([chosen.logits, rejected.logits])
    assert model.config.mean == pytest.approx(scores.mean().item(), rel=1e-4)
    assert model.config.std == pytest.approx(scores.std().item(), rel=1e-4)


def test_train_rm_takes_the_log_exp_loss(tiny: Path, tmp_path: Path, launch: Launch) -> None:
    arguments = f"""--pretrain {tiny}/reward --dataset {tiny}/preference.jsonl --prompt_key prompt --loss logexp
        --max_epochs 1 --train_batch_size 26 --learning_rate 0 --zero_stage 1 --save_path {tmp_path}/model"""
    launch(2, *command("train_rm", arguments))
    (line,) = logged(tmp_path / "model")
    gap = line["chosen_reward"] - line["rejected_reward"]
    assert line["loss"] >= math.log1p(math.exp(-gap))  # convex in the gap of each pair
    assert math.isfinite(line["loss"])
    assert (
        load_file(tmp_path / "model" / "model.safetensors").keys()
        == load_file(tiny / "reward" / "model.safetensors").keys()
    )


def test_train_ppo_logs_every_metric_at_every_step(ppo_run: Path) -> None:
    lines = logged(ppo_run / "model")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert [name for name in PPO_METRICS if name not in line] == []
        assert [name for name, value in line.items() if value is None or not math.isfinite(value)] == []
    samples = [json.loads(line) for line in (ppo_run / "model" / "logs" / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    assert all({"prompt", "response", "finish_reason", "reward"} <= sample.keys() for sample in samples)


def test_train_ppo_writes_the_same_curves_for_tensorboard(ppo_run: Path) -> None:
    events = EventAccumulator(str(ppo_run / "events" / "model"))
    events.Reload()
    for name in PPO_METRICS:
        curve = [(event.step, event.value) for event in events.Scalars(name)]
        assert curve == [(line["step"], pytest.approx(line[name], rel=1e-5)) for line in logged(ppo_run / "model")]


def test_train_ppo_saves_policy_and_critic(ppo_run: Path, tiny: Path) -> None:
    for folder, load, start in (
        ("model", AutoModelForCausalLM, tiny / "actor"),
        ("model_critic", AutoModelForSequenceClassification, tiny / "reward"),
    ):
        _, report = load.from_pretrained(ppo_run / folder, output_loading_info=True)
        assert not any(report.values()), report
        trained, before = (load_file(path / "model.safetensors") for path in (ppo_run / folder, start))
        assert trained.keys() == before.keys()
        assert all(trained[name].shape == before[name].shape for name in trained)
        assert all(not torch.equal(trained[name], before[name]) for name in trained)


def test_the_saved_options_repeat_the_run_exactly(ppo_run: Path, tmp_path: Path, launch: Launch) -> None:
    saved = ppo_run / "model" / "logs" / "config.yaml"
    again = f"--config {saved} --save_path {tmp_path}/again --use_tensorboard {tmp_path}/events"
    launch(2, *command("train_ppo", again))
    first, second = (yaml.safe_load(path.read_text()) for path in (saved, tmp_path / "again" / "logs" / "config.yaml"))
    elsewhere = {"save_path": f"{tmp_path}/again", "use_tensorboard": f"{tmp_path}/events"}
    assert second == first | elsewhere
    assert without_times(logged(tmp_path / "again")) == without_times(logged(ppo_run / "model"))
    for name in ("model", "model_critic"):
        twin = tmp_path / name.replace("model", "again")
        weights, repeated = (load_file(path / "model.safetensors") for path in (ppo_run / name, twin))
        assert all(torch.equal(weights[key], repeated[key]) for key in weights)


REWARD_FILE = """
import json
from pathlib import Path

def count_a(prompts, responses, labels):
    rows = [json.dumps(row) for row in zip(prompts, responses, labels)]
    Path("calls.jsonl").open("a").write("".join(row + "\\n" for row in rows))
    return [response.count("a") for response in responses]
"""


def test_train_ppo_works_without_torchrun_and_with_a_python_reward(tiny: Path, tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "reward.py").write_text(REWARD_FILE)
    arguments = f"""--pretrain {tiny}/actor --reward_fn reward.py:count_a --prompt_data {tiny}/prompts.jsonl
        --label_key label --input_template x{{}}y --rollout_batch_size 12 --train_batch_size 12 --generate_max_len 8
        --init_kl_coef 0 --n_samples_per_prompt 2 --save_path model"""
    launch(0, *command("train_ppo", arguments), cwd=tmp_path)
    lines = logged(tmp_path / "model")
    assert len(lines) == 2
    assert "kl" not in lines[0]  # no reference model, no penalty
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    prompts = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text().splitlines()]
    assert sorted(label for _, _, label in calls) == sorted(2 * list(range(24)))
    assert all(prompt == f"x{prompts[label]['input']}y" for prompt, _, label in calls)
    assert not any("<" in response for _, response, _ in calls)
    mean = sum(response.count("a") for _, response, _ in calls[:24]) / 24
    assert lines[0]["reward"] == pytest.approx(mean)


def test_a_mistake_of_the_user_ends_all_ranks_with_one_line(tiny: Path, tmp_path: Path, launch: Launch) -> None:
    arguments = f"""--pretrain {tiny}/actor --reward_pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl
        --generate_max_len 8"""
    output = launch(2, *command("train_ppo", arguments), cwd=tmp_path, status=1)
    (line,) = (line for line in output.splitlines() if "no scalar head" in line)
    assert line.startswith(f"error: --reward_pretrain {tiny}/actor has no scalar head")
    assert f'File "{PACKAGE}/' not in output  # torchrun prints a traceback of its own
