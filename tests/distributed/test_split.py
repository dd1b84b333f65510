"""The split never matters: how samples fall into micro-batches, ranks, padding and ZeRO stages changes nothing.

Each case trains a few steps from the same start. What it may differ in from its reference (one rank, no ZeRO, one
micro-batch) is the order in which numbers are added.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

SCRIPT = Path(__file__).with_name("run_steps.py")
STAGES = (0, 1, 2, 3)
EVERYTHING = 100  # as micro-batch size: more than there is

PARAMETER_TOLERANCE = 1e-5
"""Relative, of the norm of all parameters; at most 1e-6 was measured."""
UPDATE_TOLERANCE = 1e-3
"""Relative, of the norm of what training changed. At most 6e-5 was measured for PPO and 1.3e-4 for SFT.

Adam's first updates have the size of the learning rate whatever the size of the gradient, so a gradient that is zero
but for rounding counts as much as any other.
"""


@dataclass(frozen=True)
class Task:
    """What is trained on what; decides the result."""

    command: str
    arguments: str
    n_rows: int
    n_steps: int


@dataclass(frozen=True)
class Case:
    """A task and a way to split it, which must not matter."""

    task: str
    zero_stage: int = 0
    micro: int = EVERYTHING
    micro_rollout: int = EVERYTHING
    more: str = ""
    extra_columns: int = 0
    no_compiler: bool = False
    lockstep: bool = False

    @property
    def name(self) -> str:
        """A name for folders and reports."""
        about = [self.task, f"zero{self.zero_stage}", f"micro{self.micro}", f"rollout{self.micro_rollout}"]
        about += self.more.replace("--", "").split()
        about += [name for name in ("extra_columns", "no_compiler", "lockstep") if getattr(self, name)]
        return "-".join(about)


# 13 rows on two ranks are 6 and 7: with micro-batches of 1, 3 or 6 one rank has more of them than the other.
TASKS = {
    "step": Task("train_ppo", "--train_batch_size 14", n_rows=13, n_steps=1),
    # Optimizer steps of 6, 6 and 1 samples, so that a rank has none in the last; two epochs, two global steps.
    "steps": Task("train_ppo", "--train_batch_size 6 --rollout_batch_size 12 --max_epochs 2", n_rows=13, n_steps=2),
    "prompt": Task("train_ppo", "--train_batch_size 14", n_rows=1, n_steps=2),
    "samples": Task("train_ppo", "--train_batch_size 14 --n_samples_per_prompt 2", n_rows=5, n_steps=2),
    "grpo": Task(
        "train_ppo",
        """--train_batch_size 14 --n_samples_per_prompt 2 --advantage_estimator group_norm --loss_agg sequence_mean
        --use_kl_loss --kl_estimator k3 --entropy_coef 0.02 --eps_clip_high 0.3 --max_epochs 2""",
        n_rows=7,
        n_steps=2,
    ),
    "gspo": Task(
        "train_ppo",
        """--train_batch_size 14 --n_samples_per_prompt 2 --advantage_estimator rloo --policy_loss_type gspo
        --eps_clip 0.003 --max_epochs 2 --missing_eos_penalty 0.5 --normalize_reward --reward_normalizer running
        --kl_target 0.1 --kl_horizon 100""",
        n_rows=7,
        n_steps=2,
    ),
    "remax": Task(
        "train_ppo",
        """--train_batch_size 14 --advantage_estimator remax --policy_loss_type cispo --loss_agg constant
        --rollout_correction tis --overlong_filter""",
        n_rows=13,
        n_steps=2,
    ),
    "values": Task(
        "train_ppo",
        """--train_batch_size 14 --value_pretrain_steps 1 --lambd_critic 1.0 --adaptive_lambd_alpha 0.2
        --loss_agg sequence_mean""",
        n_rows=13,
        n_steps=2,
    ),
    "ema": Task(
        "train_ppo", "--train_batch_size 6 --rollout_batch_size 12 --enable_ema --ema_beta 0.5", n_rows=13, n_steps=1
    ),
    "sft": Task("train_sft", "--train_batch_size 14", n_rows=13, n_steps=2),
    "rm": Task("train_rm", "--train_batch_size 14 --margin_key margin", n_rows=13, n_steps=2),
    **{f"prm_{kind}": Task("train_prm", "--train_batch_size 14", n_rows=13, n_steps=2) for kind in ("hard", "soft")},
}
REFERENCES = {task: Case(task) for task in TASKS}
CASES = [
    *REFERENCES.values(),
    *(Case("step", stage, micro, 15 - micro) for stage in STAGES for micro in (1, 3, 8, 14)),
    *(Case("step", stage, 4, 4, extra_columns=7) for stage in STAGES),
    *(Case("steps", stage, 2, 3) for stage in STAGES),
    *(Case("prompt", stage, 2, 2) for stage in STAGES),
    *(Case("samples", stage, 3, 2) for stage in STAGES),
    *(Case(task, stage, 3, 4) for task in ("grpo", "gspo", "remax", "values", "ema") for stage in (0, 2, 3)),
    *(Case(task, stage, 3) for task in ("sft", "rm") for stage in STAGES),
    *(Case(task, stage, micro) for task in ("prm_hard", "prm_soft") for stage in (0, 3) for micro in (1, 3)),
    *(Case(task, stage, 3) for task in ("prm_hard", "prm_soft") for stage in (1, 2)),
    *(Case(task, 2, 4, extra_columns=7) for task in ("sft", "rm", "prm_hard")),
    *(Case("step", stage, 4, 4, "--gradient_checkpointing") for stage in (0, 3)),
    Case("step", 2, 4, 4, "--adam_offload"),
    *(Case("step", stage, 4, 4, "--adam_offload", no_compiler=True) for stage in (1, 3)),
    *(Case(task, 3, 4, 4, lockstep=True) for task in ("steps", "prompt")),
    *(Case("steps", stage, more="--micro_train_tokens 30 --micro_rollout_tokens 25") for stage in (0, 3)),
    *(Case("steps", stage, more="--offload_idle") for stage in (0, 2, 3)),
    *(Case(task, 3, 4, 4, "--max_num_seqs 2") for task in ("step", "samples")),
]


def in_every_run(ranks: int, case: Case) -> bool:
    """Whether a case is tried without --slow: on one rank stages 1 and 2 share all but a name with their neighbours."""
    if ranks == 1:
        return case.zero_stage in (0, 3)
    return case.zero_stage != 1 or case.task != "step" or case.micro in (3, 4)


def table(*ranks: int) -> list[Any]:
    """Parameters ``ranks`` and ``case``."""
    return [
        pytest.param(n, case, id=f"{n}-{case.name}", marks=() if in_every_run(n, case) else pytest.mark.slow)
        for n in ranks
        for case in CASES
    ]


@dataclass(frozen=True)
class Outcome:
    """What a case left behind."""

    models: dict[str, Tensor]
    """All parameters of a model as one vector, by role."""
    updates: dict[str, Tensor]
    """What training added to them."""
    result: dict[str, Any]


def as_vector(folder: Path) -> Tensor:
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def write_solutions(folder: Path) -> None:
    """26 solutions, one to five steps each: "h" is the placeholder, "a" and "b" are good and bad."""
    rng = random.Random(7)
    hard, soft = [], []
    for i in range(26):
        steps = ["".join(rng.choices("cdefg", k=rng.randint(1, 6))) + "h" for _ in range(1 + i % 5)]
        hard.append({"input": "".join(steps), "label": [rng.choice("ab") for _ in steps]})
        soft.append({"input": "".join(steps), "label": [rng.random() for _ in steps]})
    for name, rows in (("hard", hard), ("soft", soft)):
        (folder / f"prm_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments_of(case: Case, tiny: Path, folder: Path) -> list[str]:
    task = TASKS[case.task]
    common = f"{task.arguments} --zero_stage {case.zero_stage} --micro_train_batch_size {case.micro} {case.more}"
    common += " --lr_warmup_ratio 0 --lr_scheduler constant"
    if task.command == "train_sft":
        common += f" --pretrain {tiny}/actor --dataset {tiny}/sft.jsonl --learning_rate 1e-3"
        common += f" --eval_dataset {tiny}/sft.jsonl"
    elif task.command == "train_rm":
        common += f" --pretrain {tiny}/reward --dataset {tiny}/preference.jsonl --learning_rate 1e-3"
        common += f" --prompt_key prompt --eval_dataset {tiny}/preference.jsonl"
    elif task.command == "train_prm":
        rows = folder / f"{case.task}.jsonl"
        common += f" --pretrain {tiny}/actor --dataset {rows} --eval_dataset {rows} --learning_rate 1e-3"
        common += " --input_key input --label_key label --placeholder_token h --reward_tokens a b"
    else:
        common += f" --pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl"
        common += f" --pretrain_data {tiny}/documents.jsonl --micro_rollout_batch_size {case.micro_rollout}"
        common += " --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --generate_max_len 12 --temperature 0.8"
        common += " --init_kl_coef 0.1"
        common += "" if "--rollout_batch_size" in common else " --rollout_batch_size 14"
    return common.split()


def described(case: Case, tiny: Path, folder: Path) -> dict[str, Any]:
    """A case as run_steps.py reads it."""
    task = TASKS[case.task]
    about = {name: getattr(case, name) for name in ("name", "extra_columns", "no_compiler", "lockstep")}
    steps = {"command": task.command, "n_rows": task.n_rows, "n_steps": task.n_steps}
    return about | steps | {"arguments": arguments_of(case, tiny, folder)}


@pytest.fixture(scope="module")
def folders(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str], pytestconfig: pytest.Config
) -> Callable[[int], Path]:
    """``folders(ranks)``: what all cases left behind on so many ranks; they run in one launch."""
    slow = pytestconfig.getoption("slow")

    @cache
    def get(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        write_solutions(folder)
        cases = [described(case, tiny, folder) for case in CASES if slow or in_every_run(ranks, case)]
        (folder / "cases.json").write_text(json.dumps(cases))
        launch(ranks, SCRIPT, folder / "cases.json", folder)
        return folder

    return get


@pytest.fixture
def outcome(tiny: Path, folders: Callable[[int], Path]) -> Callable[[int, Case], Outcome]:
    """The outcome of a case on so many ranks."""

    def get(ranks: int, case: Case) -> Outcome:
        folder = folders(ranks) / case.name
        command = TASKS[case.task].command
        starts = {"model": "actor"}
        if command == "train_ppo" and "--advantage_estimator" not in TASKS[case.task].arguments:
            starts["model_critic"] = "reward"
        if command == "train_rm":
            starts = {"model": "reward"}
        models = {role: as_vector(folder / role) for role in starts}
        updates = {role: models[role] - as_vector(tiny / start) for role, start in starts.items()}
        return Outcome(models, updates, json.loads((folder / "result.json").read_text()))

    return get


@pytest.mark.parametrize(("ranks", "case"), table(1, 2))
def test_the_split_never_matters(outcome: Callable[[int, Case], Outcome], ranks: int, case: Case) -> None:
    got, want = outcome(ranks, case), outcome(1, REFERENCES[case.task])

    tokens = [[(s["group"], s["prompt"], s["response"]) for s in step] for step in got.result["samples"]]
    assert tokens == [[(s["group"], s["prompt"], s["response"]) for s in step] for step in want.result["samples"]]
    for role in want.models:
        difference = (got.models[role] - want.models[role]).norm()
        assert difference <= PARAMETER_TOLERANCE * want.models[role].norm(), role
        assert difference <= UPDATE_TOLERANCE * want.updates[role].norm(), role
    for step, metrics in enumerate(want.result["metrics"]):
        of_results = {name: value for name, value in metrics.items() if not name.startswith(("time/", "speed/"))}
        for name, value in of_results.items():
            assert got.result["metrics"][step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)


@pytest.mark.parametrize("task", TASKS)
def test_the_steps_are_large_enough_to_tell(outcome: Callable[[int, Case], Outcome], task: str) -> None:
    reference = outcome(1, REFERENCES[task])
    for role, update in reference.updates.items():
        assert update.norm() > 1e-3 * reference.models[role].norm(), role


@pytest.mark.parametrize(("ranks", "case"), table(2))
def test_the_cases_are_what_they_say(outcome: Callable[[int, Case], Outcome], ranks: int, case: Case) -> None:
    result = outcome(ranks, case).result
    assert result["zero_stage"] == case.zero_stage
    assert all(share <= 0.52 if case.zero_stage == 3 else share == 1 for share in result["shares"].values())
    assert (result["wide_batches"] > 0) == (case.extra_columns > 0)


def test_prompts_and_steps_have_responses_of_their_own(outcome: Callable[[int, Case], Outcome]) -> None:
    first, second = outcome(2, REFERENCES["samples"]).result["samples"]
    assert [sample["group"] for sample in first] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [sample["group"] for sample in second] == [5, 5, 6, 6, 7, 7, 8, 8, 9, 9]
    assert first[0]["prompt"] == first[1]["prompt"]
    assert len({tuple(sample["response"]) for sample in first + second}) > 12
    reasons = {sample["finish_reason"] for sample in outcome(2, REFERENCES["step"]).result["samples"][0]}
    assert reasons == {"stop", "length"}
