"""Names of other libraries: an unknown one is answered by meaning, and an alias of a value stands for our value."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openppo.cli.foreign import with_our_values
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, TrainPRMConfig, TrainRMConfig, TrainSFTConfig, flat_dict
from openppo.config.fields import declared_options, from_options
from openppo.config.foreign import IN_HELP, NAMES, VALUES, answer_by_meaning, read_table
from openppo.config.schema import schema_of

COMMANDS: tuple[Any, ...] = (TrainPPOConfig, TrainSFTConfig, TrainRMConfig, TrainPRMConfig)
PPO = ["--pretrain", "m", "--prompt_data", "d"]
ROWS = [row for rows in NAMES.values() for row in rows]
ALIASES = [(option, *pair) for option, values in VALUES.items() for pair in values.items()]


def error_of(command: Any, *words: str) -> str:
    """The message about a command line that is refused."""
    with pytest.raises(ValueError) as refused:
        parse_options(command, words)
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--beta 0.1", "unknown flag --beta; TRL's beta is --init_kl_coef here"),
        (
            "--num_generations=8",
            "unknown flag --num_generations; TRL's num_generations is --n_samples_per_prompt here.",
        ),
        (
            "--num-generations 8",
            "unknown flag --num_generations; TRL's num_generations is --n_samples_per_prompt here.",
        ),
        ("--max_new_tokens 8", "max_new_tokens is --generate_max_len here"),
        ("--output_dir x", "output_dir is --save_path here"),
        ("--num_train_epochs 3", "TRL's num_train_epochs is --num_episodes here"),
        ("--report_to wandb", "report_to is --use_wandb or --use_tensorboard here"),
        ("--n_samples 8", "unknown flag --n_samples; n_samples is --n_samples_per_prompt here."),
        ("--epochs 2", "unknown flag --epochs; epochs is --num_episodes here: passes over the"),
        ("--push_to_hub", "TRL's push_to_hub has no counterpart here: upload the saved folder"),
        (
            "--actor.model_name_or_path m",
            "OpenRLHF's actor.model_name_or_path is --pretrain here.",
        ),
        ("--ds.lora.rank=8", "unknown flag --ds.lora.rank; OpenRLHF's ds.lora.rank is --lora_rank"),
        ("--algo.kl.use_loss", "OpenRLHF's algo.kl.use_loss is --use_kl_loss here."),
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.n=8: verl's actor_rollout_ref.rollout.n is --n_samples_per_prompt here.",
        ),
        (
            "--bf16 +trainer.nnodes=2",
            "+trainer.nnodes=2: verl's trainer.nnodes has no counterpart here",
        ),
        ("--gamma 1 data.train_files=[a,b]", "verl's data.train_files is --prompt_data here"),
        ("--trainer.save_freq 5", "unknown flag --trainer.save_freq; verl's trainer.save_freq is"),
        (
            "algorithm.no_such_key=1",
            "algorithm.no_such_key is not in the tables of docs/verl.md; see --help all for every option.",
        ),
    ],
)
def test_an_unknown_name_is_answered_by_meaning(words, answer):
    assert answer in error_of(TrainPPOConfig, *PPO, *words.split())


def test_meaning_comes_before_spelling():
    near_max_epochs = "unknown flag --epochs; epochs is --max_epochs here."
    assert error_of(TrainSFTConfig, "--epochs", "1") == near_max_epochs
    assert error_of(TrainSFTConfig, "--epoch", "1").endswith("did you mean --max_epochs?")


def test_a_command_is_answered_with_flags_that_it_has():
    assert error_of(TrainSFTConfig, "--num_train_epochs", "1").endswith(
        "TRL's num_train_epochs is --max_epochs here."
    )
    assert error_of(TrainSFTConfig, "--data.max_len", "1").endswith("is --max_len here.")
    assert "init_kl_coef" not in error_of(TrainSFTConfig, "--beta", "1")


@pytest.mark.parametrize(
    "words",
    [
        "--prompt_data data.parts=1",
        "--reward_weights critic.help=1 trainer.style=2",
        "--save_path=trainer.nnodes=1",
    ],
)
def test_a_value_that_looks_like_a_word_of_verl_is_a_value(words):
    config = flat_dict(parse_options(TrainPPOConfig, ["--pretrain", "m", *words.split()]))
    value = config[words.split("=")[0].split()[0].removeprefix("--")]
    assert words.split()[-1].removeprefix("--save_path=") in value


def test_each_row_has_flags_of_some_training_command():
    known = [declared_options(command) for command in COMMANDS]
    assert [row for row in ROWS if not any(row.is_for(options) for options in known)] == []
    kinds = ("none", "--", "the environment variable ", "the line ")
    assert [row for row in ROWS if not row.flags.startswith(kinds)] == []
    assert [row for row in ROWS if row.flags == "none" and not row.note] == []


def test_a_name_is_answered_for_each_command_that_has_its_flags():
    for command in COMMANDS:
        options = declared_options(command)
        for row in ROWS:
            if row.is_for(options):
                names = [name for name in row.names if name not in options]
                assert [name for name in names if answer_by_meaning(name, options) is None] == []


def test_flags_that_work_are_not_answered():
    """OpenRLHF's names that we have, TRL's among them, keep their meaning."""
    options = declared_options(TrainPPOConfig)
    for_ppo = [row for row in ROWS if row.is_for(options) and row.options()]
    assert {name for row in for_ppo for name in row.names} & options.keys() == set()


def test_a_line_of_a_table_may_continue():
    (row, other) = read_table(
        "L", "\n  a (1), b.c,\n  d\n  = --x and --y | note, with: signs\n  e = none | f\n"
    )
    assert (row.names, row.flags) == ({"a": "1", "b.c": "", "d": ""}, "--x and --y")
    assert row.answer("b.c") == "L's b.c is --x and --y here: note, with: signs."
    assert other.answer("e") == "L's e has no counterpart here: f."


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("beta: 0.1", "beta; TRL's beta is --init_kl_coef here"),
        ("output_dir: x", "output_dir; TRL's output_dir is --save_path here."),
        (
            "actor_rollout_ref: {rollout: {n: 8}}",
            "actor_rollout_ref.rollout.n; verl's actor_rollout_ref.rollout.n is --n_samples_per_prompt here.",
        ),
        (
            "algo.kl.init_coef: 0",
            "algo.kl.init_coef; OpenRLHF's algo.kl.init_coef is --init_kl_coef",
        ),
    ],
)
def test_an_unknown_key_of_a_file_is_answered_too(text, answer, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    message = error_of(TrainPPOConfig, *PPO, "--config", str(file))
    assert message.startswith(f"unknown option in --config {file}: {answer}")


def test_an_unknown_option_in_python_is_answered_too():
    with pytest.raises(ValueError, match=r"no option beta; TRL's beta is --init_kl_coef here"):
        from_options(TrainPPOConfig, pretrain="m", beta=0.1)


def test_help_shows_the_most_common_names(capsys):
    with pytest.raises(SystemExit):
        parse_options(TrainPPOConfig, ["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert [name for name in IN_HELP if f" {name}: --" not in printed] == []
    with pytest.raises(SystemExit):
        parse_options(TrainSFTConfig, ["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert " num_train_epochs: --max_epochs," in printed
    assert " beta: " not in printed


@pytest.mark.parametrize(("option", "alias", "ours"), ALIASES)
def test_an_alias_of_a_value_is_read_as_ours(option, alias, ours):
    notice = f"--{option} {alias} is read as {ours}."
    assert with_our_values([f"--{option}", alias]) == ([f"--{option}", ours], [notice])
    assert with_our_values([f"--{option}={alias}"]) == ([f"--{option}={ours}"], [notice])
    assert with_our_values([f"--{option}={ours}", "--bf16"]) == (
        [f"--{option}={ours}", "--bf16"],
        [],
    )


def test_a_file_and_the_command_line_may_have_aliases(tmp_path, capsys):
    file = tmp_path / "options.yaml"
    file.write_text("kl_estimator: low_var_kl\nadvantage_estimator: grpo\nuse_kl_loss: true\n")
    words = [f"--config={file}", "--loss-agg", "seq-mean-token-mean", "--policy_loss_type=vanilla"]
    config = parse_options(TrainPPOConfig, [*PPO, *words])
    assert (config.kl.kl_estimator, config.advantage.advantage_estimator) == ("k3", "group_norm")
    assert (config.loss.loss_agg, config.loss.policy_loss_type) == ("sequence_mean", "ppo")
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_each_alias_is_of_a_value_that_its_option_has():
    schemas = schema_of("train_ppo")["properties"]
    values = {
        name: str(schemas[name]["anyOf"][:-1]) for name in VALUES
    }  # aliases are the last form
    assert [row for row in ALIASES if f"'{row[2]}'" not in values[row[0]]] == []
    assert [row for row in ALIASES if f"'{row[1]}'" in values[row[0]]] == []


def test_one_line_says_how_a_value_is_read(capsys, monkeypatch, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("kl_estimator: mse\n")
    words = [*PPO, f"--config={file}", "--use_kl_loss", "--kl_estimator", "low_var_kl"]
    assert parse_options(TrainPPOConfig, words).kl.kl_estimator == "k3"
    assert capsys.readouterr().err == "--kl_estimator low_var_kl is read as k3.\n"

    assert parse_options(TrainPPOConfig, [*words, "--kl_estimator=k2"]).kl.kl_estimator == "k2"
    assert capsys.readouterr().err == "", "the flag that counts has our name"

    monkeypatch.setenv("RANK", "1")
    parse_options(TrainPPOConfig, words)
    assert capsys.readouterr().err == "", "other ranks say nothing"


def test_an_alias_is_no_alias_elsewhere():
    words = [*PPO, "--save_path", "grpo", "--input_key=kl", "--stop", "mse", "low_var_kl"]
    config = parse_options(TrainPPOConfig, words)
    assert (config.run.save_path, config.data.input_key) == ("grpo", "kl")
    assert config.generation.stop == ("mse", "low_var_kl")


def test_an_alias_is_checked_like_the_value_it_stands_for():
    config = parse_options(TrainPPOConfig, [*PPO, "--kl_estimator", "low_var_kl"])
    with pytest.raises(ValueError, match="--kl_estimator k3 as a reward"):
        config.kl.validate()
    config = parse_options(TrainPPOConfig, [*PPO, "--advantage_estimator", "grpo"])
    with pytest.raises(ValueError, match="--advantage_estimator group_norm compares the responses"):
        config.validate()


def test_python_reads_aliases_and_logs_them_once(caplog):
    caplog.set_level(logging.INFO, logger="openppo")
    config = from_options(TrainPPOConfig, pretrain="m", advantage_estimator="reinforce++")
    assert config.advantage.advantage_estimator == "reinforce"
    assert caplog.messages == ["--advantage_estimator reinforce++ is read as reinforce."]
    assert from_options(TrainPPOConfig, **flat_dict(config)) == config
    assert len(caplog.messages) == 1, "the resolved config has our name"


def test_the_command_answers_in_one_line(tmp_path: Path):
    words = "train_ppo --kl_estimator mse --pretrain m --prompt_data d trainer.n_gpus_per_node=8"
    command = [sys.executable, "-m", "openppo", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    answer = "verl's trainer.n_gpus_per_node has no counterpart here"
    says = f"error: trainer.n_gpus_per_node=8: {answer}: start as many processes with torchrun.\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", says)
