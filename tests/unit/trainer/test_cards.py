"""Cards tell what a run was: its command without this machine, data with hashes, figures with intervals."""

import hashlib
import json
import shlex
from pathlib import Path

import pytest

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, TrainRMConfig, TrainSFTConfig, from_options
from openppo.config.command_line import command_line
from openppo.trainer.cards.data import describe_data
from openppo.trainer.cards.run_card import RunCard, facts_of, make_run_card
from openppo.trainer.cards.text import CardText
from openppo.types import SingleProcess

PPO = {"pretrain": "owner/Model-1B", "reward_fn": "reward.py"}


def test_the_command_gives_the_same_options_again(tmp_path):
    config = from_options(
        TrainPPOConfig,
        **PPO,
        prompt_data="openai/gsm8k@main",
        stop_when=("kl > 0.2", "eval_reward > 0.9"),
        value_clip=None,
        self_check=False,
        bf16=True,
        adam_betas=(0.9, 0.99),
        lora_rank=4,
    )
    line, _, lines = command_line("train_ppo", config).partition("  # with ")
    program, command, *words, flag, file = shlex.split(line)
    assert (program, command, flag, file) == ("openppo", "train_ppo", "--config", "FILE.yaml")
    assert lines == "self_check: false"
    (tmp_path / "options.yaml").write_text(lines)
    words += ["--config", str(tmp_path / "options.yaml")]
    assert parse_options(TrainPPOConfig, words) == config


def test_the_command_names_no_folder_of_this_machine_and_no_secret():
    config = from_options(
        TrainPPOConfig,
        pretrain="/home/me/models/base",
        prompt_data="~/data/a.jsonl,https://me:secret@host/b.jsonl?key=secret,c/d.jsonl",
        agent_command="python /home/me/agent.py --file=/home/me/x.txt",
        save_path="/scratch/me/run",
        use_wandb="secret",
    )
    text = command_line("train_ppo", config, n_ranks=2)
    assert text.startswith("torchrun --standalone --nproc_per_node 2 -m openppo train_ppo ")
    without = command_line("train_ppo", config, left_out=["save_path"])
    assert "--save_path" in text and "--save_path" not in without
    for word in ("secret", "/home", "/scratch", "~"):
        assert word not in text
    for word in (
        "--pretrain base",
        "a.jsonl,https://***@host/b.jsonl",
        "c/d.jsonl",
        "--save_path run",
    ):
        assert word in text
    assert "'python agent.py --file=x.txt'" in text


def test_data_have_the_hashes_that_sha256sum_prints(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "a"}\n')
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "b.csv").write_text("x\n1\n")
    (folder / "notes.txt").write_text("not data")
    sha256 = hashlib.sha256(rows.read_bytes()).hexdigest()
    of_list = hashlib.sha256(
        f"{hashlib.sha256((folder / 'b.csv').read_bytes()).hexdigest()}  b.csv\n".encode()
    ).hexdigest()
    config = from_options(
        TrainPPOConfig,
        **PPO,
        prompt_data=f"{rows}, {folder},{rows}",
        eval_data="s3://bucket/e.jsonl",
    )
    assert describe_data(config) == [
        {"flag": "--prompt_data", "name": "rows.jsonl", "sha256": sha256},
        {"flag": "--prompt_data", "name": "many/", "sha256": of_list},
        {"flag": "--eval_data", "name": "s3://bucket/e.jsonl"},
    ]


def model_folder(folder: Path, kind: str, adapters: bool = False) -> Path:
    """A folder as a saved model leaves it, without weights."""
    folder.mkdir()
    name = "model_config.json" if adapters else "config.json"
    (folder / name).write_text(json.dumps({"architectures": [kind]}))
    if adapters:
        (folder / "adapter_config.json").write_text("{}")
    return folder


def test_a_card_tells_steps_data_and_figures_with_their_interval(tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("{}\n")
    config = from_options(
        TrainPPOConfig,
        **PPO,
        prompt_data=f"openai/gsm8k@main,{data}",
        advantage_estimator="group_norm",
        n_samples_per_prompt=4,
    )
    rows = {"--prompt_data": 1200, "held out": 500}
    card = make_run_card(config, SingleProcess(), "owner/Model-1B", rows)
    card.note(0, {"eval_reward": 0.25, "eval_reward_ci95": 0.04, "eval_reward_std": 0.4})
    card.note(5, {"eval_reward": 0.5, "reward": 1.0})
    card.note(
        9,
        {
            "eval_reward": 0.75,
            "eval_reward_ci95": 0.038,
            "eval_pass@1": 1.0,
            "eval_pass@1_ci95": 0.0,
        },
    )
    folder = model_folder(tmp_path / "saved", "LlamaForCausalLM")
    card.write(folder, 9, 1152, SingleProcess())

    text = (folder / "README.md").read_text()
    for part in (
        "library_name: transformers\nbase_model: owner/Model-1B\ndatasets:\n- openai/gsm8k\n",
        "pipeline_tag: text-generation\ntags:\n- openppo\n- ppo\n- group_norm\n---\n",
        "# Model-1B, trained by GRPO",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")',
        "openppo chat FOLDER",
        "openppo train_ppo --pretrain owner/Model-1B",
        "Saved after 9 global steps on 1,152 samples",
        f"| `--prompt_data` | `prompts.jsonl` | 1,200 | `{hashlib.sha256(data.read_bytes()).hexdigest()}` |",
        "| figure | before training | after step 9 |",
        "| `eval_reward` | 0.25 ± 0.04 | 0.75 ± 0.038 |",
        "| `eval_pass@1` |  | 1 (all alike) |",
        "Held-out data of 500 rows.",
    ):
        assert part in text
    assert "license" not in text.partition("# Model-1B")[0]
    assert str(tmp_path) not in text and "eval_reward_std" not in text


@pytest.mark.parametrize(
    ("kind", "architecture", "adapters", "parts"),
    [
        (TrainSFTConfig, "LlamaForCausalLM", True, ["AutoPeftModelForCausalLM", "library_name: peft"]),
        (TrainRMConfig, "LlamaForSequenceClassification", False, ["reward model", "text-classification"]),
        (TrainPPOConfig, "LlamaForSequenceClassification", False, ["# Critic of", "writes no text"]),
        (TrainSFTConfig, "LlavaForConditionalGeneration", False, ["image-text-to-text"]),
    ],
)  # fmt: skip
def test_a_card_says_which_kind_of_model_it_is(tmp_path, kind, architecture, adapters, parts):
    data = {"prompt_data": "x"} if kind is TrainPPOConfig else {"dataset": "x"}
    config = from_options(kind, pretrain="m", **data)
    folder = model_folder(tmp_path / "saved", architecture, adapters)
    text = CardText(facts_of(config, "m"), folder, 1, samples=2, evaluations=[])
    RunCard(text.facts).write(folder, 1, 2, SingleProcess())
    written = (folder / "README.md").read_text()
    assert [part for part in parts if part not in written] == []
    assert ("openppo chat" in written) == (architecture != "LlamaForSequenceClassification")


def test_license_and_base_are_those_of_the_card_of_the_start(tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    (start / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: owner/Base\n---\n")
    config = from_options(TrainSFTConfig, pretrain=str(start), dataset="x")
    folder = model_folder(tmp_path / "saved", "LlamaForCausalLM")
    header = CardText(facts_of(config, str(start)), folder, 1, samples=2, evaluations=[]).header()
    assert (header["license"], header["base_model"]) == ("apache-2.0", "owner/Base")


def test_evaluations_survive_a_checkpoint():
    card = RunCard({})
    card.note(0, {"eval_reward": 0.0})
    card.note(1, {"eval_reward": 1.0})
    resumed = RunCard({})
    resumed.resume({"evaluations": json.loads(json.dumps(card.evaluations))})
    resumed.note(1, {"eval_reward": 1.0})
    assert [evaluation["step"] for evaluation in resumed.evaluations] == [0, 1]
    resumed.note(2, {"eval_reward": 2.0})
    assert [evaluation["step"] for evaluation in resumed.evaluations] == [0, 2]
    resumed.resume({"of": "an earlier version"})
    assert resumed.evaluations == []


def test_a_run_without_facts_writes_no_card(tmp_path):
    RunCard().write(tmp_path, 1, 1, SingleProcess())
    assert list(tmp_path.iterdir()) == []
