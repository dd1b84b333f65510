"""A run that was stopped and resumed is bit for bit the run that never stopped.

Three launches of all cases: undisturbed; stopped somewhere as a signal would; and a fresh process that resumes. What
is compared is everything: the last checkpoint byte for byte (weights, Adam's moments, averages, random numbers of each
rank, the trainer's state), the model, the sampled texts and the metrics.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import OPTIONS, left_by, outcome

PPO = """--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --rollout_batch_size 8 --train_batch_size 4
    --micro_train_batch_size 2 --micro_rollout_batch_size 4 --num_episodes 2 --generate_max_len 6
    --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --save_steps 2 --max_ckpt_num 1 --init_kl_coef 0.1"""
AGENT = """--pretrain {tiny}/chat --environment {tiny}/game.py:Game --n_envs 4 --n_samples_per_prompt 2 --max_steps 5
    --train_batch_size 4 --micro_train_batch_size 2 --micro_rollout_batch_size 4 --generate_max_len 4 --max_turns 3
    --episode_max_len 100 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --save_steps 2 --max_ckpt_num 1
    --init_kl_coef 0.1 --eval_n_envs 3 --eval_steps 2"""
AT_ONCE = PPO.replace(
    "--train_batch_size 4", "--train_batch_size 8"
)  # the critic's first step makes experience
REWARD = "--reward_pretrain {tiny}/reward"
PTX = "--pretrain_data {tiny}/documents.jsonl"
IMAGES = PPO.replace("{tiny}/prompts.jsonl", "{tiny}/llava/images.jsonl").replace(
    "{tiny}/actor", "{tiny}/llava"
)
IMAGES += " --image_key images --verifiable_reward length:4 --zero_stage 2"
LORA = "--lora_rank 2 --lora_dropout 0.3"
SUPERVISED = """--pretrain {tiny}/actor --micro_train_batch_size 2 --train_batch_size 4 --max_epochs 2 --save_steps 5
    --max_ckpt_num 1 --learning_rate 1e-3"""


@dataclass(frozen=True)
class Case:
    """A run, and where it is stopped: at a share of all places at which it can be."""

    name: str
    arguments: str
    share: float = 0.0
    command: str = "train_ppo"
    ranks: tuple[int, ...] = (1, 2)
    slow: tuple[int, ...] = ()
    """Numbers of ranks that are tried with --slow only."""
    check: int | None = None
    """The number of the check, instead of a share."""
    own_loop: bool = False


def everything(stage: int) -> str:
    """What has a state of its own."""
    return f"""{PPO} {REWARD} {PTX} --zero_stage {stage} --max_epochs 2 --ema_beta 0.5 --kl_target 0.05
        --kl_horizon 100 --normalize_reward running --eval_data {{tiny}}/prompts.jsonl
        --eval_steps 3 --keep_best eval_reward --save_hf_ckpt --config {OPTIONS}/small_dumps.yaml
        --dump_rollouts {{folder}}/everything-zero{stage}/model/rollouts"""


CASES = [
    *(
        Case(
            f"everything-zero{stage}",
            everything(stage),
            share,
            slow=((2,), (1, 2), (1, 2), (1,))[stage],
        )
        for stage, share in enumerate((0.2, 0.45, 0.6, 0.85))
    ),
    *(
        Case(
            f"lora-zero{stage}",
            f"{PPO} {REWARD} {PTX} {LORA} --zero_stage {stage}",
            share,
            slow=slow,
        )
        for stage, share, slow in ((0, 0.4, (2,)), (2, 0.7, (1, 2)), (3, 0.25, (1,)))
    ),
    Case("bf16-zero1", f"{PPO} {REWARD} --zero_stage 1 --bf16", 0.5, slow=(1, 2)),
    Case(
        "bf16-zero3",
        f"{PPO} {REWARD} --zero_stage 3 --bf16 --gradient_checkpointing",
        0.3,
        slow=(1,),
    ),
    Case("images", IMAGES, 0.4, slow=(1,)),
    Case("offload", f"{PPO} {REWARD} --zero_stage 2 --adam_offload", 0.35, slow=(1,)),
    Case("weights-twice", f"{PPO} {REWARD} --zero_stage 3 --zpg 2", 0.65, ranks=(2,)),
    Case(
        "mixed-and-dynamic",
        f"{PPO.replace('{tiny}/prompts.jsonl', '{tiny}/prompts.jsonl,{tiny}/sft.jsonl')} {REWARD} --input_key input "
        "--prompt_data_probs 0.3,0.7 --n_samples_per_prompt 2 --dynamic_sampling --advantage_estimator group_norm",
        0.55,
        slow=(1,),
    ),
    Case(
        "at-once-zero2", f"{AT_ONCE} {REWARD} {PTX} --zero_stage 2 --max_epochs 2", 0.4, slow=(1,)
    ),
    Case("at-once-bf16-zero3", f"{AT_ONCE} {REWARD} --zero_stage 3 --bf16", 0.55, slow=(1, 2)),
    Case("own-loop", f"{PPO} {REWARD} {PTX} --max_epochs 2", 0.5, slow=(2,), own_loop=True),
    *(
        Case(
            f"environment-{kind}",
            f"{AGENT} --advantage_estimator {kind}"
            + (" --ema_beta 0.992" if kind == "gae" else " --dynamic_sampling"),
            share,
            slow=slow,
        )
        for kind, share, slow in (("gae", 0.4, (2,)), ("rloo", 0.6, (1,)))
    ),
    Case(
        "own-algorithm",
        f"{PPO} {REWARD} --kl_controller {{tiny}}/own.py:Growing --prompt_order {{tiny}}/own.py:mixed",
        0.6,
        slow=(1,),
    ),
    Case("max-steps", f"{PPO} {REWARD} --max_steps 5", 0.7, slow=(2,)),
    Case("values-first", f"{PPO} {REWARD} --value_pretrain_steps 3", 0.45, slow=(2,)),
    Case(
        "supervised",
        f"{SUPERVISED} {LORA} --dataset {{tiny}}/sft.jsonl --eval_dataset {{tiny}}/sft.jsonl --keep_best eval_loss",
        0.6,
        "train_sft",
        slow=(1,),
    ),
    Case(
        "reward-model",
        f"{SUPERVISED} --dataset {{tiny}}/preference.jsonl --zero_stage 3 --save_hf_ckpt "
        "--eval_dataset {tiny}/preference.jsonl --keep_best eval_accuracy",
        0.3,
        "train_rm",
        slow=(1,),
    ),
    # The places of the third step: its start, generation, scores, and its evaluation: generation, scores.
    *(
        Case(
            f"place{number}",
            f"{PPO} {REWARD} {PTX} --eval_data {{tiny}}/prompts.jsonl --eval_steps 1",
            check=10 + number,
            ranks=(1,),
            slow=(1,) if number in (2, 4) else (),
        )
        for number in (1, 2, 3, 4, 5)
    ),
]


@pytest.fixture(scope="module", params=(1, 2), ids=("1 rank", "2 ranks"))
def runs(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    run_cases: Callable[..., str],
) -> tuple[int, Path]:
    """The folder with the undisturbed runs in ``whole`` and the stopped and resumed ones in ``parts``."""
    ranks, folder = request.param, tmp_path_factory.mktemp(f"resume{request.param}")
    slow = request.config.getoption("slow")
    cases = {
        c.name: dataclasses.asdict(c)
        for c in CASES
        if ranks in c.ranks and (slow or ranks not in c.slow)
    }
    run_cases(ranks, folder / "whole", cases, "whole")
    for case in cases.values():
        n_checks = outcome(folder / "whole" / case["name"])["checks"]
        case["stop_at"] = case["check"] or 1 + int(case["share"] * (n_checks - 1))
    run_cases(ranks, folder / "parts", cases, "first")
    saved = [
        name for name in cases if list((folder / "parts" / name / "model").glob("*config.json"))
    ]
    assert saved == [], "they were not stopped"
    run_cases(ranks, folder / "parts", cases, "rest")
    return ranks, folder


def of_any_batch(row: dict[str, Any]) -> dict[str, Any]:
    """A line of a log without the engine's log-probs: their last bits depend on which turns met in a batch."""
    kept = {name: value for name, value in row.items() if not name.startswith("rollout_")}
    return kept if "evaluation" not in row else {n: v for n, v in kept.items() if n != "log_prob"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_resumed_run_is_the_run_that_never_stopped(runs, case, pytestconfig):
    ranks, folder = runs
    if ranks not in case.ranks or (ranks in case.slow and not pytestconfig.getoption("slow")):
        pytest.skip(f"not on {ranks} ranks, or with --slow only")
    parts, whole = (folder / kind / case.name / "model" for kind in ("parts", "whole"))
    assert (parts / "config.json").exists() or (parts / "adapter_config.json").exists()
    got, want = left_by(parts), left_by(whole)
    for name in ("metrics", "samples", "tokens", "state"):
        of_both = [getattr(run, name) for run in (got, want)]
        if case.name.startswith("environment") and name in ("metrics", "tokens"):
            of_both = [[of_any_batch(row) for row in rows] for rows in of_both]
        assert of_both[0] == of_both[1], name
    assert (len(want.tokens) > 0) == (case.command == "train_ppo")
    assert got.files.keys() == want.files.keys()
    assert len(want.files) >= 3
    assert [name for name in want.files if got.files[name] != want.files[name]] == []
