"""Recipes: options that come with the package, below those of a file and of the command line."""

from pathlib import Path

import pytest
import yaml

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig, TrainSFTConfig, flat_dict
from openppo.config.recipe_files import recipe_file, recipe_names

DOCUMENT = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
NEEDED = "--pretrain m --prompt_data d --reward_fn r.py".split()


def options(*words: str) -> dict[str, object]:
    return flat_dict(parse_options(TrainPPOConfig, [*NEEDED, *words]))


def plain(value: object) -> object:
    """Numbers as such, since YAML reads 3e-4 as a text; other values as they are."""
    try:
        return float(str(value))
    except ValueError:
        return value


def test_there_are_six_recipes_and_the_help_page_lists_them(capsys):
    names = ["dapo", "dr_grpo", "glm5_async", "grpo", "gspo", "ppo"]
    assert recipe_names() == names
    with pytest.raises(SystemExit):
        parse_options(TrainPPOConfig, ["--help"])
    assert ", ".join(names) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_sets_its_options_and_no_others(name):
    values = yaml.safe_load(recipe_file(name).read_text())
    config = parse_options(TrainPPOConfig, [*NEEDED, "--recipe", name])
    config.validate(1)
    changed = flat_dict(config)
    assert {option: plain(changed[option]) for option in values} == {
        option: plain(value) for option, value in values.items()
    }
    others = {option: value for option, value in changed.items() if option not in values}
    without = options()
    assert others == {option: without[option] for option in others}


def test_the_command_line_wins_over_a_file_and_a_file_over_a_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("eps_clip_high: 0.3\nn_samples_per_prompt: 4\ndynamic_sampling: false\n")
    words = f"--n_samples_per_prompt 2 --recipe dapo --config {file}".split()
    chosen = options(*words)
    assert chosen["n_samples_per_prompt"] == 2
    assert chosen["eps_clip_high"] == 0.3
    assert chosen["dynamic_sampling"] == 0
    assert chosen["overlong_buffer_len"] == 4096


def test_only_train_ppo_has_recipes():
    with pytest.raises(ValueError, match="unknown flag --recipe"):
        parse_options(TrainSFTConfig, "--pretrain m --dataset d --recipe ppo".split())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_names_its_source_and_its_page_shows_it(name):
    text = recipe_file(name).read_text()
    assert text.startswith("#") and "arXiv" in text
    assert f"```yaml\n{text}```" in DOCUMENT
