"""docs/metrics.md names what real runs log: all of it, and nothing else."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.conftest import REPO, Run, train

DOCUMENT = (REPO / "docs" / "metrics.md").read_text()
Logs = dict[str, dict[str, set[str]]]

SMALL = """--save_path {out} --train_batch_size 4 --micro_train_batch_size 2 --max_samples 8"""
TRAIN_PPO = f"""train_ppo {SMALL} --pretrain policy --prompt_data prompts.jsonl --rollout_batch_size 4
    --micro_rollout_batch_size 4 --generate_max_len 4"""
REWARD = """
def reward_fn(response: str) -> dict[str, float]:
    if response.startswith("!"):
        raise RuntimeError
    return {"correct": float(len(response)), "brief": -1.0, "extra": {"letters": len(response)}}
"""
AGENT = """
async def solve(task, session):
    turn = await session.chat(task.messages)
    turn = await session.chat([*task.messages, turn.message, {"role": "user", "content": "and"}])
    session.reward(0.5, turn)
    return {"won": float(len(turn.text))}
"""
TASKS = """
tasks:
  - {name: fixed, data: prompts.jsonl, reward: two.py, eval_data: prompts.jsonl}
  - {name: talk, data: prompts.jsonl, agent: "agent.py:solve"}
"""
RUNS = {
    "critic": f"""{TRAIN_PPO} --reward_pretrain reward --eval_data prompts.jsonl,sft.jsonl --eval_before_training
        --eval_steps 1 --eval_n_samples_per_prompt 2 --eval_temperature 1
        --pretrain_data documents.jsonl --dump_rollouts metrics/critic/rollouts""",
    "named": f"""{TRAIN_PPO.replace("prompts.jsonl", "prompts.jsonl,sft.jsonl")} --reward_fn two.py
        --advantage_estimator group_norm --n_samples_per_prompt 2 --use_kl_loss --kl_estimator k3
        --eval_data prompts.jsonl --eval_reward_fn two.py --reward_clip_range -1 1""",
    "dynamic": f"""{TRAIN_PPO} --reward_fn two.py --advantage_estimator rloo --n_samples_per_prompt 4 --dynamic_sampling
        --rollout_correction mis level=sequence veto=1e-4""",
    "greedy": f"{TRAIN_PPO} --reward_fn two.py --advantage_estimator remax",
    "process": f"""{TRAIN_PPO} --reward_fn two.py --prm_pretrain policy
        --step_separator a --eval_data prompts.jsonl
        --policy_loss_type double_sided --n_samples_per_prompt 2 --normalize_reward group""",
    "agent": f"""{TRAIN_PPO} --agent agent.py:solve --episode_max_len 300 --n_samples_per_prompt 2
        --eval_data prompts.jsonl --config rendering.yaml --policy_loss_type decoupled
        --dump_rollouts metrics/agent/rollouts""",
    "tasks": f"""train_ppo {SMALL} --pretrain policy --tasks tasks.yaml --max_steps 3 --rollout_batch_size 4
        --generate_max_len 4 --episode_max_len 300""",
    "distilled": f"""{TRAIN_PPO} --reward_fn none --ref_pretrain policy --eval_data prompts.jsonl --eval_temperature 1
        --advantage_estimator reinforce --gamma 0 --normalize_advantages off --init_kl_coef 1
        --max_staleness 1 --dump_rollouts metrics/distilled/rollouts""",
    "sft": f"train_sft {SMALL} --pretrain policy --dataset sft.jsonl --eval_dataset sft.jsonl",
    "rm": f"train_rm {SMALL} --pretrain reward --dataset preference.jsonl --eval_dataset preference.jsonl",
}
ASYNC = f"""-m torch.distributed.run --standalone --nproc_per_node 2 -m openppo.cli.{TRAIN_PPO} --reward_fn two.py
    --max_staleness 1 --rollout_ranks 1 --num_episodes 2"""


def documented(heading_pattern: str) -> list[str]:
    """Names in the first column of the tables under the headings that match."""
    sections = re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)
    chosen = [section for section in sections if re.match(heading_pattern, section)]
    rows = [
        row
        for section in chosen
        for row in re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    ]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.fixture(scope="module")
def logs(run: Run, workshop: Path) -> Logs:
    """Names in each file of each run."""
    (workshop / "two.py").write_text(REWARD)
    (workshop / "rendering.yaml").write_text("check_rendering: warn\n")
    (workshop / "agent.py").write_text(AGENT)
    (workshop / "tasks.yaml").write_text(TASKS)
    train(
        run, workshop, [line.format(out=f"metrics/{name}").split() for name, line in RUNS.items()]
    )
    run([sys.executable, *ASYNC.format(out="metrics/async").split()], workshop)
    found: Logs = {}
    for name in [*RUNS, "async"]:
        folder = workshop / "metrics" / name / "logs"
        found[name] = {
            file.stem: {key for line in file.read_text().splitlines() for key in json.loads(line)}
            - {"step", "time"}
            for file in folder.glob("*.jsonl")
        }
        assert {"report.html", "config.yaml", "environment.json"} <= {
            file.name for file in folder.iterdir()
        }
    return found


PPO = ("critic", "named", "dynamic", "greedy", "process", "agent", "async", "tasks", "distilled")
OF_FORMS = ("agent/unreadable_actions", "agent/sampling_overridden", "agent/retries")
SOMETIMES = (
    "eval_reward_errors",
    "rollout_kl/lag_",
    "stale/share_by_length/",
    *OF_FORMS,
    *(() if torch.cuda.is_available() else ("memory/",)),
    *("speed/<phase>_imbalance", "time/loading_s", "time/saving_s"),
)
"""Beginnings of names that are logged only where there is an error, a GPU, two ranks, older samples, other agents; and
of what precedes a line in a process of its own."""


@pytest.mark.parametrize(
    ("runs", "sections"),
    [
        (
            PPO,
            "Progress|Rewards|Policy|Critic|Responses|Agents|Sampling|Rollouts|Tasks|Time|Memory|Evaluation",
        ),
        (("sft", "rm"), "SFT"),
    ],
    ids=["PPO", "supervised"],
)
def test_every_metric_is_documented_and_every_documented_one_is_logged(
    logs: Logs, runs: tuple[str, ...], sections: str
) -> None:
    logged, names = set().union(*(logs[name]["metrics"] for name in runs)), documented(sections)
    patterns = {
        name: "".join(
            ".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name)
        )
        for name in names
    }
    known = re.compile("|".join(patterns.values()))
    assert [name for name in sorted(logged) if not known.fullmatch(name)] == []
    always = [name for name in names if not name.startswith(SOMETIMES)]
    assert [n for n in always if not any(re.fullmatch(patterns[n], name) for name in logged)] == []
    phases = (
        ("step",) if runs != PPO else ("generation", "scoring", "experience", "training", "step")
    )
    memory = [
        f"memory/{phase}_{what}_gib" for phase in phases for what in ("peak", "estimated")
    ]  # of a GPU
    assert [name for name in memory if not known.fullmatch(name)] == []


def test_a_run_without_rewards_logs_none(logs: Logs, workshop: Path) -> None:
    names = logs["distilled"]["metrics"] | logs["distilled"]["samples"]
    assert [name for name in sorted(names) if "reward" in name or "pass@" in name] == []
    assert {"kl", "eval_kl", "staleness"} <= names
    for file in (workshop / "metrics/distilled/rollouts").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert {row["reward"] for row in rows} == {None}


def test_every_column_of_dumped_rollouts_is_documented_and_written(
    logs: Logs, workshop: Path
) -> None:
    columns = set(documented("Dumped"))
    for name, without in (("critic", set()), ("agent", {"token_ids", "action_mask", "log_probs"})):
        for file in (workshop / "metrics" / name / "rollouts").glob("*.jsonl"):
            written = {frozenset(json.loads(line)) for line in file.read_text().splitlines()}
            assert written == {frozenset(columns - without)}, file
    assert {file.name[:5] for file in (workshop / "metrics" / "agent" / "rollouts").iterdir()} == {
        "train",
        "eval-",
    }


def test_every_field_of_samples_and_tokens_is_documented_and_logged_where_a_run_has_it(
    logs: Logs,
) -> None:
    for file in ("samples", "tokens"):
        logged = set().union(*(logs[name][file] for name in PPO))
        assert sorted(documented(rf"{file}\.jsonl")) == sorted(logged)
    assert (
        not {"value_loss", "values", "explained_variance", "critic_grad_norm"}
        & logs["named"]["metrics"]
    )
    assert "value" not in logs["named"]["tokens"]


def test_the_commands_of_the_report_write_it(
    run: Run, workshop: Path, tmp_path: Path, logs: Logs
) -> None:
    (tmp_path / "ckpt").mkdir()
    for name, of in (("ppo", "critic"), ("grpo", "named")):
        (tmp_path / "ckpt" / name).symlink_to(workshop / "metrics" / of)
    page = (REPO / "docs" / "report.md").read_text()
    (block,) = re.findall(r"^```bash\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    printed = [run(command, tmp_path) for command in block.splitlines()]
    assert printed == ["ckpt/ppo/logs/report.html\n", "compare.html\n"]
    assert '"name":"critic"' in (tmp_path / "compare.html").read_text()
