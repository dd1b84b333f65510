"""The commands as users run them: on two ranks, or without torchrun; and what their small options promise."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.runs import OPTIONS, logged, rows, vector

Launch = Callable[..., str]
PPO_METRICS = """
    reward reward_std kl kl_k3 policy_loss value_loss ptx_loss clip_fraction ratio_max explained_variance entropy
    advantages response_length truncated_fraction actor_grad_norm critic_grad_norm actor_learning_rate
    critic_learning_rate time/step_s
    time/generation_s time/scoring_s time/experience_s time/training_s
    speed/generation_tokens_per_s speed/scoring_tokens_per_s speed/experience_tokens_per_s speed/training_tokens_per_s
""".split()
SMALL = """-m openppo.cli.train_ppo --pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --generate_max_len 8
    --save_path model --rollout_batch_size 8 --train_batch_size 4 --micro_train_batch_size 2
    --actor_learning_rate 1e-3"""


def command(tiny: Path, flags: str) -> list[str]:
    return f"{SMALL} {flags}".replace("{tiny}", str(tiny)).split()


@pytest.fixture(scope="module")
def ppo_run(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    """PPO with everything that is logged and saved."""
    folder = tmp_path_factory.mktemp("ppo")
    flags = """--reward_pretrain {tiny}/reward --pretrain_data {tiny}/documents.jsonl --micro_rollout_batch_size 3
        --max_epochs 2 --critic_learning_rate 1e-3 --temperature 0.9 --value_clip None --reward_clip_range -5 5
        --zero_stage 3 --seed 5 --save_value_network --use_tensorboard events --dump_rollouts rollouts
        --eval_data {tiny}/sft.jsonl"""
    launch(2, *command(tiny, flags), cwd=folder)
    return folder


def test_train_ppo_logs_every_metric_at_every_step_also_for_tensorboard(ppo_run):
    lines = rows(ppo_run / "model/logs/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert [name for name in PPO_METRICS if name not in line] == []
        assert [
            name for name, value in line.items() if value is None or not math.isfinite(value)
        ] == []
    events = EventAccumulator(str(ppo_run / "events" / "model"))
    events.Reload()
    for name in PPO_METRICS:
        curve = [(event.step, event.value) for event in events.Scalars(name)]
        assert curve == [(line["step"], pytest.approx(line[name], rel=1e-5)) for line in lines]
    samples = logged(ppo_run / "model", "samples")
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    assert all(
        {"prompt", "response", "finish_reason", "reward"} <= sample.keys() for sample in samples
    )


def test_the_saved_options_repeat_the_run_exactly(ppo_run, launch):
    again = "-m openppo.cli.train_ppo --config model/logs/config.yaml --save_path again --use_tensorboard others"
    again += " --dump_rollouts dumped"
    launch(2, *again.split(), cwd=ppo_run)
    first, second = (
        yaml.safe_load((ppo_run / f"{run}/logs/config.yaml").read_text())
        for run in ("model", "again")
    )
    assert second == first | {
        "save_path": "again",
        "use_tensorboard": "others",
        "dump_rollouts": "dumped",
    }
    assert logged(ppo_run / "again") == logged(ppo_run / "model")
    for suffix in ("", "_critic"):
        assert vector(ppo_run / f"again{suffix}").equal(vector(ppo_run / f"model{suffix}"))


def test_every_sample_is_dumped_once(ppo_run):
    metrics, dumped = rows(ppo_run / "model/logs/metrics.jsonl"), ppo_run / "rollouts"
    assert {file.name for file in dumped.iterdir()} == {
        f"{split}-rank0000{rank}-00000.jsonl" for split in ("train", "eval") for rank in (0, 1)
    }
    for split, name, size in (("train", "reward", 8), ("eval", "eval_reward", 26)):
        for line in [line for line in metrics if name in line]:
            found = [
                row
                for file in dumped.glob(f"{split}-*")
                for row in rows(file)
                if row["step"] == line["step"]
            ]
            rewards = [row["reward"] for row in found]
            assert len(found) == size and {row["split"] for row in found} == {split}
            assert (sum(rewards) / size, max(rewards)) == pytest.approx(
                (line[name], line[f"{name}_max"]), rel=1e-6
            )
    first = [
        row for file in sorted(dumped.glob("train-*")) for row in rows(file) if row["step"] == 1
    ]
    assert [row["group"] for row in first] == list(range(8)), "in the order of the ranks"
    assert {(row["source"].rpartition("/")[2], int(row["label"]) < 24) for row in first} == {
        ("prompts.jsonl", True)
    }
    shown = [
        row
        for row in rows(ppo_run / "model/logs/samples.jsonl")
        if row["step"] == 1 and "evaluation" not in row
    ]
    of_dump = [(row["prompt"], row["response"], row["reward"]) for row in first]
    assert {(row["prompt"], row["response"], row["reward"]) for row in shown} <= {*of_dump}


def test_actor_and_critic_have_a_card_of_the_run(ppo_run, tiny):
    last = rows(ppo_run / "model/logs/metrics.jsonl")[-1]
    sha256 = hashlib.sha256((tiny / "prompts.jsonl").read_bytes()).hexdigest()
    common = [
        "library_name: transformers",
        "torchrun --standalone --nproc_per_node 2 -m openppo train_ppo --pretrain actor",
        f"Saved after 3 global steps on {last['consumed_samples']:.0f} samples, on 2 x CPU",
        f"| `--prompt_data` | `prompts.jsonl` | 24 | `{sha256}` |",
        f"| `eval_reward` | {last['eval_reward']:.4g} ± {last['eval_reward_ci95']:.2g} |",
    ]
    for folder, title in (("model", "# actor, trained by PPO"), ("model_critic", "# Critic of")):
        card = (ppo_run / folder / "README.md").read_text()
        assert [part for part in [*common, title] if part not in card] == []
        assert str(tiny) not in card and str(ppo_run) not in card


def contents(*folders: Path) -> dict[Path, bytes]:
    """All files but the lock of checkpoints, which each session takes."""
    files = (
        file
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file() and file.name != ".lock"
    )
    return {file: file.read_bytes() for file in files}


def test_a_checkpoint_or_a_folder_is_evaluated_alone(ppo_run, launch):
    before = contents(ppo_run / "model", ppo_run / "rollouts", ppo_run / "model_critic")
    trained, evaluated = rows(ppo_run / "model/logs/metrics.jsonl")[-1], ppo_run / "model_val_only"
    for flags in ("--load_checkpoint", "--pretrain model"):
        command = f"-m openppo.cli.train_ppo --config model/logs/config.yaml --val_only {flags}"
        printed = launch(2, *command.split(), cwd=ppo_run)
        (line,) = rows(evaluated / "logs/metrics.jsonl")
        assert line["step"] == (3 if "load" in flags else 0)
        found = {name: value for name, value in trained.items() if name.startswith("eval_")}
        assert {name: line[name] for name in found} == found, "as the run evaluated it at its end"
        assert re.search(rf"^reward +{found['eval_reward']:.4f}$", printed, re.MULTILINE)
        assert {file.name for file in evaluated.iterdir()} <= {"logs", "logs.1"}, (
            "no model, no checkpoint"
        )
        assert len(rows(ppo_run / "rollouts_val_only/eval-rank00001-00000.jsonl")) == 13
    assert contents(ppo_run / "model", ppo_run / "rollouts", ppo_run / "model_critic") == before
    command = f"{command} --ckpt_path nowhere --load_checkpoint"
    assert "error: --val_only: no checkpoint in" in launch(
        0, *command.split(), cwd=ppo_run, status=2
    )


REWARD_FILE = """
import json
from pathlib import Path

def count_a(prompts, responses, labels):
    rows = [json.dumps(row) for row in zip(prompts, responses, labels)]
    Path("calls.jsonl").open("a").write("".join(row + "\\n" for row in rows))
    return [response.count("a") for response in responses]
"""


def test_train_ppo_works_without_torchrun_and_with_a_python_reward(tiny, tmp_path, launch):
    (tmp_path / "reward.py").write_text(REWARD_FILE)
    flags = """--reward_fn reward.py:count_a --label_key label --input_template x{}y --rollout_batch_size 12
        --train_batch_size 12 --init_kl_coef 0 --n_samples_per_prompt 2"""
    launch(0, *command(tiny, flags), cwd=tmp_path)
    lines = logged(tmp_path / "model")
    assert len(lines) == 2
    assert "kl" not in lines[0]  # no reference model, no penalty
    calls, prompts = rows(tmp_path / "calls.jsonl"), rows(tiny / "prompts.jsonl")
    assert sorted(label for _, _, label in calls) == sorted(2 * list(range(24)))
    assert all(prompt == f"x{prompts[label]['input']}y" for prompt, _, label in calls)
    assert not any(response.endswith(("<eos>", "<pad>")) for _, response, _ in calls)
    assert lines[0]["reward"] == pytest.approx(
        sum(response.count("a") for _, response, _ in calls[:24]) / 24
    )


def test_a_reward_edited_between_run_and_resume_is_named(tiny, tmp_path, launch):
    (tmp_path / "reward.py").write_text(REWARD_FILE)
    words = command(
        tiny, "--reward_fn reward.py:count_a --label_key label --advantage_estimator reinforce"
    )
    words += ["--load_checkpoint", "--max_steps"]
    launch(0, *words, "1", cwd=tmp_path)
    (tmp_path / "reward.py").write_text(REWARD_FILE.replace('count("a")', 'count("b")'))
    printed = launch(0, *words, "2", cwd=tmp_path)
    assert (
        "files edited since the checkpoint, in force from now on: --reward_fn reward.py\n"
        in printed
    )
    assert [line["step"] for line in logged(tmp_path / "model")] == [1, 2]


def test_stop_when_ends_all_ranks_after_the_step_and_says_why(tiny, tmp_path, launch):
    words = command(tiny, "--verifiable_reward length:3 --advantage_estimator reinforce")
    said = launch(2, *words, "--stop_when", "reward > 99", "response_length > 0.5", cwd=tmp_path)
    assert said.count("--stop_when response_length > 0.5: response_length is") == 1
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert [line["step"] for line in logged(tmp_path / "model")] == [1]
    launch(
        2, *words, "--load_checkpoint", "--stop_when", "response_length > 0.5", cwd=tmp_path
    )  # it stays stopped
    assert [line["step"] for line in logged(tmp_path / "model")] == [1]
    said = launch(2, *words, "--load_checkpoint", "--stop_when", "reward > 99", cwd=tmp_path)
    assert "--stop_when response_length > 0.5 is not given any more: the run resumes" in said
    assert not (tmp_path / "model" / "model.1").exists(), "the run replaces its own model"
    assert [line["step"] for line in logged(tmp_path / "model")] == [1, 2, 3]


def test_ppo_is_rewarded_for_each_step_by_a_process_reward_model(tiny, tmp_path, launch):
    flags = f"--config {OPTIONS}/judge.yaml "
    flags += """--prm_pretrain {tiny}/actor --step_separator d
        --input_template c{}e --rollout_batch_size 24 --train_batch_size 24 --generate_max_len 12 --zero_stage 3"""
    launch(2, *command(tiny, flags), cwd=tmp_path)
    [metrics], samples = logged(tmp_path / "model"), logged(tmp_path / "model", "samples")
    model, tokenizer = (
        auto.from_pretrained(tiny / "actor") for auto in (AutoModelForCausalLM, AutoTokenizer)
    )
    good, bad = tokenizer.convert_tokens_to_ids(["a", "b"])
    for sample in samples:
        read, expected = sample["prompt"], 0.0
        steps = [
            step for step in re.sub("(<eos>|<pad>)+$", "", sample["response"]).split("d") if step
        ]
        for number, step in enumerate(steps):
            read += ("d" if number else "") + step + "h"
            logits = model(**tokenizer(read, return_tensors="pt")).logits[0, -1]
            expected += logits[[good, bad]].softmax(-1)[0].item()
        assert sample["reward"] == pytest.approx(expected, abs=1e-4), sample
    assert len({sample["reward"] for sample in samples}) > 3
    assert 0 < metrics["reward"] < 3


SAMPLED = """--pretrain {tiny}/actor --n_samples_per_prompt 2 --temperature 0.9 --generate_max_len 7 --input_key input
    --label_key label --prompt_data {tiny}/prompts.jsonl"""


@pytest.mark.parametrize("name", ["generate", "evaluate"])
def test_two_ranks_write_the_lines_and_the_table_of_one(name, tiny, tmp_path, launch):
    (tmp_path / "more.jsonl").write_text('{"input": "cdc", "label": 3}\n')
    measured = f",{tmp_path}/more.jsonl --reward_pretrain {tiny}/reward --pass_reward 0 --micro_batch_size 3"
    flags = f"{SAMPLED.replace('{tiny}', str(tiny))}{measured if name == 'evaluate' else ''} --max_samples 6"
    tables, lines = [], []
    for ranks in (0, 2):
        out = tmp_path / f"{ranks}.jsonl"
        printed = launch(ranks, "-m", f"openppo.cli.{name}", *flags.split(), "--output_path", out)
        tables.append(re.findall(r"^ *(?:all|prompts|reward|pass).*", printed, flags=re.MULTILINE))
        lines.append(rows(out))
    assert lines[1] == json.loads(
        json.dumps(lines[0]), parse_float=lambda x: pytest.approx(float(x), abs=1e-5)
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "2.jsonl", "more.jsonl"]
    if name == "generate":
        assert [(line["label"], line["sample"]) for line in lines[0]] == [
            (i, k) for i in range(6) for k in range(2)
        ]
    else:
        assert tables[0] == tables[1]
        words = [row.split() for row in tables[0]]
        assert ["prompts", "7", "1", "6"] in words
        assert {"reward", "reward_std", "pass@1", "pass@2"} <= {row[0] for row in words}
        assert {line["passed"] for line in lines[0]} == {True, False}


AGENT = """
async def solve(task, session):
    messages = list(task.messages)
    for _ in range(2):
        turn = await session.chat(messages)
        messages += [turn.message, {"role": "user", "content": "ab"}]
    return float(len(turn.text))
"""


def test_two_ranks_evaluate_the_episodes_of_one(tiny, tmp_path, launch):
    shutil.copytree(tiny / "actor", tmp_path / "chat")
    template = "{% for m in messages %}{{ m.role[0] ~ m.content }}{% endfor %}"
    (tmp_path / "chat/chat_template.jinja").write_text(template)
    (tmp_path / "agent.py").write_text(AGENT)
    flags = f"{SAMPLED} --agent {tmp_path}/agent.py:solve --prompt_max_len 50 --max_samples 5"
    flags, lines = (
        flags.replace("{tiny}/actor", f"{tmp_path}/chat").replace("{tiny}", str(tiny)),
        [],
    )
    for ranks in (0, 2):
        out = tmp_path / f"{ranks}.jsonl"
        printed = launch(ranks, "-m", "openppo.cli.evaluate", *flags.split(), "--output_path", out)
        assert re.search(r"^agent/completed +1\.0000", printed, flags=re.MULTILINE), printed
        lines.append(rows(out))
    assert lines[0] == lines[1] and len(lines[0]) == 10
    assert {(line["ending"], line["turns"], len(line["messages"])) for line in lines[0]} == {
        ("completed", 2, 4)
    }


SHOWS_ORDER = """
import torch
from openppo.cli import train_ppo
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.trainable_model import TrainableModel
seen = set()
def shown(owner, name, work):
    method = getattr(owner, name)
    def call(self, *inputs, **options):
        line = f"{work}, in a fixed order: {torch.are_deterministic_algorithms_enabled()}"
        if line not in seen:
            seen.add(line)
            print(line, flush=True)
        return method(self, *inputs, **options)
    setattr(owner, name, call)
shown(HFEngine, "step", "decoding")
shown(TrainableModel, "backward", "a gradient")
train_ppo.main()
"""


def test_a_fixed_order_is_that_of_training_alone_and_on_cpus_changes_nothing(
    tiny, tmp_path, launch
):
    """Also that it refuses none of our operators; of a GPU's kernels a GPU tells."""
    flags = "--reward_pretrain {tiny}/reward --pretrain_data {tiny}/documents.jsonl --save_value_network"
    words = command(tiny, flags)[2:]
    printed = launch(2, "-c", SHOWS_ORDER, *words, "--deterministic", cwd=tmp_path)
    assert {line for line in printed.splitlines() if "in a fixed order" in line} == {
        "decoding, in a fixed order: False",
        "a gradient, in a fixed order: True",
    }
    launch(2, "-m", "openppo.cli.train_ppo", *words, "--save_path", "plain", cwd=tmp_path)
    for suffix in ("", "_critic"):
        assert vector(tmp_path / f"model{suffix}").equal(vector(tmp_path / f"plain{suffix}"))
