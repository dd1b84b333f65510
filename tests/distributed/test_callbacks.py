"""What callbacks see of a run on two ranks, and how they end it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("run_callbacks.py")
Calls = list[list[Any]]


@pytest.fixture(scope="module")
def calls(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> dict[str, list[Calls]]:
    """What the callbacks of each rank saw, by run. The policy stays as it is, so evaluation finds no gain."""
    folder = tmp_path_factory.mktemp("callbacks")
    arguments = f"""--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --input_key input --generate_max_len 6
        --eval_data {tiny}/prompts.jsonl --eval_steps 1 --eval_before_training --max_samples 8 --num_episodes 4
        --verifiable_reward length --verify_length 3 --init_kl_coef 0 --advantage_estimator reinforce
        --rollout_batch_size 4 --train_batch_size 4 --actor_learning_rate 0"""
    launch(2, SCRIPT, folder, *arguments.split())
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("early", "one_rank", "again")}


@pytest.mark.parametrize("run", ["early", "one_rank"])
def test_all_ranks_see_the_same_calls_and_numbers(calls: dict[str, list[Calls]], run: str) -> None:
    first, second = calls[run]
    assert first == second


def test_every_point_of_a_run_is_called_in_order_until_nothing_gets_better(calls: dict[str, list[Calls]]) -> None:
    seen = calls["early"][0]
    assert [call[0] for call in seen] == [
        *("on_fit_start", "on_evaluate"),
        *("on_evaluate", "on_step_end") * 2,
        *("on_save", "on_fit_end"),
    ]
    assert [call[1] for call in seen if call[0] == "on_evaluate"] == [0, 1, 2]
    assert len({call[2] for call in seen if call[0] == "on_evaluate"}) == 1
    assert seen[-2][2] is True, "the model is there when on_save is called"


def test_one_rank_can_end_the_run_for_all(calls: dict[str, list[Calls]]) -> None:
    for seen in calls["one_rank"]:
        assert [call[1] for call in seen if call[0] == "on_step_end"] == [1]
        assert seen[-1] == ["on_fit_end"]


def test_a_run_that_stopped_by_itself_does_not_go_on_when_it_is_resumed(calls: dict[str, list[Calls]]) -> None:
    for seen in calls["again"]:
        assert [call[0] for call in seen] == ["on_fit_start", "on_save", "on_fit_end"]
