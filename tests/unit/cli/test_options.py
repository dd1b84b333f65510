"""Command lines to configs: every option is a flag of its own name, whatever way it is given."""

import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import yaml

from openppo.cli.help import COMMON
from openppo.cli.options import parse_options, run_command
from openppo.config import TrainPPOConfig, TrainSFTConfig, flat_dict, from_options
from openppo.config.fields import declared_options, is_group, rules_of
from openppo.config.recipe_files import recipe_file, recipe_names
from openppo.tracking import save_run
from tests.unit.test_config import COMMANDS as CONFIGS

COMMANDS = pytest.mark.parametrize(
    "command", [command for command, _ in CONFIGS.values()], ids=CONFIGS
)
REQUIRED = dict(CONFIGS.values())
REPO = Path(__file__).resolve().parents[3]


def words(options: dict[str, Any]) -> list[str]:
    """The arguments that give options their values."""
    found = []
    for name, value in options.items():
        if isinstance(value, bool):
            found += [f"--{name}" if value else f"--no_{name}"]
        else:
            found += (
                [f"--{name}", *map(str, value)]
                if isinstance(value, tuple)
                else [f"--{name}={value}"]
            )
    return found


def parse(command: Any, *arguments: str) -> Any:
    """The config of a command line, after the required flags."""
    return parse_options(command, [*words(REQUIRED[command]), *arguments])


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
    texts = [f"some {name}", f"{name}: -x", f"{name}.py:name"]
    return {int: [7, 8], float: [0.25, 7.5], bool: [True, False], str: texts, type(None): [None]}[
        hint
    ]


def other_values(command: Any) -> dict[str, Any]:
    """For each option of a command a value that is not its default."""
    own = typing.get_type_hints(command)
    groups = [own, *(typing.get_type_hints(group) for group in own.values() if is_group(group))]
    hints = {name: hint for group in groups for name, hint in group.items()}
    found = {}
    for name, declared in declared_options(command).items():
        bound = rules_of(declared).bound
        found[name] = next(
            value
            for value in [*candidates(name, hints[name]), "8x80"]
            if value != declared.default
            and (bound is None or value is None or isinstance(value, tuple) or bound.holds(value))
        )
    special = {
        "use_wandb": "True",
        "policy_loss_type": "gspo",
    }  # a key is masked; none given means ppo
    return found | {name: value for name, value in special.items() if name in found}


def with_other_values(command: Any, folder: Path) -> Any:
    """The config of a command line and a file that give ``other_values``."""
    values = other_values(command)
    declared = declared_options(command)
    flags = {name: values[name] for name in values if not rules_of(declared[name]).of_files}
    lines = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name not in flags
    }
    (folder / "options.yaml").write_text(yaml.safe_dump(lines, allow_unicode=True))
    return parse_options(command, ["--config", str(folder / "options.yaml"), *words(flags)])


@COMMANDS
def test_every_option_reaches_the_field_of_its_name(command, tmp_path):
    values = other_values(command)
    assert flat_dict(with_other_values(command, tmp_path)) == values
    defaults = flat_dict(parse(command))
    assert [
        name for name in values if name not in REQUIRED[command] and defaults[name] == values[name]
    ] == []
    assert "some" not in str(defaults), "no two groups share an option"


@COMMANDS
def test_help_all_shows_every_option(command, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(command, ["--help", "all"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for name, declared in declared_options(command).items():
        shown = f"{name}:" if rules_of(declared).of_files else rf"(--{name}\b|{name.upper()}$)"
        assert len(re.findall(f"^  {shown}", printed, flags=re.MULTILINE)) == 1, name
    assert "--config FILE.yaml" in printed


def test_help_of_train_ppo_begins_with_models_prompts_and_rewards(capsys):
    with pytest.raises(SystemExit):
        parse_options(TrainPPOConfig, ["--help"])
    printed = capsys.readouterr().out
    flags = re.findall(r"^  --(\w+)", printed, flags=re.MULTILINE)
    assert {*flags} == COMMON
    assert flags[0] == "pretrain"
    places = [
        flags.index(name) for name in ("prompt_data", "reward_pretrain", "num_episodes", "seed")
    ]
    assert places == sorted(places)
    n_others = len(declared_options(TrainPPOConfig)) - len(COMMON)
    assert f"--help all shows {n_others} more" in printed


def test_help_of_train_ppo_has_what_readme_recipes_and_scripts_use():
    texts = [REPO / "README.md", *(REPO / "examples/scripts").iterdir()]
    names = {
        name
        for file in texts
        for name in re.findall(r"--(?:no_)?([a-z]\w*)", file.read_text(encoding="utf-8"))
    }
    for recipe in recipe_names():
        names |= set(yaml.safe_load(recipe_file(recipe).read_text(encoding="utf-8")))
    options = declared_options(TrainPPOConfig)
    flags = {name for name in options if not rules_of(options[name]).of_files}
    assert names & flags == COMMON


@pytest.mark.parametrize("words", [["--stale", "mask"], ["--stale=mask"], ["--no_self_check"]])
def test_an_option_of_files_is_no_flag(words):
    with pytest.raises(
        ValueError, match=r"^--\w+ is no flag: write the line '\w+: VALUE' into a file"
    ):
        parse(TrainPPOConfig, *words)


def test_a_switch_may_stand_alone_have_a_value_or_be_turned_off():
    for words, value in (
        ([], "off"),
        (["--normalize_reward"], "model"),
        (["--normalize_reward", "running"], "running"),
        (["--normalize_reward=group", "--bf16"], "group"),
        (["--normalize_reward", "group", "--no_normalize_reward"], "off"),
    ):
        assert parse(TrainPPOConfig, *words).shaping.normalize_reward == value
    for words, most in (
        ([], 0),
        (["--dynamic_sampling"], 10),
        (["--dynamic_sampling", "3"], 3),
        (["--dynamic_sampling", "3", "--no_dynamic_sampling"], 0),
    ):
        assert parse(TrainPPOConfig, *words).ppo.dynamic_sampling == most


def test_true_and_false_in_python_mean_what_the_flag_means_alone():
    for value, expected in ((True, ("model", 10, "here")), (False, ("off", 0, None))):
        config = from_options(
            TrainPPOConfig,
            pretrain="m",
            normalize_reward=value,
            dynamic_sampling=value,
            dry_run=value,
        )
        options = flat_dict(config)
        assert (
            tuple(options[name] for name in ("normalize_reward", "dynamic_sampling", "dry_run"))
            == expected
        )


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--top_k", "Sample only from this many of the most likely tokens (0 or -1: from all)."),
        (
            "--rollout_ranks",
            "Number of ranks, the last ones, that only sample while the others train",
        ),
    ],
)
def test_help_says_in_english_which_number_is_meant(flag, text, capsys):
    with pytest.raises(SystemExit):
        parse_options(TrainPPOConfig, ["--help", "all"])
    printed = " ".join(capsys.readouterr().out.split())
    assert text in printed.split(f" {flag} ")[1].split(" (default")[0]


@COMMANDS
def test_help_never_points_at_a_number_without_a_noun(command, capsys):
    with pytest.raises(SystemExit):
        parse_options(command, ["--help", "all"])
    printed = " ".join(capsys.readouterr().out.split())
    wrong = re.findall(
        r"\w+ (?:the|last) this many|to so many|per as many|of such a|\. Most tokens", printed
    )
    assert wrong == []


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--zero-stage=1"], "zero_stage", 1),
        (["--no-freeze-vision-tower"], "freeze_vision_tower", False),
        (["--value_clip", "None"], "value_clip", None),
        (["--input_template=--- {} a-b=c"], "input_template", "--- {} a-b=c"),
        (["--save-path=some-dir/with-hyphens"], "save_path", "some-dir/with-hyphens"),
        (["--use_wandb", "--bf16"], "use_wandb", "True"),
        (["--bf16", "--use-wandb"], "use_wandb", "True"),
        (["--compile"], "compile", "on"),
        (["--compile", "--bf16"], "compile", "on"),
        (["--no-compile", "--bf16"], "compile", "off"),
        (["--compile", "auto"], "compile", "auto"),
        (["--compile=off"], "compile", "off"),
        (["--init_kl_coeff", "0.3"], "init_kl_coef", 0.3),
        (["--ptx-coeff=0.4"], "ptx_coef", 0.4),
    ],
)
def test_a_flag_may_be_written_in_several_ways(arguments, name, value):
    assert ppo(*arguments)[name] == value
    assert parse(TrainSFTConfig, "--local_rank=1") == parse(TrainSFTConfig), (
        "DeepSpeed's launcher adds it"
    )


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--zero_stages", "unknown flag --zero_stages; did you mean --zero_stage?"),
        ("--num-episode=3", "unknown flag --num_episode; did you mean --num_episodes?"),
        ("--xyzzy", "unknown flag --xyzzy; see --help all for every option."),
        ("--config", "--config needs a file: --config FILE.yaml"),
        ("--config none.yaml", "--config none.yaml: [Errno 2] No such file"),
        ("--recipe", "--recipe needs a name: dapo, dr_grpo, glm5_async, grpo, gspo, ppo."),
        ("--recipe dappo", "--recipe dappo: there is no such recipe; did you mean dapo?"),
        ("--recipe raft", "--recipe raft: there is no such recipe; there are dapo, "),
    ],
)
def test_an_unknown_flag_is_an_error_with_the_nearest_name(flag, message):
    with pytest.raises(ValueError) as error:
        ppo(*flag.split())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--pretrain m --zero_stage 5", "--zero_stage"),
        ("--pretrain m --gamma high", "--gamma"),
        ("--pretrain m --adam_betas 0.9", "--adam_betas"),
        ("--pretrain m --save_path", "--save_path"),
        ("--pretrain m --no_eps_clip", "--no_eps_clip"),
        ("--pretrain m --bf16 surely", "surely"),
        ("--pretrain m --eps_clip 0.1 0.25", "0.25"),
        ("--prompt_data d", "--pretrain"),
        ("--config gamma.yaml", "--gamma"),
    ],
)
def test_a_value_that_does_not_fit_or_is_missing_is_named(
    line, named, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("gamma.yaml").write_text("gamma: [a]\npretrain: m\n")
    with pytest.raises(SystemExit) as ended:
        parse_options(TrainPPOConfig, line.split())
    assert (ended.value.code, named in capsys.readouterr().err) == (2, True)


@pytest.fixture
def from_file(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Options of a train_ppo command line that names a file with this text."""

    def parsed(text: str, *arguments: str) -> dict[str, Any]:
        (tmp_path / "options.yaml").write_text(text)
        return ppo(*arguments, f"--config={tmp_path / 'options.yaml'}")

    return parsed


@pytest.mark.parametrize(
    ("line", "arguments", "value"),
    [
        ("gamma: 1", "", 1.0),
        ("actor_learning_rate: 1e-5", "", 1e-5),  # a text to YAML 1.1
        ("save_path: 2026-11-20", "", "2026-11-20"),
        ("adam_betas: [0.5, 0.6]", "", (0.5, 0.6)),
        ("freeze_vision_tower: false", "", False),
        ("value_clip: null", "", None),
        ('input_template: "a: {}\\n\\tb=c"', "", "a: {}\n\tb=c"),
        ('input_key: ""', "", ""),
        ("chat_template_kwargs: {a: [1]}", "", '{"a": [1]}'),
        ("use_wandb: false", "", None),
        ("use_wandb: true", "", "True"),
        ("use_tensorboard: off", "", None),
        ("normalize_advantages: on", "", "on"),
        ("normalize_advantages: off", "", "off"),
        ("compile: true", "", "on"),  # as files of earlier runs have it
        ("compile: true", "--no_compile", "off"),
        ("gamma: 0.9", "--gamma 0.8", 0.8),
        ("zero_stage: 3", "--zero-stage=1", 1),
        ("init_kl_coeff: 0.1", "", 0.1),
        ("ptx_coeff: 0.1", "--ptx_coef 0.2", 0.2),
        ("bf16: true", "--no-bf16", False),
        ("value_clip: 0.5", "--value_clip None", None),
        ("stop_when: [a > 1, b > 2]", "--stop_when c>3", ("c>3",)),
    ],
)
def test_a_file_holds_options_and_the_command_line_wins(
    line, arguments, value, from_file, tmp_path
):
    name = line.partition(":")[0].replace("coeff", "coef")
    found = from_file(line, *arguments.split())[name]
    assert (found, type(found)) == (value, type(value))
    assert ppo("--config", str(tmp_path / "options.yaml"), *arguments.split())[name] == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gama: 0.9", "unknown option in --config {file}: gama; did you mean gamma?"),
        ("value_clip: false", "--config {file}: --value_clip takes a text or number, got False"),
        ("bf16: 'true'", "--config {file}: --bf16 must be true or false, got 'true'."),
        ("3: 4", "unknown option in --config {file}: 3; see --help all for every option."),
        (
            "use_tensorboard: true",
            "--config {file}: --use_tensorboard takes a text or number, got True",
        ),
        (
            "save_path: {a: b}",
            "--config {file}: --save_path takes a text or number, got {{'a': 'b'}}",
        ),
        ("- gamma", "--config {file}: it must hold 'option: value' lines."),
        ("a: b: c", "--config {file}: mapping values are not allowed here"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_naming_it(text, message, from_file, tmp_path):
    with pytest.raises(ValueError) as error:
        from_file(text)
    assert message.format(file=tmp_path / "options.yaml") in str(error.value)


@COMMANDS
def test_a_config_written_as_yaml_reads_back_to_an_equal_one(command, tmp_path):
    for config in (parse(command), with_other_values(command, tmp_path)):
        save_run(tmp_path, flat_dict(config), {})
        assert parse_options(command, ["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    "text", ["--flag {}", "'{}'", '"{}"', "{} #", "{}: [x]", " {} \n\n", "\\n{}", "ü {}", ""]
)
def test_any_text_survives_the_file(text, tmp_path):
    config = parse(TrainPPOConfig, f"--input_template={text}")
    assert config.data.input_template == text
    save_run(tmp_path, flat_dict(config), {})
    assert parse_options(TrainPPOConfig, ["--config", str(tmp_path / "config.yaml")]) == config


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Sets the flags after those that work, what builds the job, and the ranks; gives the seconds slept."""
    slept: list[float] = []
    monkeypatch.setattr("openppo.cli.options.time.sleep", slept.append)
    monkeypatch.setattr("openppo.cli.options._end_process", sys.exit)
    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog._exit", lambda watch, status: None)

    def given(
        flags: str, build: Callable[[Any], Any], ranks: tuple[str, ...] = ("0", "0", "1", "1")
    ) -> list[float]:
        monkeypatch.setattr(
            "sys.argv", ["train_ppo.py", *words(REQUIRED[TrainPPOConfig]), *flags.split()]
        )
        monkeypatch.setattr("openppo.cli.options.pkgutil.resolve_name", lambda name: build)
        for name, value in zip(
            ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"), ranks, strict=True
        ):
            monkeypatch.setenv(name, value)
        return slept

    return given


def raises(error: Exception) -> Callable[..., Any]:
    """A function that raises."""

    def raising(*_: Any) -> None:
        raise error

    return raising


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, and RANK and LOCAL_RANK are not"),
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            "LOCAL_RANK and WORLD_SIZE are set, and RANK is not",
        ),
        ({"RANK": "0"}, "RANK is set, and LOCAL_RANK and WORLD_SIZE are not"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK and WORLD_SIZE are set, and LOCAL_RANK is not"),
    ],
)
def test_half_of_a_launch_is_one_line(variables, says, command_line, monkeypatch, capfd):
    command_line(
        "--train_batch_size 1", raises(AssertionError("it is refused before anything is built"))
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run_command(TrainPPOConfig, "the:job")
    error = f"error: {says}: start with torchrun, which sets all three, or unset them.\n"
    assert (ended.value.code, capfd.readouterr().err) == (2, error)


@pytest.mark.parametrize(
    ("world_size", "says"),
    [("1", "--pretrain m: no such folder."), ("3", "--train_batch_size 128 does not divide")],
)
def test_an_error_of_options_or_of_the_start_is_one_line(world_size, says, command_line, capfd):
    command_line(
        "", raises(ValueError("--pretrain m: no such folder.")), ("0", "0", world_size, "1")
    )
    with pytest.raises(SystemExit) as ended:
        run_command(TrainPPOConfig, "the:job")
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
    rank, local_rank, hosts, who, monkeypatch, command_line, capsys
):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu02")
    for flags in ("--gamma high", "--gama 1"):
        slept = command_line(flags, raises(AssertionError("built")), (rank, local_rank, "4", hosts))
        with pytest.raises(SystemExit) as ended:
            run_command(TrainPPOConfig, "the:job")
        said = capsys.readouterr().err
        assert ended.value.code == 2
        if flags == "--gamma high":  # an error of tyro
            assert ("--gamma" in said) == (local_rank == "0")
        else:
            assert said.startswith(f"error{who}: unknown flag --gama")
    assert len(slept) == (0 if local_rank == "0" else 2)


def test_an_error_of_ours_and_an_error_while_running_keep_their_tracebacks(command_line, capfd):
    running = SimpleNamespace(fit=raises(ValueError("while running")))
    for build, error in (
        (raises(KeyError("ours")), KeyError),
        (lambda config: running, ValueError),
    ):
        command_line("", build)
        with pytest.raises(error, match="ours|while running"):
            run_command(TrainPPOConfig, "the:job")
    report = capfd.readouterr().err
    assert "Traceback" in report
    assert "fault:   rank 0 raised KeyError: 'ours'" in report
    assert "fault:   rank 0 raised ValueError: while running" in report
