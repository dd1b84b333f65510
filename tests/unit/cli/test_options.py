"""Command lines to configs: every option is a flag of its own name, whatever way it is given."""

import dataclasses
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from openppo.cli.options import parse_options, run_command
from openppo.config import TrainPPOConfig, commands, flat_dict, tools
from openppo.config.fields import declared_options, rules_of
from openppo.tracking import save_config

REQUIRED: dict[Any, str] = {
    TrainPPOConfig: "--pretrain m --prompt_data d",
    commands.TrainSFTConfig: "--pretrain m --dataset d",
    commands.TrainRMConfig: "--pretrain m --dataset d",
    commands.TrainPRMConfig: "--pretrain m --dataset d",
    tools.GenerateConfig: "--pretrain m --prompt_data d --output_path o",
    tools.EvaluateConfig: "--pretrain m --prompt_data d",
    tools.ServeRMConfig: "--reward_pretrain r",
    tools.MergeLoRAConfig: "--lora_path l --save_path s",
    tools.ExportConfig: "--checkpoint c --folder f",
}
COMMANDS = pytest.mark.parametrize("command", REQUIRED, ids=lambda command: command.__name__)


def parse(command: Any, *arguments: str) -> Any:
    """The config of a command line, after the required flags."""
    return parse_options(command, [*REQUIRED[command].split(), *arguments])


def ppo(*arguments: str) -> dict[str, Any]:
    """The options of a train_ppo command line by name."""
    return flat_dict(parse(TrainPPOConfig, *arguments))


def candidates(name: str, hint: Any) -> list[Any]:
    """Values of a type that options have, some within any bound."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return [value for one in inner for value in candidates(name, one)]
    if kind is Literal:
        return list(inner)
    if kind is tuple:
        return [tuple(candidates(name, inner[0])[:2])]
    texts = [f"some {name}", f"{name}: -x"]
    return {int: [7, 8], float: [0.25, 7.5], bool: [True, False], str: texts, type(None): [None]}[hint]


def other_values(command: Any) -> dict[str, Any]:
    """For each option of a command a value that is not its default."""
    groups = typing.get_type_hints(command).values()
    hints = {name: hint for group in groups for name, hint in typing.get_type_hints(group).items()}
    found = {}
    for name, declared in declared_options(command).items():
        bound = rules_of(declared).bound
        found[name] = next(
            value
            for value in candidates(name, hints[name])
            if value != declared.default
            and (bound is None or value is None or isinstance(value, tuple) or bound.holds(value))
        )
    return found | ({"use_wandb": "True"} if "use_wandb" in found else {})  # a key is masked


def words(name: str, value: Any) -> list[str]:
    """The arguments that give an option a value."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


# Flags


@COMMANDS
def test_every_flag_reaches_the_field_of_its_name(command: Any) -> None:
    values = other_values(command)
    names = [declared.name for group in vars(parse(command)).values() for declared in dataclasses.fields(group)]
    assert sorted(names) == sorted(values), "no two groups share an option"
    assert flat_dict(parse_options(command, [part for item in values.items() for part in words(*item)])) == values
    defaults = flat_dict(parse(command))
    assert [name for name in values if name not in REQUIRED[command] and defaults[name] == values[name]] == []


@COMMANDS
def test_help_shows_every_flag(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(command, ["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert [name for name in declared_options(command) if f"--{name}" not in printed] == []
    assert "--config FILE.yaml" in printed


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--zero-stage=1"], "zero_stage", 1),
        (["--no-buffer-cpu-offload"], "buffer_cpu_offload", False),
        (["--value_clip", "None"], "value_clip", None),
        (["--input_template=--- {} a-b=c"], "input_template", "--- {} a-b=c"),
        (["--save-path=some-dir/with-hyphens"], "save_path", "some-dir/with-hyphens"),
        (["--use_wandb", "--bf16"], "use_wandb", "True"),
        (["--bf16", "--use-wandb"], "use_wandb", "True"),
    ],
)
def test_a_flag_may_be_written_in_several_ways(arguments: list[str], name: str, value: Any) -> None:
    assert ppo(*arguments)[name] == value


def test_the_rank_that_deepspeeds_launcher_adds_is_dropped() -> None:
    for command in (TrainPPOConfig, commands.TrainSFTConfig):
        assert parse(command, "--local_rank=1") == parse(command)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--zero_stages", "unknown flag --zero_stages; did you mean --zero_stage?"),
        ("--num-episode=3", "unknown flag --num_episode; did you mean --num_episodes?"),
        ("--xyzzy", "unknown flag --xyzzy; see --help for all options."),
        ("--config", "--config needs a file: --config FILE.yaml"),
    ],
)
def test_an_unknown_flag_is_an_error_with_the_nearest_name(flag: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        ppo(*flag.split())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--pretrain m --prompt_data d --zero_stage 5", "--zero_stage"),
        ("--pretrain m --prompt_data d --gamma high", "--gamma"),
        ("--pretrain m --prompt_data d --adam_betas 0.9", "--adam_betas"),
        ("--pretrain m --prompt_data d --save_path", "--save_path"),
        ("--pretrain m --prompt_data d --no_eps_clip", "--no_eps_clip"),
        ("--pretrain m --prompt_data d --bf16 surely", "surely"),
        ("--pretrain m --prompt_data d --eps_clip 0.1 0.25", "0.25"),
        ("--pretrain m --prompt_data d stray", "stray"),
        ("--prompt_data d", "--pretrain"),
        ("--config value_clip.yaml", "--value_clip"),
        ("--config gamma.yaml", "--gamma"),
    ],
)
def test_a_value_that_does_not_fit_or_is_missing_is_named(
    line: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("gamma", "[a]"), ("value_clip", "false")):
        Path(f"{name}.yaml").write_text(f"{name}: {value}\npretrain: m\n")
    with pytest.raises(SystemExit) as ended:
        parse_options(TrainPPOConfig, line.split())
    assert (ended.value.code, named in capsys.readouterr().err) == (2, True)


# YAML files


@pytest.fixture
def from_file(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a train_ppo command line that names a file with this text."""

    def parsed(text: str, *arguments: str) -> dict[str, Any]:
        (tmp_path / "options.yaml").write_text(text)
        return ppo(*arguments, f"--config={tmp_path / 'options.yaml'}")

    return parsed


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("gamma: 1", "gamma", 1.0),
        ("actor_learning_rate: 1e-5", "actor_learning_rate", 1e-5),  # a text to YAML 1.1
        ("save_path: 2026-11-20", "save_path", "2026-11-20"),
        ("adam_betas: [0.5, 0.6]", "adam_betas", (0.5, 0.6)),
        ("buffer_cpu_offload: false", "buffer_cpu_offload", False),
        ("value_clip: null", "value_clip", None),
        ('input_template: "a: {}\\n\\tb=c"', "input_template", "a: {}\n\tb=c"),
        ('input_key: ""', "input_key", ""),
        ("chat_template_kwargs: {a: [1]}", "chat_template_kwargs", '{"a": [1]}'),
        ("use_wandb: false", "use_wandb", None),
        ("use_wandb: true", "use_wandb", "True"),
        ("use_tensorboard: off", "use_tensorboard", None),
        ("normalize_advantages: on", "normalize_advantages", "on"),
        ("normalize_advantages: off", "normalize_advantages", "off"),
    ],
)
def test_a_file_holds_options_by_the_names_of_the_flags(
    line: str, name: str, value: Any, from_file: Callable[..., dict[str, Any]]
) -> None:
    found = from_file(line)[name]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("line", "arguments", "name", "value"),
    [
        ("gamma: 0.9", "--gamma 0.8", "gamma", 0.8),
        ("zero_stage: 3", "--zero-stage=1", "zero_stage", 1),
        ("bf16: true", "--no-bf16", "bf16", False),
        ("value_clip: 0.5", "--value_clip None", "value_clip", None),
        ("stop_when: [a > 1, b > 2]", "--stop_when c>3", "stop_when", ("c>3",)),
    ],
)
def test_the_command_line_wins_over_the_file(
    line: str, arguments: str, name: str, value: Any, from_file: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert from_file(line, *arguments.split())[name] == value
    assert ppo("--config", str(tmp_path / "options.yaml"), *arguments.split())[name] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama: 0.9", "unknown option in --config {file}: gama; did you mean gamma?"),
        ("3: 4", "unknown option in --config {file}: 3; see --help for all options."),
        ("bf16: 'true'", "--config {file}: --bf16 must be true or false, got 'true'."),
        ("use_tensorboard: true", "--config {file}: --use_tensorboard takes a text or number, got True"),
        ("gamma: 1\nseed: 2\n\ngamma: 1", "--config {file}: gamma occurs twice; keep one of them."),
        ("save_path: {{a: b}}", "--config {file}: --save_path takes a text or number, got {{'a': 'b'}}"),
        ("- gamma", "--config {file}: it must hold 'option: value' lines."),
        ("a: b: c", "--config {file}: mapping values are not allowed here"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_naming_it(
    text: str, message: str, from_file: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as error:
        from_file(text.format())
    assert message.format(file=tmp_path / "options.yaml") in str(error.value)
    with pytest.raises(ValueError, match="--config none.yaml: .* No such file"):
        ppo("--config", "none.yaml")


@COMMANDS
def test_a_config_written_as_yaml_reads_back_to_an_equal_one(command: Any, tmp_path: Path) -> None:
    others = parse_options(command, [part for item in other_values(command).items() for part in words(*item)])
    for config in (parse(command), others):
        save_config(tmp_path, flat_dict(config))
        assert parse_options(command, ["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    "text", ["--flag {}", "'{}'", '"{}"', "{} #", "{}: [x]", " {} ", "{}\n\n", "\\n{}", "ü {}", ""]
)
def test_any_text_survives_the_file(text: str, tmp_path: Path) -> None:
    config = parse(TrainPPOConfig, f"--input_template={text}")
    assert config.data.input_template == text
    save_config(tmp_path, flat_dict(config))
    assert parse_options(TrainPPOConfig, ["--config", str(tmp_path / "config.yaml")]) == config


# Running


class Job:
    """Raises while it runs."""

    def fit(self) -> None:
        """Run."""
        raise ValueError("while running")


GOOD = ["train_ppo.py", "--pretrain", "m", "--prompt_data", "d", "--reward_fn", "f.py"]


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds slept, without sleeping; the environment describes a single process."""
    slept: list[float] = []
    monkeypatch.setattr("openppo.cli.options.time.sleep", slept.append)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return slept


def test_an_error_of_options_or_of_the_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, naps: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", GOOD)

    def build(config: TrainPPOConfig) -> Job:
        raise ValueError("--pretrain m: no such folder.")

    for world_size, says in (("1", "--pretrain m: no such folder."), ("3", "--train_batch_size 128 does not divide")):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(SystemExit) as ended:
            run_command(TrainPPOConfig, build)
        lines = [line for line in capfd.readouterr().err.splitlines() if "OpenPPO" not in line]
        assert (ended.value.code, len(lines)) == (2, 1)
        assert lines[0].startswith(f"error: {says}")


@pytest.mark.parametrize(
    ("rank", "local_rank", "hosts", "who"),
    [
        ("0", "0", "2", " on rank 0 (gpu02)"),
        ("2", "0", "2", " on rank 2 (gpu02)"),
        ("3", "1", "2", " on rank 3 (gpu02)"),
        ("0", "0", "1", ""),
        ("1", "1", "1", " on rank 1"),
    ],
)
def test_the_first_rank_of_each_host_says_what_is_wrong_and_others_wait_for_it(
    rank: str, local_rank: str, hosts: str, who: str, monkeypatch: Any, naps: list[float], capsys: Any
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": hosts}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu02")
    for arguments in (["--gamma", "high"], ["--gama", "1"]):
        monkeypatch.setattr("sys.argv", [*GOOD, *arguments])
        with pytest.raises(SystemExit) as ended:
            run_command(TrainPPOConfig, lambda config: pytest.fail("built"))
        said = capsys.readouterr().err
        assert ended.value.code == 2
        if arguments[0] == "--gamma":  # an error of tyro
            assert ("--gamma" in said) == (local_rank == "0")
        else:
            assert said.startswith(f"error{who}: unknown flag --gama")
    assert len(naps) == (0 if local_rank == "0" else 2)


def test_an_error_of_ours_and_an_error_while_running_keep_their_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", GOOD)
    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog._exit", lambda watch, status: None)

    def build(config: TrainPPOConfig) -> Job:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        run_command(TrainPPOConfig, build)
    with pytest.raises(ValueError, match="while running"):
        run_command(TrainPPOConfig, lambda config: Job())
    report = capfd.readouterr().err
    assert "Traceback" in report
    assert "fault:   rank 0 raised KeyError: 'ours'" in report
    assert "fault:   rank 0 raised ValueError: while running" in report
