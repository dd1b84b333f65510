"""Each mistake of a user ends in one line that names the flag and what to do; never in a traceback.

Here are mistakes in models, data and programs, which a command finds while it starts; options that contradict each
other are in tests/unit/test_config.py, files and rows that no command can read in tests/unit/datasets.
"""

import json
import socket
import sys
from pathlib import Path

import pytest

from openppo.rewards.server import RewardServer
from tests.fork_server import REPO
from tests.unit.cli.conftest import QUANTIZED

DATA = [
    *(("ppo", flag, "D/prompts.jsonl") for flag in ("prompt_data", "eval_data")),
    ("ppo", "pretrain_data", "D/texts.jsonl"),
    *((command, "prompt_data", "D/prompts.jsonl") for command in ("generate", "evaluate")),
    *(("sft", flag, "D/sft.jsonl") for flag in ("dataset", "eval_dataset")),
    *(("rm", flag, "D/pairs.jsonl") for flag in ("dataset", "eval_dataset")),
    *(("prm", flag, "D/steps.jsonl") for flag in ("dataset", "eval_dataset")),
]
"""The flags of each command that take data, and a good file."""
TRAINERS = ("ppo", "sft", "rm", "prm")

MISTAKES = """
ppo --prompt_data D/none.jsonl | = ... no such file ... Check the path
ppo --input_key q | --input_key ... --prompt_data, row 1 ... 'q' ... input, answer
ppo --label_key l | --label_key ... --prompt_data, row 1 ... 'l' ... input, answer
ppo --apply_chat_template | = ... Leave the flag out
ppo --prompt_max_len 2 | = ... shortest has 3 ... Raise
ppo --generate_max_len 62 | = ... 64 tokens ... Lower
ppo --pretrain_data D/prompts.jsonl --config D/texts.yaml | pretrain_key ... --pretrain_data, row 1 ... 't'
ppo --dry_run --reward_fn D/bare.jsonl | --reward_fn
ppo --pretrain M/none | = ... no such local folder ... Check the path
ppo --pretrain M/broken_weights | = ... Check the folder
ppo --pretrain M/no_tokenizer | =: its ... no tokenizer files
ppo --pretrain M/reward | = ... lacks lm_head.weight ... Give a
ppo -reward_fn --reward_pretrain M/headless | = ... no scalar head 'score.weight' ... train_rm
ppo -reward_fn --reward_pretrain M/other_vocabulary | = ... another vocabulary ... --critic_pretrain
ppo --critic_pretrain M/short --generate_max_len 8 | 3 tokens ... 8 tokens of --critic_pretrain M/short ... Lower
ppo --ref_pretrain M/other_vocabulary | = ... another vocabulary ... same family
ppo --critic_pretrain M/two_labels | = ... exactly one
ppo --flash_attn | = needs --bf16
ppo --cuda_graphs on | = records steps on a GPU ... leave it out
generate --cuda_graphs on | = records steps on a GPU ... leave it out
evaluate --cuda_graphs on | = records steps on a GPU ... leave it out
ppo --rollout_engine vllm | = ... pip install openppo[vllm]
ppo --save_path D/notes.txt | = ... choose another folder
ppo --dump_rollouts D/notes.txt | = ... cannot be written ... choose another folder
ppo --val_only --eval_data D/prompts.jsonl --load_checkpoint | --val_only: no checkpoint in ... leave out
ppo -prompt_data -reward_fn --val_only --max_steps 1 --tasks D/tasks.yaml | --val_only: no task has eval_data
ppo --pretrain M/unresized | =: token '[PAD]' has the id 40 ... 41 tokens. Use
ppo --prompt_data D/tool.jsonl --pretrain M/tool | =: token '<tool>' has the id 40 ... embeddings of 40 ids
ppo --pretrain M/resized -reward_fn --dry_run --reward_pretrain M/reward_unresized | =: token '[PAD]' has the id 40
ppo --pretrain M/rescaled | context of 3 tokens
ppo --trust_remote_code --pretrain M/own_tokenizer | =: its tokenizer ... its own code ran
ppo --pretrain M/pickle | =: its weights are a pickle file ... safetensors
ppo -reward_fn --remote_rm_url http://me:secret@127.0.0.1:9/ | --remote_rm_url http://***@127.0.0.1:9/: no
ppo --reward_fn D/none.py | = ... no such file ... Check the path
ppo --reward_fn D/reward.py:f | --reward_fn ... no function 'f' ... other, reward_fn
ppo --eval_data D/prompts.jsonl --eval_reward_fn D/params.py | --eval_reward_fn ... 'colour' ... answer, input
ppo --reward_fn D/needs.py | = ... 'not_there' ... Install
ppo --reward_fn D/params.py | = ... 'colour' ... answer, input
ppo -reward_fn --remote_rm_url http://127.0.0.1:9 | --remote_rm_url
ppo --remote_rm_url http://127.0.0.1:9 --remote_rm_token_file D/none | token_file
ppo --verifiable_reward exact_match --prompt_data D/bare.jsonl | --verifiable_reward ... --label_key
ppo --verifiable_reward regex:( | --verifiable_reward regex:(
ppo --prm_pretrain M/actor | prm_placeholder_token
ppo --prm_pretrain M/actor --config D/judge.yaml | prm_reward_tokens
ppo -reward_fn --reward_pretrain M/reward --normalize_reward | = ... M/reward ... --normalize_reward running
ppo --advantage_estimator rloo | = ... --n_samples_per_prompt
ppo --advantage_estimator reinforce --freezing_actor_steps 2 | --freezing_actor_steps ... has none ... leave it
ppo --advantage_estimator reinforce --critic_pretrain M/reward | --critic_pretrain ... leave it out
ppo --lora_rank 2 --target_modules nothing | =
ppo --dataset_class D/none.py:rows | = ... Check the path
ppo --config D/bad.yaml --seed 1 | unknown option in --config D/bad.yaml: gama; did you mean gamma?
sft --dataset D/long.jsonl | --max_len 512: the longest row has 72 ... Lower --max_len to 64
sft --eval_dataset D/strange.jsonl | --eval_dataset ... foo, bar
rm --chosen_key c | --chosen_key ... --dataset, row 1 ... prompt, chosen
rm --margin_key margin | --margin_key ... row 1 ... 'much'
prm --placeholder_token none | --placeholder_token 'none'
prm --reward_tokens good bad | --reward_tokens
generate --output_path D/notes.txt/o.jsonl | =
generate --generate_max_len 99 | = ... Lower
generate --pretrain M/none --output_path . | = is a folder: name a file in it
generate --pretrain M/none --output_path /proc/out.jsonl | =: cannot be written
evaluate --verifiable_reward exact_match --label_key no_such | no column 'no_such'
merge_lora | --lora_path M/actor ... adapter_config.json
serve_rm --reward_pretrain M/reward_unresized | token '[PAD]' has the id 40
serve_rm --reward_pretrain M/headless | = ... head
serve_rm --token_file D/none | =
serve_rm --normalize_reward | = ... --reward_pretrain M/reward ... train_rm
serve_rm --port TAKEN | --host 127.0.0.1 --port TAKEN ... cannot listen ... Choose another
serve_agent --pretrain M/actor | = ... no chat template ... set chat_template
serve_agent --pretrain M/none --port TAKEN | --port TAKEN ... cannot listen ... Choose another
serve_agent --chat_template_kwargs [] | = ... not a JSON object
"""
"""Command and options, laid over those of ``GOOD`` ("-name" takes one away), and parts of the error.

"=" is the last option as it stands in the command.
"""
MODELS = [
    *(
        ("ppo", flag)
        for flag in (
            "pretrain",
            "reward_pretrain",
            "critic_pretrain",
            "prm_pretrain",
            "ref_pretrain",
        )
    ),
    *((command, "pretrain") for command in ("sft", "rm", "prm", "generate", "serve_agent")),
    *(("evaluate", flag) for flag in ("pretrain", "reward_pretrain", "prm_pretrain")),
    *(("serve_rm", "reward_pretrain"), ("merge_lora", "lora_path")),
]
"""Each flag of each command that names a model."""


def check(line: str, says: str, code: int, stderr: str, status: int = 2) -> None:
    """One line of ours, that says what it must."""
    errors = [text for text in stderr.splitlines() if text.startswith("error")]
    assert len(errors) == 1, f"{line}: {stderr}"
    assert [part for part in says.split(" ... ") if part not in errors[0]] == [], errors[0]
    assert "secret" not in stderr
    assert code == status
    assert f'File "{REPO}/openppo' not in stderr, "no traceback through our code"


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_a_mistake_ends_in_one_line_with_flag_and_remedy(row, run_line, put, monkeypatch):
    monkeypatch.setattr(RewardServer, "fit", lambda self: pytest.fail("it serves"))
    line, says = row.split(" | ")
    says = says.replace("=", line[line.rindex("--") :], 1) if says.startswith("=") else says
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run_line(line.replace("TAKEN", port))
    check(line, put(says).replace("TAKEN", port), ended.code, ended.stderr)


@pytest.mark.parametrize(("command", "flag", "good"), DATA)
def test_a_file_or_row_that_cannot_be_read_is_named_with_the_flag(
    command, flag, good, run_line, put, tmp_path
):
    row = json.loads(Path(put(good)).read_text().splitlines()[0])
    bad, file = row | {next(iter(row)): 3}, tmp_path / "rows.jsonl"
    bad_lines = {
        "{": f"--{flag} {file}, line 3: not valid JSON",
        json.dumps(bad): f"--{flag}, row 2 of {file}",
    }
    for last, says in bad_lines.items():
        file.write_text(f"{json.dumps(row)}\n\n{last}\n")
        ended = run_line(f"{command} --{flag} {file}")
        check(f"{command} {flag}", says, ended.code, ended.stderr)


@pytest.mark.parametrize(("command", "flag"), MODELS)
def test_code_of_a_model_runs_only_where_it_is_trusted(command, flag, run_line, put):
    model = f"M/{'own_code_adapters' if command == 'merge_lora' else 'own_code'}"
    refused = "it brings Python code of its own (auto_map in its config)"
    for trust, says in (("", refused), (" --trust_remote_code", "its own code ran")):
        ended = run_line(f"{command} --{flag} {model}{trust}")
        check(command, put(f"--{flag} {model}: ... {says}"), ended.code, ended.stderr)


@pytest.mark.parametrize("lora", ["", " --lora_rank 2 --load_in_4bit"])
@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_refused_by_their_config(method, lora, run_line, put):
    ended = run_line(f"sft --pretrain M/{method}{lora}")
    says = f"--pretrain M/{method}: its weights are quantized ({method}) ... Name the checkpoint that it was made from"
    check(method, put(says), ended.code, ended.stderr)


@pytest.mark.parametrize(("command", "flag"), MODELS)
def test_each_flag_refuses_a_quantized_model_before_any_is_loaded(
    command, flag, run_line, put, monkeypatch
):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: sys.exit(9))
    folder = "awq_adapters" if command == "merge_lora" else "awq"
    ended = run_line(f"{command} --{flag} M/{folder}")
    check(
        command,
        put(f"--{flag} M/{folder}: ... its weights are quantized (awq)"),
        ended.code,
        ended.stderr,
    )


def test_no_model_is_loaded_beside_a_quantized_one(run_line, put, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: sys.exit(9))
    for command in ("ppo", "evaluate"):
        prm = "--prm_pretrain M/awq --config D/steps.yaml"
        ended = run_line(f"{command} -reward_fn --reward_pretrain M/reward {prm}")
        check(
            command,
            put("--prm_pretrain M/awq: its weights are quantized (awq)"),
            ended.code,
            ended.stderr,
        )


def test_a_dry_run_ends_with_status_0_before_any_weight_is_read(run_line, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "transformers.PreTrainedModel.from_pretrained", lambda *a, **k: pytest.fail("weights")
    )
    for command in TRAINERS:
        ended = run_line(f"{command} --dry_run 4x80")
        assert ended.code == 0, ended.stderr
        for part in ("memory on each of 4 ranks", "training", "fits into 80.0 GiB", "checkpoint"):
            assert part in ended.stderr
        budgets = "micro-batches by the GPU's memory: --micro_rollout_tokens 131072 --micro_train_tokens 131072"
        assert (budgets in ended.stderr) is (command == "ppo")
    assert list(tmp_path.iterdir()) == [], "nothing is written"


SHARE_OF_LETTERS = """
def reward_fn(responses, labels, prompts):
    print("called with", responses, labels)
    return [{"right": float(a == b), "short": -0.01 * len(a)} for a, b in zip(responses, labels)]
"""


def test_a_dry_run_scores_the_labels_of_three_rows(run_line, tmp_path):
    (tmp_path / "share.py").write_text(SHARE_OF_LETTERS)
    ended = run_line(f"ppo --dry_run --label_key answer --reward_fn {tmp_path}/share.py")
    assert ended.code == 0, ended.stderr
    lines = [line.removeprefix("[openppo]").strip() for line in ended.stderr.splitlines()]
    start = lines.index("rewards of the first rows; the response is the label, empty without one")
    row = ["", "prompt    abc", "response  d", "earned    right 1, short -0.01"]
    assert lines[start + 1 : start + 13] == 3 * row
    assert lines.count("earned    right 1, short -0.01") == 3, "of four prompts"


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        (
            "ppo --dry_run --verifiable_reward length:3 -reward_fn",
            "earned    reward 0.6667",
        ),  # of d and EOS
        (
            "ppo --dry_run -reward_fn --reward_pretrain M/reward",
            "--reward_pretrain M/reward scores no row here: a dry run reads no weights",
        ),
        ("ppo --dry_run --prompt_data D/bare.jsonl", "response"),  # without a label
    ],
)
def test_a_dry_run_shows_what_its_other_rewards_give(line, printed, run_line, put):
    ended = run_line(line)
    assert ended.code == 0, ended.stderr
    assert f"[openppo] {put(printed)}\n" in ended.stderr


def test_a_dry_run_names_the_row_that_its_reward_function_cannot_score(run_line, tmp_path, put):
    (tmp_path / "raises.py").write_text(
        "def reward_fn(response, label):\n    return 1 / label.count('z')\n"
    )
    ended = run_line(f"ppo --dry_run --label_key answer --reward_fn {tmp_path}/raises.py")
    message = f"error: --reward_fn {tmp_path}/raises.py raised ZeroDivisionError('division by zero') for prompt 'abc'"
    assert (ended.code, ended.stderr.count(message)) == (2, 1), ended.stderr


@pytest.mark.parametrize(
    ("line", "roles"),
    [
        (
            "ppo -reward_fn --reward_pretrain M/reward",
            ["reward model", "critic", "actor", "reference"],
        ),
        *((command, ["model"]) for command in ("sft", "rm", "prm")),
    ],
)
def test_every_start_says_what_each_model_takes_before_one_is_loaded(
    line, roles, run_line, monkeypatch
):
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: sys.exit(0))
    ended = run_line(line)
    (said,) = [text for text in ended.stderr.splitlines() if "estimated memory: " in text]
    places = [said.index(f"{role} 0 MiB") for role in roles]
    assert places == sorted(places)
    assert "at most 0 MiB, in " in said


@pytest.mark.parametrize("command", TRAINERS)
def test_one_row_is_enough_to_train_on(command, run_line, put, monkeypatch, tmp_path):
    for trainer in (
        "ppo.PPOTrainer",
        "supervised.loop.SupervisedTrainer",
    ):  # the process group must stay
        monkeypatch.setattr(f"openppo.trainer.{trainer}.close", lambda self: sys.exit(0))
    flag, good = next((flag, good) for name, flag, good in DATA if name == command)
    (tmp_path / "one.jsonl").write_text(
        Path(put(good)).read_text().replace("much", "1").splitlines()[0]
    )
    assert run_line(f"{command} --{flag} one.jsonl").code == 0
    assert Path("ckpt/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sft --pretrain M/broken_weights", "--pretrain"),
        ("ppo -reward_fn --pretrain M/broken_weights --reward_pretrain M/reward", "--pretrain"),
        (
            "ppo -reward_fn --remote_rm_url http://127.0.0.1:9 --config D/no_retries.yaml",
            "--remote_rm_url",
        ),
    ],
)
def test_a_start_that_fails_leaves_an_earlier_runs_checkpoints_where_they_are(
    line, said, run_line, tmp_path
):
    """Nobody who forgot --load_checkpoint would find them under the same name again."""
    checkpoints = tmp_path / "run" / f"checkpoints_{line.split()[0]}"
    (checkpoints / "step_00000004").mkdir(parents=True)
    ended = run_line(f"{line} --save_path run")
    assert (ended.code, f"error: {said}" in ended.stderr) == (2, True)
    assert (checkpoints / ".lock").exists(), "it failed before it looked at checkpoints"
    assert (checkpoints / "step_00000004").is_dir()


@pytest.mark.parametrize(
    ("line", "says", "ranks"),
    [
        ("rm --chosen_key c", "--chosen_key ... --dataset, row 1", 0),
        ("ppo -reward_fn", "No reward is given", 0),
        ("sft --dataset D/none.jsonl", "--dataset D/none.jsonl", 2),
        (
            "ppo -reward_fn --reward_pretrain M/headless",
            "--reward_pretrain M/headless ... scalar head",
            2,
        ),
        ("ppo --rollout_batch_size 5 --n_samples_per_prompt 4", "--rollout_batch_size 5", 2),
    ],
)
def test_a_mistake_in_a_run_of_its_own_ends_in_one_line_with_flag_and_remedy(
    line, says, ranks, launcher, put, words, tmp_path
):
    module, given = words(line)
    command = ["-m", f"openppo.cli.{module}", *given]
    ended = launcher.run(command, ranks, cwd=tmp_path, separate=True, real="headless" in line)
    check(
        line, put(says), ended.returncode, ended.stderr, status=1 if ranks else 2
    )  # torchrun makes 1 of each status
    assert "Traceback" not in ended.stderr or ranks, "torchrun ends with a traceback of its own"
    assert ended.stdout == ""
