"""The split never matters: how samples fall into micro-batches, ranks and ZeRO stages changes nothing.

Each case trains a few steps from the same start. What it may differ in from its reference (one rank, no ZeRO, one
micro-batch) is the order in which numbers are added. What is promised to users is in ``docs/hosts.md``.
"""

import random
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.conftest import write_rows
from tests.distributed.runs import outcome, vector

STAGES = (0, 1, 2, 3)
CASES_OF_A_LAUNCH = 40  # more of them, beside other tests, take longer than a launch may
EVERYTHING = 100  # as micro-batch size: more than there is
LORA, LORA_SCALE = "--lora_rank 4", 16 / 4
CAN_COMPILE = shutil.which("g++") is not None and " " not in torch.__file__

PARAMETER_TOLERANCE = 1e-5
"""Relative, of the norm of all parameters; 1e-6 was measured."""
UPDATE_TOLERANCE = 1e-3
"""Relative, of the norm of what training changed; 8e-5 was measured for PPO and 1.3e-4 for SFT.

Adam's first updates have the size of the learning rate, so a gradient that is zero but for rounding counts as well.
"""
BF16_TOLERANCE = 5e-3
"""The same in bfloat16 with micro-batches of one sample, for the same ZeRO stage or another; 0 was measured.

Forwards are then the same on all ranks; gradients are added in float32 in another order.
"""
BF16_LORA_STAGE_3_TOLERANCE = 0.2
"""The same for LoRA under ZeRO-3 against other stages; 0.11 was measured, where bfloat16 was 0.06 to 0.19 from float32.

DeepSpeed's hooks make autograd add gradients that reach an activation through weights and adapters in another order.
"""


class Task(NamedTuple):
    """What is trained on what; decides the result. Without rows and steps all of ``fit()``."""

    n_rows: int
    n_steps: int
    command: str
    arguments: str


@dataclass(frozen=True)
class Case:
    """A task and a way to split it, which must not matter."""

    task: str
    zero_stage: int = 0
    micro: int = EVERYTHING
    micro_rollout: int = EVERYTHING
    more: str = ""
    lockstep: bool = False

    @property
    def name(self) -> str:
        """A name for folders and reports."""
        about = [
            self.task,
            f"zero{self.zero_stage}",
            f"micro{self.micro}",
            f"rollout{self.micro_rollout}",
        ]
        about += self.more.replace("--", "").split()
        return "-".join(about + ["lockstep"] * self.lockstep)


REWARD = "def reward_fn(response):\n    return float('a' in response[:3])\n"
# Of each task: rows of a step, steps, command and flags. 13 rows on two ranks are 6 and 7: with micro-batches of 1, 3
# or 6 one rank has more of them than the other. "steps" has optimizer steps of 6, 6 and 1 samples, so a rank has none
# in the last; "uneven" of 12 and 1, twice: on four ranks all but one have nothing. In "function" and "verified" all
# ranks but one have no prompt, so nothing to sample, to score or to train on. "dynamic" is an episode.
TABLE = """
step      13 1 ppo --train_batch_size 14
steps     13 2 ppo --train_batch_size 6 --rollout_batch_size 12 --max_epochs 2
uneven    13 1 ppo --train_batch_size 12 --rollout_batch_size 24 --max_epochs 2
prompt     1 2 ppo --train_batch_size 14
function   1 2 ppo --train_batch_size 12 --rollout_batch_size 24 --max_epochs 2 --reward_fn {folder}/reward.py
                   --critic_pretrain {tiny}/reward --normalize_reward running
verified   1 2 ppo --train_batch_size 12 --rollout_batch_size 24 --max_epochs 2 --verifiable_reward length:4
                   --n_samples_per_prompt 2 --advantage_estimator rloo
dynamic    0 0 ppo --train_batch_size 8 --rollout_batch_size 4 --reward_fn {folder}/reward.py --dynamic_sampling
                   --n_samples_per_prompt 4 --advantage_estimator group_norm
samples    5 2 ppo --train_batch_size 14 --n_samples_per_prompt 2
grpo       7 2 ppo --train_batch_size 14 --n_samples_per_prompt 2 --advantage_estimator group_norm --max_epochs 2
                   --loss_agg sequence_mean --use_kl_loss --kl_estimator k3 --entropy_coef 0.02 --eps_clip_high 0.3
gspo       7 2 ppo --train_batch_size 14 --n_samples_per_prompt 2 --advantage_estimator rloo --max_epochs 2
                   --policy_loss_type gspo --eps_clip 0.003 --missing_eos_penalty 0.5 --normalize_reward
                   running --kl_target 0.1 --kl_horizon 100
remax     13 2 ppo --train_batch_size 14 --advantage_estimator remax --policy_loss_type cispo --loss_agg constant
                   --rollout_correction tis --overlong_filter
values    13 2 ppo --train_batch_size 14 --value_pretrain_steps 1 --lambd_critic 1.0 --adaptive_lambd_alpha 0.2
                   --loss_agg sequence_mean
groups     5 2 ppo --train_batch_size 14 --n_samples_per_prompt 4 --advantage_estimator group_norm --max_epochs 2
                   --use_kl_loss --kl_estimator k3 --prompt_data {folder}/long.jsonl
groups_gae 5 1 ppo --train_batch_size 14 --n_samples_per_prompt 4 --prompt_data {folder}/long.jsonl
images     5 2 ppo --train_batch_size 14 --n_samples_per_prompt 4 --advantage_estimator group_norm --max_epochs 2
                   --use_kl_loss --kl_estimator k3
images_gae 13 2 ppo --train_batch_size 14
images_sft 13 2 sft --train_batch_size 14 --pretrain {tiny}/llava --dataset {tiny}/llava/images.jsonl
                   --eval_dataset {tiny}/llava/images.jsonl --image_key images --no_freeze_vision_tower
images_rm  13 2 rm --train_batch_size 14 --pretrain {tiny}/llava/reward --dataset {tiny}/llava/pairs.jsonl
                   --eval_dataset {tiny}/llava/pairs.jsonl --prompt_key input --image_key images
images_scored 7 1 ppo --train_batch_size 14 --n_samples_per_prompt 2 --advantage_estimator rloo
                   --reward_pretrain {tiny}/llava/reward
images_agent 7 1 ppo --train_batch_size 14 --n_samples_per_prompt 2 --advantage_estimator rloo
                   --agent {tiny}/llava/gallery.py:solve --apply_chat_template
images_shown 7 1 ppo --train_batch_size 14 --n_samples_per_prompt 2 --advantage_estimator rloo --pretrain {tiny}/llava
                   --agent {tiny}/llava/gallery.py:solve --apply_chat_template --reward_pretrain {tiny}/llava/reward
ema       13 1 ppo --train_batch_size 6 --rollout_batch_size 12 --ema_beta 0.5
sft       13 2 sft --train_batch_size 14 --pretrain {tiny}/actor --dataset {tiny}/sft.jsonl
                   --eval_dataset {tiny}/sft.jsonl
rm        13 2 rm  --train_batch_size 14 --pretrain {tiny}/reward --dataset {tiny}/preference.jsonl
                   --eval_dataset {tiny}/preference.jsonl --prompt_key prompt --margin_key margin
prm_hard  13 2 prm --train_batch_size 14 --pretrain {tiny}/actor --dataset {folder}/prm_hard.jsonl
                   --eval_dataset {folder}/prm_hard.jsonl --input_key input --label_key label --placeholder_token h
                   --reward_tokens a b
"""
ROWS = [entry.split() for entry in re.split(r"\n(?=\w)", TABLE.strip())]
TASKS = {
    name: Task(int(rows), int(steps), f"train_{kind}", " ".join(flags))
    for name, rows, steps, kind, *flags in ROWS
}
TASKS["prm_soft"] = TASKS["prm_hard"]._replace(
    arguments=TASKS["prm_hard"].arguments.replace("hard", "soft")
)
GROUPS, IMAGES = ("groups", "groups_gae"), ("images", "images_gae", "images_scored", "images_agent")
CRITIC_FREE = (
    "reinforce",
    "reinforce_baseline",
    "rloo",
    "dr_grpo",
    "remax",
)  # estimators, with the KL in the reward
for estimator in CRITIC_FREE:
    more = f" --max_epochs 2 --advantage_estimator {estimator}"
    TASKS[f"groups_{estimator}"] = TASKS["groups_gae"]._replace(
        arguments=TASKS["groups_gae"].arguments + more
    )
ALGORITHMS, SUPERVISED = (
    ("grpo", "gspo", "remax", "values", "ema"),
    ("sft", "rm", "prm_hard", "prm_soft"),
)
FLOAT32 = [
    *(Case("step", stage, micro, 15 - micro) for stage in STAGES for micro in (1, 3, 8, 14)),
    *(Case("steps", stage, 2, 3) for stage in STAGES),
    *(Case("prompt", stage, 2, 2) for stage in STAGES),
    *(Case("samples", stage, 3, 2) for stage in STAGES),
    *(Case(task, stage, 3, 4) for task in ALGORITHMS for stage in (0, 2, 3)),
    *(Case(task, stage, micro) for task in SUPERVISED for stage in STAGES for micro in (1, 3)),
    *(Case(task, stage, micro, 3) for task in IMAGES for stage in (0, 2, 3) for micro in (1, 4)),
    *(Case("images_shown", stage, 4, 3) for stage in (0, 3)),
    *(Case("images", stage, 4, 4, LORA) for stage in (2, 3)),
    *(Case("images", 0, 4, 3, more) for more in ("--no_freeze_vision_tower", "--freeze_connector")),
    *(Case(task, stage, 3) for task in ("images_sft", "images_rm") for stage in (0, 2, 3)),
    *(
        Case(task, stage, micro, 3)
        for task in GROUPS
        for stage in STAGES
        for micro in (3, EVERYTHING)
    ),
    *(Case(f"groups_{estimator}", stage, 3, 3) for estimator in CRITIC_FREE for stage in (0, 3)),
    *(Case(task, stage, 4, 4, LORA) for task in GROUPS for stage in (2, 3)),
    *(
        Case(task, 2, 4, 4, more)
        for task in GROUPS
        for more in ("--gradient_checkpointing", "--offload_idle")
    ),
    *(Case(task, 3, more="--micro_train_tokens 90 --micro_rollout_tokens 70") for task in GROUPS),
    *[Case("groups", 0, 4, 4, "--compile")] * CAN_COMPILE,
    *(Case("uneven", stage, 3, 3, more) for stage in STAGES for more in ("", LORA)),
    *(Case("uneven", 3, 3, 3, more, lockstep=True) for more in ("", LORA)),
    *(Case(task, stage, 3, 3) for task in ("function", "verified", "dynamic") for stage in (0, 3)),
    *(Case("step", stage, 4, 4, "--gradient_checkpointing") for stage in (0, 3)),
    *(Case("step", stage, 4, 4, "--adam_offload") for stage in (2, 3)),
    *(Case(task, 3, 4, 4, lockstep=True) for task in ("steps", "prompt")),
    *(
        Case("steps", stage, more="--micro_train_tokens 30 --micro_rollout_tokens 25")
        for stage in (0, 3)
    ),
    *(Case("steps", stage, more="--offload_idle") for stage in (0, 2, 3)),
    *(Case(task, 3, 4, 4, "--max_num_seqs 2") for task in ("step", "samples")),
    # What makes training faster does not change it: compiled layers, the engine's log-probs for the old policy's, and
    # the critic's values from the forward that is trained on, as without --overlong_filter in "step" and "values".
    *(
        Case("step", 0, 4, 4, "--compile"),
        Case("step", 2, 4, 4, "--compile --gradient_checkpointing"),
    )
    * CAN_COMPILE,
    *(Case("step", 2, 4, 4, f"{LORA} --compile"), Case("images_sft", 2, 3, more="--compile"))
    * CAN_COMPILE,
    Case("steps", 3, 4, 4, "--old_log_probs recompute"),
    *(
        Case("step", stage, 4, 4, "--overlong_filter" + " --offload_idle" * (stage == 3))
        for stage in (0, 3)
    ),
    *(Case("values", stage, 3, 4, "--overlong_filter") for stage in (0, 1)),
]
BF16 = [
    Case("uneven", stage, 1, 1, f"--bf16 {more}".strip()) for stage in STAGES for more in ("", LORA)
]
BF16 += [replace(BF16[-1], lockstep=True)]


def reference(case: Case) -> Case:
    """What a case must equal, on one rank: prompts are read for each response.

    In bfloat16 stage 0 is stage 1 (DeepspeedStrategy says so).
    """
    if "--bf16" in case.more:
        return Case(case.task, 1, 1, 1, case.more)
    shares = case.task == "images" or "groups" in case.task
    more = [
        part
        for part in (LORA, "--no_freeze_vision_tower", "--freeze_connector", "--overlong_filter")
        if part in case.more
    ]
    return Case(case.task, more=" ".join(more + ["--share_prompts off"] * shares))


REFERENCES = list(dict.fromkeys(map(reference, [*FLOAT32, *BF16])))
EVERY_RUN = {
    # The split of micro-batches, and all that is trained, once on two ranks under one of the stages.
    *((2, Case("step", stage, micro, 15 - micro)) for stage, micro in ((0, 1), (2, 3), (3, 8))),
    *(
        (2, case)
        for case in FLOAT32
        if case.task == "step"
        and case.zero_stage > 1
        and case.more
        and "--compile" not in case.more
    ),
    (2, Case("values", 1, 3, 4, "--overlong_filter")),
    *(
        (2, case)
        for case in FLOAT32
        if case.task == "steps" and case.zero_stage > 2 and (case.more or case.lockstep)
    ),
    (2, Case("samples", 3, 3, 2)),
    *(
        (n, Case(task, stage, 3, 3))
        for n, task, stage in ((1, "groups", 0), (2, "groups", 3), (2, "groups_gae", 2))
    ),
    (2, Case("groups_rloo", 3, 3, 3)),
    *(
        (2, case)
        for case in (Case("images", 3, 4, 3), Case("images_gae", 2, 1, 3), Case("images_sft", 3, 3))
    ),
    *(
        (2, case)
        for case in (
            Case("images_rm", 3, 3),
            Case("images_scored", 3, 4, 3),
            Case("images_agent", 3, 4, 3),
        )
    ),
    (2, Case("images_shown", 3, 4, 3)),  # by the agent alone
    (2, Case("images", 2, 4, 4, LORA)),
    (2, Case("groups", 2, 4, 4, LORA)),
    (2, Case("groups", 2, 4, 4, "--gradient_checkpointing")),
    (1, Case("groups", 3, more="--micro_train_tokens 90 --micro_rollout_tokens 70")),
    *(
        (2, Case(task, stage, 3, 4))
        for stage, task in zip((3, 2, 3, 2), ("grpo", "gspo", "remax", "ema"), strict=True)
    ),
    *((2, Case(task, stage, micro)) for task, stage, micro in (("sft", 3, 3), ("rm", 2, 1))),
    # Stages where all ranks but one have nothing, adapters and bfloat16, on four ranks.
    *((4, Case("uneven", stage, 3, 3, more)) for stage, more in ((0, ""), (3, LORA))),
    *((4, Case(task, 3, 3, 3)) for task in ("function", "verified", "dynamic")),
    (4, Case("uneven", 3, 1, 1, "--bf16")),
    (1, Case("uneven", 3, 1, 1, "--bf16")),
    # On one rank only the micro-batches are left to differ.
    (1, Case("step", 3, 3, 12)),
    *[(1, Case("step", 0, 4, 4, "--compile"))] * CAN_COMPILE,
}
EVERY_RUN |= {(1, reference(case)) for _, case in EVERY_RUN}


def table(cases: Iterable[Case], ranks: Iterable[int] = (1, 2, 4)) -> list[Any]:
    """Parameters ``ranks`` and ``case``; four ranks only for what the table of docs/hosts.md is about."""
    return [
        pytest.param(
            n, case, id=f"{n}-{case.name}", marks=() if (n, case) in EVERY_RUN else pytest.mark.slow
        )
        for n in ranks
        for case in cases
        if n < 4 or case.task in ("uneven", "function", "verified", "dynamic")
    ]


def write_solutions(folder: Path) -> None:
    """26 solutions, one to five steps each: "h" is the placeholder, "a" and "b" are good and bad."""
    rng = random.Random(7)
    hard, soft = [], []
    for i in range(26):
        steps = ["".join(rng.choices("cdefg", k=rng.randint(1, 6))) + "h" for _ in range(1 + i % 5)]
        hard.append({"input": "".join(steps), "label": [rng.choice("ab") for _ in steps]})
        soft.append({"input": "".join(steps), "label": [rng.random() for _ in steps]})
    for name, rows in (("hard", hard), ("soft", soft)):
        write_rows(folder / f"prm_{name}.jsonl", rows)


def write_long_prompts(folder: Path) -> None:
    """Ten, of 16 tokens and more."""
    rng = random.Random(8)
    write_rows(
        folder / "long.jsonl",
        [{"input": "".join(rng.choices("abcdefgh", k=16 + i))} for i in range(10)],
    )


def arguments_of(case: Case) -> str:
    task = TASKS[case.task]
    flags = f"{task.arguments} --zero_stage {case.zero_stage} --micro_train_batch_size {case.micro} {case.more}"
    flags += " --lr_warmup_ratio 0 --lr_scheduler constant"
    if task.command != "train_ppo":
        return f"{flags} --learning_rate 1e-3"
    if case.task in IMAGES:
        flags += (
            " --prompt_data {tiny}/llava/images.jsonl --image_key images --pretrain {tiny}/llava"
        )
    if case.task in ("images", "images_gae"):
        flags += " --verifiable_reward length:4"
    flags += "" if "--prompt_data" in flags else " --prompt_data {tiny}/prompts.jsonl"
    flags += "" if "--pretrain " in flags else " --pretrain {tiny}/actor"
    flags += """ --pretrain_data {tiny}/documents.jsonl
        --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --generate_max_len 12 --temperature 0.8
        --init_kl_coef 0.1"""
    rewarded = any(
        flag in flags for flag in ("--reward_fn", "--verifiable", "--reward_pretrain", "--agent ")
    )
    flags += "" if rewarded else " --reward_pretrain {tiny}/reward"
    flags += "" if "--rollout_batch_size" in flags else " --rollout_batch_size 14"
    return f"{flags} --micro_rollout_batch_size {case.micro_rollout}"


def starts(case: Case) -> dict[str, str]:
    """The folders of a case's models, and of those that it starts from."""
    if case.task == "rm":
        return {"model": "reward"}
    if case.task == "images_rm":
        return {"model": "llava/reward"}
    if case.task.startswith("images"):
        return {"model": "llava"}  # the head of the critic, which starts from it, is new
    has_critic = (
        TASKS[case.task].command == "train_ppo"
        and "--advantage_estimator" not in TASKS[case.task].arguments
    )
    return {"model": "actor"} | ({"model_critic": "reward"} if has_critic else {})


def update(folder: Path, start: Path) -> Tensor:
    """What training added to the weights of ``start``, as one vector; of adapters their product."""
    if not (folder / "adapter_model.safetensors").exists():
        return vector(folder) - vector(start)
    base, trained = load_file(start / "model.safetensors"), {}
    adapters = {
        name: w.double() for name, w in load_file(folder / "adapter_model.safetensors").items()
    }
    for name, w in adapters.items():
        if "lora_A" in name:
            trained[name] = LORA_SCALE * adapters[name.replace("lora_A", "lora_B")] @ w
        elif "lora_B" not in name:  # the critic's head is trained whole
            trained[name] = w - base[name.removeprefix("base_model.model.")].double()
    return torch.cat([trained[name].flatten() for name in sorted(trained)])


def described(case: Case) -> dict[str, Any]:
    """A case as run_cases.py reads it."""
    return vars(case) | TASKS[case.task]._asdict() | {"arguments": arguments_of(case)}


Get = Callable[[int, Case], dict[str, Any]]


@pytest.fixture(scope="module")
def get(
    tiny: Path, tmp_path_factory: Any, run_cases: Callable[..., str], pytestconfig: pytest.Config
) -> Get:
    """``get(ranks, case)``: its outcome with ``updates`` by role; cases on so many ranks share launches."""

    @cache
    def folder_of(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        write_solutions(folder)
        write_long_prompts(folder)
        (folder / "reward.py").write_text(REWARD)
        chosen = [p.values[1] for p in table([*REFERENCES, *FLOAT32, *BF16], [ranks])]
        if not pytestconfig.getoption("slow"):
            chosen = [case for case in chosen if (ranks, case) in EVERY_RUN]
        for first in range(0, len(chosen), CASES_OF_A_LAUNCH):
            launched = chosen[first : first + CASES_OF_A_LAUNCH]
            run_cases(ranks, folder, {case.name: described(case) for case in launched})
        return folder

    def read(ranks: int, case: Case) -> dict[str, Any]:
        folder = folder_of(ranks) / case.name
        updates = {
            role: update(folder / role, tiny / start) for role, start in starts(case).items()
        }
        return outcome(folder) | {"updates": updates}

    return read


def tokens(found: dict[str, Any]) -> list[list[tuple[Any, ...]]]:
    """Of each step: number of the prompt, its tokens, the response."""
    return [[(s["group"], s["prompt"], s["response"]) for s in step] for step in found["samples"]]


def distance(first: Tensor, second: Tensor) -> float:
    """Of two vectors, relative to the second."""
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize(("ranks", "case"), table(FLOAT32))
def test_the_split_never_matters(get, tiny, ranks, case):
    got, want = get(ranks, case), get(1, reference(case))
    assert tokens(got) == tokens(want)
    for role, start in starts(case).items():
        difference = (got["updates"][role] - want["updates"][role]).norm()
        assert difference <= UPDATE_TOLERANCE * want["updates"][role].norm(), role
        assert difference <= PARAMETER_TOLERANCE * vector(tiny / start).norm(), role
        assert want["updates"][role].norm() > 1e-3 * vector(tiny / start).norm(), (
            "too small to tell"
        )
    measured = [found["metrics"] or found["logged"] for found in (got, want)]
    for step, (mine, other) in enumerate(zip(*measured, strict=True)):
        if "old_log_probs" in case.more:  # which decides what is measured
            continue
        for name in (
            name for name in other if not name.startswith(("time/", "speed/", "agent/prefix_reuse"))
        ):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), (step, name)
    assert got["zero_stage"] == case.zero_stage
    several = "--n_samples_per_prompt" in TASKS[case.task].arguments
    assert got.get("shares_prompts", False) == (several and "--share_prompts off" not in case.more)
    shares = got["shares"].values()
    assert all(
        share <= 1 / ranks + 0.02 if case.zero_stage == 3 else share == 1 for share in shares
    )


@pytest.mark.parametrize(("ranks", "case"), table(BF16))
def test_ranks_and_stages_never_matter_in_bfloat16(get, tiny, ranks, case):
    """Where forwards are the same; other micro-batches are another rounding."""
    got, same_stage, other_stage = (
        get(ranks, case),
        get(1, replace(case, lockstep=False)),
        get(1, reference(case)),
    )
    across_stages = (
        BF16_LORA_STAGE_3_TOLERANCE
        if LORA in case.more and case.zero_stage == 3
        else BF16_TOLERANCE
    )
    for want, tolerance in ((same_stage, BF16_TOLERANCE), (other_stage, across_stages)):
        assert tokens(got) == tokens(want)
        for role in want["updates"]:
            assert distance(got["updates"][role], want["updates"][role]) <= tolerance, role
    assert got["zero_stage"] == max(case.zero_stage, 1)
    assert got["buffer_types"] == ["torch.float32"], (
        "rotary frequencies in bfloat16 would blur positions"
    )
    for role, start in starts(case).items() if LORA not in case.more else ():
        assert {
            w.dtype for w in load_file(got["folder"] / role / "model.safetensors").values()
        } == {torch.bfloat16}
        assert got["updates"][role].norm() > 1e-3 * vector(tiny / start).norm(), "too small to tell"


def test_prompts_and_steps_have_responses_of_their_own(get):
    first, second = get(1, Case("samples"))["samples"]
    assert [sample["group"] for sample in first] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [sample["group"] for sample in second] == [5, 5, 6, 6, 7, 7, 8, 8, 9, 9]
    assert first[0]["prompt"] == first[1]["prompt"]
    assert len({tuple(sample["response"]) for sample in first + second}) > 12
    assert {s["finish_reason"] for s in get(1, Case("uneven"))["samples"][0]} == {"stop", "length"}
