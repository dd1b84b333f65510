"""Commands write their output where the user says, and lose nothing that lies there."""

import json

import pytest

from tests.distributed.conftest import write_rows
from tests.distributed.runs import rows

GENERATE = "-m openppo.cli.generate --pretrain {tiny}/actor --prompt_data prompts.jsonl --generate_max_len 4"
EVALUATE = "-m openppo.cli.evaluate --pretrain {tiny}/actor --prompt_data prompts.jsonl --generate_max_len 4"
FOREIGN = "holds what this command has not written: name another file, or remove it."


@pytest.fixture
def folder(tmp_path):
    """Prompts, a link to them, a reward function, and metrics of a run."""
    write_rows(tmp_path / "prompts.jsonl", [{"input": letter} for letter in "abcdef"])
    (tmp_path / "link.jsonl").symlink_to("prompts.jsonl")
    (tmp_path / "rewards.py").write_text(
        "def score(responses):\n    return [len(text) for text in responses]\n"
    )
    (tmp_path / "run" / "logs").mkdir(parents=True)
    write_rows(tmp_path / "run" / "logs" / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
    return tmp_path


@pytest.mark.parametrize(
    ("ranks", "command", "error"),
    [
        (
            2,
            f"{GENERATE} --output_path prompts.jsonl",
            "prompts.jsonl is read by --prompt_data prompts.jsonl",
        ),
        pytest.param(
            2,
            f"{GENERATE} --output_path link.jsonl",
            "link.jsonl is read by --prompt_data prompts.jsonl",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            f"{EVALUATE} --reward_fn rewards.py --output_path rewards.py",
            f"rewards.py {FOREIGN}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            f"{GENERATE} --output_path run/logs/metrics.jsonl",
            f"metrics.jsonl {FOREIGN}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            0,
            "-m openppo.cli.report run --output run/logs/metrics.jsonl",
            f"metrics.jsonl {FOREIGN}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_output_that_would_replace_other_data_is_refused(
    tiny, folder, launch, ranks, command, error
):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    printed = launch(
        ranks, *command.format(tiny=tiny).split(), cwd=folder, status=1 if ranks else 2
    )
    assert printed.count(error) == 1
    assert "Traceback" not in printed
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert (folder / "link.jsonl").is_symlink()


def test_an_earlier_output_is_replaced_whole(tiny, folder, launch):
    before = {path.name for path in folder.iterdir()}
    command = f"{GENERATE} --output_path answers.jsonl".format(tiny=tiny).split()
    launch(2, *command, cwd=folder)
    first = rows(folder / "answers.jsonl")
    with (folder / "answers.jsonl").open("a") as file:
        file.write(json.dumps(first[0]) + "\n")
    launch(2, *command, cwd=folder)
    assert rows(folder / "answers.jsonl") == first
    assert len(first) == 6, "a row for each prompt"
    assert {path.name for path in folder.iterdir()} == before | {"answers.jsonl"}
