"""Compiled layers: one graph for all shapes of training, none for other passes, and kept for the next run.

Launched with a file for its results, a command and its options, this file trains and counts what torch has compiled.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters

from openppo.cli.options import parse_options
from tests.distributed.run_cases import TRAINERS, leave
from tests.distributed.test_split import CAN_COMPILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CAN_COMPILE, reason="torch.compile needs g++, and folders without a space"
    ),
]
SFT = """train_sft --pretrain {tiny}/actor --dataset {tiny}/sft.jsonl --eval_dataset {tiny}/sft.jsonl --compile
    --train_batch_size 4 --micro_train_batch_size 2 --max_steps 4 --eval_steps 2 --save_path {folder}/model"""
PPO = """train_ppo --pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl --compile
    --rollout_batch_size 12 --train_batch_size 12 --micro_train_batch_size 4 --max_steps 2 --generate_max_len 9
    --save_path {folder}/model"""


def main() -> None:
    """Train, and write how many graphs there are, where they break, and how many were found in the cache."""
    config_type, build = TRAINERS[sys.argv[2]]
    build(parse_options(config_type, sys.argv[3:]), None).fit()
    counts = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": counters["graph_break"],
        "kept": counters["inductor"]["fxgraph_cache_hit"],
    }
    Path(sys.argv[1]).write_text(json.dumps(counts))
    leave()


@pytest.fixture
def count(
    tiny: Path, tmp_path: Path, launch: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs a command whose compiled code is kept in a folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def run(command: str) -> dict[str, Any]:
        words = command.format(tiny=tiny, folder=tmp_path).split()
        launch(0, __file__, tmp_path / "counts.json", *words, real=True)
        return json.loads((tmp_path / "counts.json").read_text())

    return run


def test_rollouts_and_experience_compile_nothing_and_models_share_a_graph(count):
    counts = count(PPO)
    assert (counts["graphs"], counts["breaks"]) == (1, {})


def test_evaluation_compiles_nothing_and_the_next_run_finds_the_graph(count, tmp_path):
    assert count(SFT) == {"graphs": 1, "breaks": {}, "kept": 0}
    assert any((tmp_path / "cache" / "openppo" / "torchinductor").iterdir())
    assert count(SFT) == {"graphs": 1, "breaks": {}, "kept": 2}, "forward and backward"


if __name__ == "__main__":
    main()
