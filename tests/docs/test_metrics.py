"""docs/metrics.md names what real runs log: all of it, and nothing else."""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).parents[2]
DOCUMENT = (REPO / "docs" / "metrics.md").read_text()
Run = Callable[..., str]

SMALL = """--save_path {out} --train_batch_size 4 --micro_train_batch_size 2 --max_samples 8"""
PPO = f"""train_ppo {SMALL} --pretrain policy --prompt_data prompts.jsonl --rollout_batch_size 4
    --micro_rollout_batch_size 4 --generate_max_len 4"""
REWARD = """
def reward_fn(response: str) -> dict[str, float]:
    if response.startswith("!"):
        raise RuntimeError
    return {"correct": float(len(response)), "brief": -1.0}
"""
RUNS = {
    "critic": f"""{PPO} --reward_pretrain reward --eval_data prompts.jsonl,sft.jsonl --eval_before_training
        --eval_steps 1 --eval_n_samples_per_prompt 2 --eval_temperature 1
        --pretrain_data documents.jsonl --pretrain_key text""",
    "named": f"""{PPO} --reward_fn two.py --advantage_estimator group_norm --n_samples_per_prompt 2 --use_kl_loss
        --kl_estimator k3 --eval_data prompts.jsonl --reward_clip_range -1 1""",
    "dynamic": f"""{PPO} --reward_fn two.py --advantage_estimator rloo --n_samples_per_prompt 4 --dynamic_sampling
        --rollout_correction tis""",
    "process": f"""{PPO} --reward_fn two.py --prm_pretrain policy --prm_placeholder_token ки --prm_reward_tokens + -
        --step_separator a --eval_data prompts.jsonl""",
    "sft": f"train_sft {SMALL} --pretrain policy --dataset sft.jsonl --eval_dataset sft.jsonl",
    "rm": f"train_rm {SMALL} --pretrain reward --dataset preference.jsonl --eval_dataset preference.jsonl",
}
PROGRAM = """
import sys
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, TrainRMConfig, TrainSFTConfig
from openppo.trainer import build_ppo_trainer
from openppo.trainer.supervised.build import build_rm_trainer, build_sft_trainer

BUILD = {
    "train_ppo": (TrainPPOConfig, build_ppo_trainer),
    "train_sft": (TrainSFTConfig, build_sft_trainer),
    "train_rm": (TrainRMConfig, build_rm_trainer),
}
for line in sys.argv[1:]:
    command, *flags = line.split()
    config, build = BUILD[command]
    trainer = build(parse_options(config, flags))
    trainer.fit()
trainer.close()  # once: all share the process group
"""


def documented(heading_pattern: str) -> list[str]:
    """Names in the first column of the tables under the headings that match."""
    sections = re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)
    chosen = [section for section in sections if re.match(heading_pattern, section)]
    rows = [row for section in chosen for row in re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def as_pattern(name: str) -> re.Pattern[str]:
    """A documented name, in which <something> stands for anything."""
    return re.compile("".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name)))


def undocumented(logged: Iterable[str], names: Iterable[str]) -> list[str]:
    return [name for name in sorted(logged) if not any(as_pattern(known).fullmatch(name) for known in names)]


def unlogged(logged: Iterable[str], names: Iterable[str]) -> list[str]:
    logged = list(logged)
    return [known for known in names if not any(as_pattern(known).fullmatch(name) for name in logged)]


@pytest.fixture(scope="module")
def logs(run: Run, workshop: Path) -> dict[str, dict[str, set[str]]]:
    """Names in each file of each run."""
    (workshop / "two.py").write_text(REWARD)
    lines = [" ".join(line.format(out=f"metrics/{name}").split()) for name, line in RUNS.items()]
    run([sys.executable, "-c", PROGRAM, *lines], workshop)
    found: dict[str, dict[str, set[str]]] = {}
    for name in RUNS:
        folder = workshop / "metrics" / name / "logs"
        found[name] = {
            file.stem: {key for line in file.read_text().splitlines() for key in json.loads(line)} - {"step", "time"}
            for file in folder.glob("*.jsonl")
        }
        assert {"report.html", "config.yaml", "environment.json"} <= {file.name for file in folder.iterdir()}
    return found


PPO_SECTIONS = "Rewards|Policy|Critic|Responses|Sampling|Time|Memory|Evaluation"


def expected(names: Iterable[str]) -> list[str]:
    """Without what CPUs do not log, and without ``eval_reward_errors``, which are only where there are any."""
    on_gpu = torch.cuda.is_available()
    return [name for name in names if name != "eval_reward_errors" and (on_gpu or not name.startswith("memory/"))]


def test_every_metric_of_ppo_is_documented_and_every_documented_one_is_logged(
    logs: dict[str, dict[str, set[str]]],
) -> None:
    logged = set().union(*(logs[name]["metrics"] for name in ("critic", "named", "dynamic", "process")))
    names = documented(PPO_SECTIONS)
    assert undocumented(logged, names) == []
    assert unlogged(logged, expected(names)) == []


def test_every_metric_of_supervised_training_is_documented_and_logged(logs: dict[str, dict[str, set[str]]]) -> None:
    logged = logs["sft"]["metrics"] | logs["rm"]["metrics"]
    names = documented("SFT")
    assert undocumented(logged, names) == []
    assert unlogged(logged, expected(names)) == []


def test_memory_of_gpus_is_documented() -> None:
    """Nothing here logs it but a timer on a GPU that is none."""
    phases = ("generation", "scoring", "experience", "training", "step")
    names = [f"memory/{phase}_{what}_gib" for phase in phases for what in ("peak", "estimated")]
    assert undocumented(names, documented("Memory")) == []
    assert undocumented([name for name in names if "/step_" in name], documented("SFT")) == []


def test_every_field_of_samples_and_tokens_is_documented_and_logged(logs: dict[str, dict[str, set[str]]]) -> None:
    for file in ("samples", "tokens"):
        logged = set().union(*(logs[name][file] for name in ("critic", "named", "dynamic", "process")))
        assert sorted(documented(rf"{file}\.jsonl")) == sorted(logged)


def test_the_commands_of_the_report_write_it(
    run: Run, workshop: Path, tmp_path: Path, logs: dict[str, dict[str, set[str]]]
) -> None:
    (tmp_path / "ckpt").mkdir()
    for name, of in (("ppo", "critic"), ("grpo", "named")):
        (tmp_path / "ckpt" / name).symlink_to(workshop / "metrics" / of)
    (block,) = re.findall(
        r"^```bash\n(.*?)^```", (REPO / "docs" / "report.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    printed = [run(command, tmp_path) for command in block.splitlines()]
    assert printed == ["ckpt/ppo/logs/report.html\n", "compare.html\n"]
    assert '"name":"critic"' in (tmp_path / "compare.html").read_text()


def test_what_a_run_does_not_have_is_not_logged(logs: dict[str, dict[str, set[str]]]) -> None:
    without_critic = logs["named"]
    assert not {"value_loss", "values", "explained_variance", "critic_grad_norm"} & without_critic["metrics"]
    assert "value" not in without_critic["tokens"]


def test_the_checkers_see_what_is_missing() -> None:
    assert undocumented(["reward/a", "b"], ["reward/<name>"]) == ["b"]
    assert unlogged(["reward/a"], ["reward/<name>", "c", "reward"]) == ["c", "reward"]
