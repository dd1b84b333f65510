"""The scripts to copy run as they are, with a tiny model, and write what they promise; test_commands.py parses all."""

import importlib
import json
import os
import re
import shutil
import socket
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.experience.own_estimator import loss_aggregation
from tests.docs.conftest import SCRIPTS, Run, words_of_script

SMALL = (
    "--rollout_batch_size 4 --train_batch_size 4 --micro_rollout_batch_size 4 --micro_train_batch_size 2 "
    "--generate_max_len 4 --num_episodes 1"
)
PRM = "--placeholder_token # --reward_tokens + -"


def script(
    run: Run, name: str, folder: Path, more: str = "", flags: str = SMALL, **env: str
) -> Path:
    """Run a script in ``folder`` with two optimizer steps of four samples, and return its folder of results."""
    environment = {
        "GPUS": "1",
        "MODEL": "policy",
        "REWARD_MODEL": "reward",
        "SAVE_PATH": f"out/{name}",
    } | env
    run(["bash", str(SCRIPTS / name), *flags.split(), *more.split()], folder, **environment)
    return folder / environment["SAVE_PATH"]


def logged(folder: Path, file: str = "metrics") -> list[dict[str, float]]:
    """The rows of a log."""
    return [
        json.loads(line) for line in (folder / "logs" / f"{file}.jsonl").read_text().splitlines()
    ]


def saved(folder: Path) -> list[str]:
    """The stages that left a model."""
    return sorted(path.name for path in folder.iterdir() if (path / "model.safetensors").is_file())


def test_gsm8k_with_real_questions_and_the_qwen_template(
    run: Run, tmp_path: Path, assets: Path
) -> None:
    for name in ("train", "test"):
        with (assets / f"data/gsm8k/{name}.jsonl").open() as rows:
            (tmp_path / f"{name}.jsonl").write_text("".join(islice(rows, 4)))
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / "qwen2.5")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        **sizes,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    out = script(run, "gsm8k.sh", tmp_path, DATA="train.jsonl", EVAL_DATA="test.jsonl", GPUS="2")
    first, *steps = logged(out)  # a random model solves nothing
    assert first["eval_reward"] == steps[-1]["eval_reward"] == steps[0]["reward"] == 0.0
    prompt = str(logged(out, "samples")[0]["prompt"])
    assert "<|im_start|>user\n" in prompt
    assert prompt.count("####") == 1


@pytest.mark.parametrize(
    ("name", "flags", "env"),
    [
        (
            "grpo.sh",
            f"{SMALL} --n_samples_per_prompt 2 --train_batch_size 8",
            {"DATA": "math.jsonl", "GPUS": "2"},
        ),
        ("remax.sh", SMALL, {"DATA": "prompts.jsonl"}),
        (
            "train_sft.sh",
            "--train_batch_size 4 --max_len 64",
            {"DATASET": "sft.jsonl", "GPUS": "2"},
        ),
        (
            "train_rm.sh",
            "--train_batch_size 4 --max_len 64",
            {"DATASET": "preference.jsonl", "GPUS": "2"},
        ),
        ("train_prm.sh", f"{PRM} --train_batch_size 4", {"DATASET": "steps.jsonl", "GPUS": "2"}),
        pytest.param(
            "train_ppo.sh",
            SMALL,
            {"PROMPT_DATA": "prompts.jsonl", "GPUS": "2"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "elastic.sh", SMALL, {"DATA": "prompts.jsonl", "GPUS": "2"}, marks=pytest.mark.slow
        ),
    ],
)  # README's command is that of train_ppo.sh; tests/distributed/test_signals.py runs elastic.sh
def test_a_script_leaves_a_model(
    run: Run, workshop: Path, name: str, flags: str, env: dict[str, str]
) -> None:
    out = script(
        run, name, workshop, flags=flags, PRETRAIN="policy", REWARD_PRETRAIN="reward", **env
    )
    assert (out / "model.safetensors").is_file()
    assert len(logged(out)) == 2
    assert ("value_loss" in logged(out)[0]) == (name in ("train_ppo.sh", "elastic.sh")), (
        "the others have no critic"
    )
    assert ("kl_loss" in logged(out)[0]) == (name == "grpo.sh")


def config_of(name: str, folder: Path, more: str = "") -> TrainPPOConfig:
    """What a script asks for, from the words that it gives to torchrun."""
    words = words_of_script(SCRIPTS / name, folder, more)[0]
    config = parse_options(TrainPPOConfig, words[words.index("openppo.cli.train_ppo") + 1 :])
    config.validate(8)
    return config


def test_the_relatives_of_grpo_are_what_their_papers_say(tmp_path: Path) -> None:
    """DAPO: arXiv 2503.14476; Dr. GRPO: 2503.20783; GSPO: 2507.18071; GRPO: 2402.03300."""
    comment = re.sub(r"\n# {6,}", " ", (SCRIPTS / "grpo.sh").read_text())
    flags = dict(re.findall(r"^#   ([A-Z][\w. ]*?) +(--.*)$", comment, flags=re.MULTILINE))
    assert list(flags) == ["DAPO", "Dr. GRPO", "GSPO"]
    made = {
        name: config_of("grpo.sh", tmp_path, more) for name, more in {"GRPO": "", **flags}.items()
    }
    assert {
        name: (loss_aggregation(c), c.kl.use_kl_loss, c.kl.init_kl_coef > 0)
        for name, c in made.items()
    } == {
        "GRPO": ("sequence_mean", True, True),
        "DAPO": ("token_mean", False, False),
        "Dr. GRPO": ("constant", False, False),
        "GSPO": ("sequence_mean", False, False),
    }
    dapo = made["DAPO"]
    assert (dapo.loss.eps_clip, dapo.loss.eps_clip_high, dapo.ppo.dynamic_sampling) == (
        0.2,
        0.28,
        10,
    )
    assert dapo.shaping.overlong_buffer_len == 128
    assert made["Dr. GRPO"].advantage.advantage_estimator == "dr_grpo"
    assert made["GSPO"].loss.policy_loss_type == "gspo"


def test_lora(run: Run, workshop: Path) -> None:
    out = script(
        run,
        "lora.sh",
        workshop,
        "--actor_learning_rate 1e-2",
        DATA="prompts.jsonl",
        CRITIC="policy",
    )
    assert (out / "adapter_model.safetensors").is_file()
    assert not (out / "model.safetensors").exists()
    merged = AutoModelForCausalLM.from_pretrained(f"{out}_merged")
    base = AutoModelForCausalLM.from_pretrained(workshop / "policy")
    assert merged.num_parameters() == base.num_parameters()
    assert any(
        not torch.equal(a, b.to(a))
        for a, b in zip(merged.parameters(), base.parameters(), strict=True)
    )


def test_tldr_trains_what_is_not_given_and_hh_uses_what_is(run: Run, workshop: Path) -> None:
    rows = [{"prompt": f"POST: say {i}\n\nTL;DR:", "completion": f" {i}"} for i in range(8)]
    (workshop / "tldr.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"DATA": "tldr.jsonl", "PREFERENCES": "preference.jsonl", "BATCH": "4"}
    out = script(run, "tldr.sh", workshop, REWARD_MODEL="", **data)
    assert saved(out) == ["ppo", "rm", "sft"]
    assert str(logged(out / "ppo", "samples")[0]["prompt"]).endswith("TL;DR:")
    given = {"SFT": "policy", "REWARD_MODEL": str(out / "rm"), "SAVE_PATH": "out/given"}
    assert saved(script(run, "hh.sh", workshop, DATA="dialogues.jsonl", BATCH="4", **given)) == [
        "ppo"
    ]


@pytest.mark.parametrize(
    "trained",
    [
        "ppo-lora",
        pytest.param("grpo", marks=pytest.mark.slow),
        pytest.param("grpo-lora", marks=pytest.mark.slow),
        pytest.param("ppo", marks=pytest.mark.slow),
    ],
)
def test_chat_model_is_trained_and_compared(run: Run, workshop: Path, trained: str) -> None:
    out = f"out/{trained}"
    command = ["bash", str(SCRIPTS / "chat_model.sh"), "policy", *SMALL.split(), "--max_steps", "2"]
    printed = run([*command, "--n_samples_per_prompt", "2"], workshop, RUNS=trained, SAVE_PATH=out)
    assert re.search(rf"^{trained} +0.0 \+- 0.0 +\+0.0 \+- 0.0$", printed, re.MULTILINE)
    rows = logged(workshop / out / trained)
    assert len(rows) == 2
    assert ("value_loss" in rows[0]) == ("ppo" in trained)
    questions = [
        {json.loads(line)["input"] for line in (workshop / out / f"{name}.jsonl").open()}
        for name in ("train", "heldout")
    ]
    assert len(questions[1]) == 200 and len(questions[0] | questions[1]) == 90 * 90


def test_gains_of_the_chat_model_are_compared_question_by_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    addition = importlib.import_module("addition")
    answers = {"heldout": "", "before": "", "after": ""}
    for before, after in (("5", "5"), ("6", "5"), ("6", "It is 5"), ("5", "5 or 6")):
        answers["heldout"] += json.dumps({"input": "2 + 3", "label": "5"}) + "\n"
        answers["before"] += json.dumps({"response": before}) + "\n"
        answers["after"] += json.dumps({"response": after}) + "\n"
    files = {}
    for name, text in answers.items():
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text(text)

    printed = addition.table(files["heldout"], files["before"], {"ppo": files["after"]})

    # right: 1 0 0 1, then 1 1 1 0; gains: 0 1 1 -1
    deviation = {"before": (1 / 3) ** 0.5, "after": 0.25**0.5, "gain": (11 / 12) ** 0.5}
    half = {name: 100 * 1.96 * value / 2 for name, value in deviation.items()}
    assert f"before training 50.0 +- {half['before']:.1f}" in " ".join(printed.split())
    gain = f"ppo 75.0 +- {half['after']:.1f} +25.0 +- {half['gain']:.1f}"
    assert gain in " ".join(printed.split())


def test_distill_takes_a_teacher_and_a_student(run: Run, workshop: Path) -> None:
    """They are the same here, so there is nothing to learn."""
    data = {"PROMPTS": "prompts.jsonl", "HELDOUT": "prompts.jsonl"}
    out = script(run, "distill.sh", workshop, flags=f"policy policy {SMALL}", **data)
    assert saved(out) == ["student"]
    assert [row["eval_kl"] for row in logged(out / "student") if "eval_kl" in row] == pytest.approx(
        [0, 0], abs=1e-3
    )


@pytest.mark.slow
def test_hh_trains_what_is_not_given(run: Run, workshop: Path) -> None:
    out = script(run, "hh.sh", workshop, DATA="dialogues.jsonl", REWARD_MODEL="", BATCH="4")
    assert saved(out) == ["ppo", "rm", "sft"]


MLFLOW = """
import json, re
from types import SimpleNamespace

def note(*row):
    with open("mlflow.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")

def start_run(run_id=None, run_name=None):
    note("start", run_id, run_name)
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "0a1b"))

def log_params(params):
    assert len(params) <= 100
    note("params", {name: str(value) for name, value in params.items()})

def log_metrics(metrics, step):
    assert all(re.fullmatch(r"[A-Za-z0-9_\\-. /]+", name) for name in metrics), metrics
    note("metrics", metrics, step)

def log_dict(content, path):
    note("dict", content, path)

def end_run(status):
    note("end", status)
"""


def test_the_tracker_of_mlflow_gets_what_the_logs_get(run: Run, workshop: Path) -> None:
    """Of a stand-in with the limits of MLflow's server, on two ranks."""
    (workshop / "mlflow.py").write_text(MLFLOW)
    shutil.copy(SCRIPTS.parent / "mlflow_tracker.py", workshop)
    flags = f"--pretrain policy --reward_pretrain reward --prompt_data prompts.jsonl {SMALL} --save_path out/mlflow"
    command = f"-m torch.distributed.run --standalone --nproc_per_node 2 mlflow_tracker.py {flags}"
    command += " --eval_data prompts.jsonl --pass_reward 0.5"
    for more in ("", " --load_checkpoint --num_episodes 2"):
        run([sys.executable, *f"{command}{more}".split()], workshop)
    calls = [json.loads(line) for line in (workshop / "mlflow.jsonl").read_text().splitlines()]
    assert [call for call in calls if call[0] in ("start", "end")] == [
        *(
            ["start", None, "mlflow"],
            ["end", "FINISHED"],
            ["start", "0a1b", None],
            ["end", "FINISHED"],
        )
    ]
    given = [(call[2], call[1]) for call in calls if call[0] == "metrics"]
    rows = [
        {n.replace("@", "_"): v for n, v in row.items() if n != "time"}
        for row in logged(workshop / "out/mlflow")
    ]
    assert [{"step": step, **metrics} for step, metrics in given] == rows
    assert len(rows) == 4 and "eval_pass_1" in rows[1]
    params = {
        name: value for call in calls if call[0] == "params" for name, value in call[1].items()
    }
    assert (params["pretrain"], params["rollout_batch_size"], len(params) > 150) == (
        "policy",
        "4",
        True,
    )
    assert [call[2] for call in calls if call[0] == "dict"][:2] == [
        *("samples/training_00000001.json", "samples/training_00000002.json")
    ]


PROGRAMS = {  # what this machine lacks: scontrol, and srun for two nodes
    "scontrol": 'test "$*" = "show hostnames gpu[01-02]" && printf "%s\\n" 127.0.0.1 127.0.0.2',
    "srun": """test "$1" = --kill-on-bad-exit=1; shift
        for node in 0 1; do SLURM_NODEID=$node "$@" & running+=($!); done
        for each in "${running[@]}"; do wait "$each"; done""",
}


def test_the_slurm_script_runs_on_two_nodes(run: Run, workshop: Path, tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\nset -e\n{text}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_PORT": port}
    nodes = {"SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_NNODES": "2", "GPUS": "1"}
    models = {
        "PRETRAIN": "policy",
        "REWARD_PRETRAIN": "reward",
        "PROMPT_DATA": "prompts.jsonl",
        "SAVE_PATH": "slurm",
    }
    run(
        ["bash", str(SCRIPTS / "slurm.sh"), *SMALL.split(), "--max_samples", "8"],
        workshop,
        **path,
        **nodes,
        **models,
    )
    assert (workshop / "slurm" / "model.safetensors").is_file()
    assert len(logged(workshop / "slurm")) == 2
    text = (SCRIPTS / "slurm.sh").read_text()
    notice, patience = (
        int(re.search(pattern, text)[1]) for pattern in (r"TERM@(\d+)", r"--shutdown_timeout (\d+)")
    )
    assert 30 < patience < notice, "longer than Slurm, within its notice"
