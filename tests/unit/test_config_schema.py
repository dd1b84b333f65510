"""The schemas that editors read agree with what ``--config`` takes."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, flat_dict
from openppo.config.fields import SPELLINGS, declared_options, rules_of
from openppo.config.schema import COMMANDS, schema_of
from openppo.tracking.run_folder import save_run

REPO = Path(__file__).parents[2]
NUMBERS = (-2, -1, 0, 0.25, 1, 2, 3.5, 1e6)
TEXTS = ("", "~/folder", "folder", "~")


def is_valid(schema: dict[str, Any], value: object) -> bool:
    """True if a file of one value, or of options by name, follows a schema."""
    return jsonschema.Draft7Validator(schema).is_valid(value)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_committed_schema_is_that_of_the_options(command: str) -> None:
    committed = json.loads((REPO / f"docs/assets/{command}.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(committed)
    remedy = "write it anew: python -m openppo.config.schema docs/assets"
    assert committed == json.loads(json.dumps(schema_of(command))), remedy


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_there_with_help_and_default(command: str) -> None:
    declared = declared_options(COMMANDS[command])
    properties = schema_of(command)["properties"]
    assert properties.keys() - SPELLINGS.keys() == declared.keys()
    for name, option in declared.items():
        assert properties[name]["description"][-1] in ".)'", name
        assert properties[name].get("default", dataclasses.MISSING) == option.default, name
        if option.default is not dataclasses.MISSING:
            assert is_valid(properties[name], json.loads(json.dumps(option.default))), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_bound_is_that_of_the_command_line(command: str) -> None:
    properties = schema_of(command)["properties"]
    compared = 0
    for name, option in declared_options(COMMANDS[command]).items():
        bound = rules_of(option).bound
        if bound is None:
            continue
        probes: tuple[object, ...] = TEXTS if "str" in str(option.type) else NUMBERS
        schema = properties[name]
        if str(option.type) == "tuple[float, float]":
            schema = schema["items"][0]
        if "int" in str(option.type):
            probes = tuple(number for number in NUMBERS if number == int(number))
        for probe in probes:
            assert is_valid(schema, probe) == bool(bound.holds(probe)), f"{name}: {probe}"
            compared += 1
    assert compared > 100


FILES = [  # the text, and whether a run would start with it
    ("advantage_estimator: group_norm", True),
    ("advantage_estimator: grop_norm", False),
    ("gama: 1.0", False),
    ("train_batch_size: 64", True),
    ("train_batch_size: many", False),
    ("train_batch_size: 0", False),
    ("train_batch_size: 1.5", False),
    ("bf16: true", True),
    ("bf16: 1", False),
    ("zero_stage: 4", False),
    ("adam_betas: [0.9, 0.99]", True),
    ("adam_betas: [0.9]", False),
    ("adam_betas: 0.9", False),
    ("verifiable_reward: [math, exact_match]", True),
    ("verifiable_reward: math", True),
    ("verifiable_reward: maths", False),
    ("overlap_comm: on", True),
    ("overlap_comm: maybe", False),
    ("kl_target: null", True),
    ("num_episodes: null", False),
    ("use_wandb: true", True),
    ("reward_pretrain: true", False),
    ("reward_pretrain: [a, b]", False),
    ("chat_template_kwargs: {enable_thinking: false}\napply_chat_template: true", True),
    ("init_kl_coeff: 0.1", True),
    ("lambd: 1.5", False),
]


@pytest.mark.parametrize(("text", "starts"), FILES)
def test_the_schema_takes_what_a_run_would_start_with(
    text: str, starts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    given = ["--config", str(tmp_path / "run.yaml"), "--pretrain", "m", "--prompt_data", "p.jsonl"]
    if "reward" not in text:
        given += ["--reward_pretrain", "r"]
    if "group_norm" in text:
        given += ["--n_samples_per_prompt", "2"]
    try:
        parse_options(TrainPPOConfig, given).validate()
        has_started = True
    except (ValueError, SystemExit):
        has_started = False
    assert has_started == starts
    assert is_valid(schema_of("train_ppo"), yaml.safe_load(text)) == starts


def test_the_options_that_a_run_writes_follow_the_schema(tmp_path: Path) -> None:
    config = parse_options(TrainPPOConfig, ["--pretrain", "m", "--use_wandb", "key"])
    save_run(tmp_path, flat_dict(config), {})
    assert is_valid(schema_of("train_ppo"), yaml.safe_load((tmp_path / "config.yaml").read_text()))


def test_the_documented_file_starts_a_run_and_names_its_schema(tmp_path: Path) -> None:
    page = (REPO / "docs/first-hour.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (line,) = re.findall(r"^openppo train_ppo (--config mine\.yaml .*)$", page, flags=re.MULTILINE)
    (tmp_path / "mine.yaml").write_text(text)
    flags = line.replace("mine.yaml", str(tmp_path / "mine.yaml")).split()
    parse_options(TrainPPOConfig, flags).validate()
    assert is_valid(schema_of("train_ppo"), yaml.safe_load(text))
    address = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    (file,) = re.findall(r"githubusercontent\.com/openppo/openppo/main/(\S+)", address)
    assert (REPO / file).is_file()
