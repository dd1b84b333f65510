"""Runs that the oracle watches: small, each a way through the house that the others do not take."""

import shlex
from dataclasses import dataclass

STEP = """--rollout_batch_size 4 --train_batch_size 4 --micro_train_batch_size 2 --micro_rollout_batch_size 4
    --generate_max_len 6 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --lr_warmup_ratio 0 --max_steps 3
    --save_path model --dump_rollouts rollouts"""
PPO = f"train_ppo --pretrain ../inputs/actor --prompt_data ../inputs/prompts.jsonl {STEP}"
MODEL = f"{PPO} --reward_pretrain ../inputs/reward"
LABELS = f"{PPO} --label_key label"
COUNT = f"{PPO} --reward_fn ../inputs/reward.py:count"
GROUPS = "--n_samples_per_prompt 2 --train_batch_size 8"
CHAT = f"train_ppo --pretrain ../inputs/chat --apply_chat_template {STEP} --episode_max_len 120"
PROMPTS = "--prompt_data ../inputs/prompts.jsonl"
SUPERVISED = """--pretrain ../inputs/actor --train_batch_size 6 --micro_train_batch_size 2 --learning_rate 1e-3
    --max_epochs 2 --lr_warmup_ratio 0 --save_path model"""
SAMPLED = """--pretrain ../inputs/actor --prompt_data ../inputs/heldout.jsonl --label_key label --generate_max_len 6
    --n_samples_per_prompt 2 --output_path out.jsonl"""
CHECKPOINTS = "--save_steps 1"


@dataclass(frozen=True)
class Case:
    """Commands, one after the other in one folder, each on ``ranks`` ranks; 0: without torchrun.

    A command is ``train_ppo --flags``, a module of openppo.cli, or ``examples/own_loop.py --flags``, a script.
    """

    name: str
    commands: tuple[str, ...]
    ranks: int = 0

    @property
    def words(self) -> list[list[str]]:
        """Words of each command after ``python``; a script's name is relative to the checkout."""
        rows = [shlex.split(command) for command in self.commands]
        return [
            row if row[0].endswith(".py") else ["-m", f"openppo.cli.{row[0]}", *row[1:]]
            for row in rows
        ]


def case(name: str, *commands: str, ranks: int = 0) -> Case:
    """A case of these commands."""
    return Case(name, commands, ranks)


CASES = (
    case(
        "ppo",
        f"""{MODEL} --max_epochs 2 --eval_data ../inputs/heldout.jsonl --eval_steps 1 --save_value_network
        --entropy_coef 0.01 --normalize_reward running""",
    ),
    case(
        "function",
        f"""{LABELS} --reward_fn ../inputs/reward.py --reward_weights short=2 --init_kl_coef 0
        --prompt_data ../inputs/prompts.jsonl,../inputs/long.jsonl --prompt_data_probs 0.5,0.5
        --eval_data ../inputs/heldout.jsonl,../inputs/words.jsonl --eval_steps 2""",
    ),
    case(
        "prm",
        f"""{PPO} --prm_pretrain ../inputs/actor --config ../inputs/judge.yaml --step_separator d
        --generate_max_len 12""",
    ),
    case("ptx", f"{MODEL} --pretrain_data ../inputs/documents.jsonl --ptx_coef 0.1"),
    case(
        "kl_in_the_loss",
        f"""{COUNT} {GROUPS} --advantage_estimator group_norm --use_kl_loss --kl_estimator k3 --init_kl_coef 0.1""",
    ),
    case("kl_in_the_reward", f"{MODEL} --init_kl_coef 0.1 --kl_target 0.05 --kl_horizon 20"),
    case("reinforce", f"{COUNT} --advantage_estimator reinforce --gamma 0.9"),
    case("reinforce_baseline", f"{COUNT} {GROUPS} --advantage_estimator reinforce_baseline"),
    case("rloo", f"{COUNT} {GROUPS} --advantage_estimator rloo --policy_loss_type gspo"),
    case(
        "group_norm",
        f"""{COUNT} {GROUPS} --advantage_estimator group_norm --eps_clip_high 0.28 --eval_steps 2
        --eval_data ../inputs/heldout.jsonl --eval_n_samples_per_prompt 2 --eval_temperature 1 --max_epochs 2""",
    ),
    case("dr_grpo", f"{COUNT} {GROUPS} --advantage_estimator dr_grpo --rollout_correction tis"),
    case("remax", f"{COUNT} --advantage_estimator remax"),
    case(
        "cispo",
        f"{COUNT} {GROUPS} --advantage_estimator group_norm --policy_loss_type cispo --max_epochs 2",
    ),
    case(
        "double_sided", f"{MODEL} --policy_loss_type double_sided --value_clip 0.1 --max_epochs 2"
    ),
    case(
        "several_rewards",
        f"""{MODEL} --reward_fn ../inputs/reward.py:count --verifiable_reward length:3
        --reward_weights reward_model=0.5 length=2""",
    ),
    case(
        "chat",
        f"train_sft {SUPERVISED} --pretrain ../inputs/chat --apply_chat_template --dataset ../inputs/sft.jsonl",
    ),
    case("lora", f"{MODEL} --lora_rank 4 --critic_lora_rank 2 --gradient_checkpointing"),
    case("ema", f"{MODEL} --ema_beta 0.5 --bf16"),
    case("value_pretraining", f"{MODEL} --value_pretrain_steps 1 --freezing_actor_steps 1"),
    case(
        "dynamic_sampling",
        f"""{LABELS} {GROUPS} --reward_fn ../inputs/reward.py:parity --advantage_estimator group_norm
        --dynamic_sampling 2""",
    ),
    case(
        "tools",
        f"""{CHAT} --pretrain ../inputs/caller --prompt_data ../inputs/words.jsonl --label_key label
        --tools ../inputs/tools.py --tool_parser hermes --verifiable_reward exact_match --max_turns 2
        --config ../inputs/alone.yaml --generate_max_len 10""",
    ),
    case(
        "environment",
        f"{CHAT} --environment ../inputs/game.py:Game --n_envs 4 --max_turns 3 --eval_n_envs 2 --eval_steps 2".replace(
            "--rollout_batch_size 4", ""
        ),
    ),
    case(
        "program",
        f"{CHAT} {PROMPTS} --agent_command 'python ../inputs/program.py h' --config ../inputs/alone.yaml",
    ),
    case(
        "branches",
        f"{CHAT} {PROMPTS} --agent ../inputs/agent.py:branches --config ../inputs/alone.yaml",
    ),
    case(
        "tasks",
        f"""{CHAT} --tasks ../inputs/tasks.yaml {GROUPS} --advantage_estimator group_norm --rollout_batch_size 8
        --train_batch_size 16 --max_staleness 0""",
    ),
    case(
        "staleness_0",
        f"{COUNT} {GROUPS} --advantage_estimator group_norm --rollout_ranks 1 --max_staleness 0",
        ranks=2,
    ),
    case(
        "staleness_1",
        f"{COUNT} {GROUPS} --advantage_estimator group_norm --rollout_ranks 1 --max_staleness 1 --max_steps 4",
        ranks=2,
    ),
    case(
        "images",
        f"{COUNT} --pretrain ../inputs/llava --prompt_data ../inputs/llava/images.jsonl --image_key images",
    ),
    case(
        "shared_prompts",
        f"{COUNT} --prompt_data ../inputs/long.jsonl --n_samples_per_prompt 4 --train_batch_size 16 --max_steps 1"
        " --micro_train_batch_size 8 --advantage_estimator rloo",
    ),
    case("zero_2", f"{MODEL} --zero_stage 2 --max_epochs 2", ranks=2),
    case("zero_3", f"{MODEL} --zero_stage 3 --save_value_network", ranks=2),
    case(
        "sft",
        f"train_sft {SUPERVISED} --dataset ../inputs/sft.jsonl --eval_dataset ../inputs/sft.jsonl --eval_steps 2",
    ),
    case("rm", f"train_rm {SUPERVISED} --dataset ../inputs/preference.jsonl --prompt_key prompt"),
    case(
        "prm_training",
        f"""train_prm {SUPERVISED} --dataset ../inputs/steps.jsonl --placeholder_token h --reward_tokens a b
        --input_key input --label_key labels""",
    ),
    case(
        "resume",
        f"{MODEL} {CHECKPOINTS} --max_steps 2",
        f"{MODEL} {CHECKPOINTS} --max_steps 3 --load_checkpoint",
    ),
    case("generate", f"generate {SAMPLED} --temperature 0.9 --top_p 0.95"),
    case(
        "evaluate",
        f"evaluate {SAMPLED} --reward_pretrain ../inputs/reward --pass_reward 0 --temperature 1",
    ),
    case(
        "export",
        f"{MODEL} {CHECKPOINTS} --max_steps 1 --lora_rank 4",
        "export model/checkpoints_ppo exported --merge",
        "export model/checkpoints_ppo critic --role critic",
    ),
    case(
        "merge_lora",
        f"train_sft {SUPERVISED} --dataset ../inputs/sft.jsonl --lora_rank 4",
        "merge_lora --lora_path model --save_path merged",
    ),
    case(
        "own_loop",
        "examples/own_loop.py --model ../inputs/actor --data ../inputs/own --save_path model --steps 2",
    ),
)
BY_NAME = {each.name: each for each in CASES}
IN_CI = ("ppo", "group_norm", "environment", "sft", "zero_2", "resume")
"""Cases that every CI run compares; the six that cover most."""
