"""What a run tells at its start is what it then does, and looking at it changes nothing."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(__file__).with_name("run_watching.py")
WATCHED = "--profile_steps 2 --use_tensorboard {folder}/tb --log_samples_every 1"
CASES = {
    "watched": "--max_epochs 2 --num_episodes 2 --micro_train_batch_size 1 " + WATCHED,
    "unwatched": "--max_epochs 2 --num_episodes 2 --micro_train_batch_size 1 --no_self_check --log_samples_every 0",
    "lora 3": "--zero_stage 3 --lora_rank 3 --critic_lora_rank 0 --bf16 --profile_steps 1-2 --micro_train_batch_size 2",
    "limited": "--buffer_limit 3 --micro_rollout_batch_size 1 --micro_train_batch_size 2",
}


@pytest.fixture(scope="module")
def outputs(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> dict[str, Any]:
    """Folder and printed lines of each case, on two ranks: 10 prompts in batches of 4, 4 and 2, two responses each."""
    folder = tmp_path_factory.mktemp("watching")
    lines = []
    for name, flags in CASES.items():
        place = folder / name.replace(" ", "_")
        place.mkdir()
        shared = f"""--pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
            --input_key input --max_samples 10 --generate_max_len 6 --n_samples_per_prompt 2 --rollout_batch_size 4
            --train_batch_size 4 --micro_rollout_batch_size 3 --save_path {place}/model"""
        shared = shared if "--micro_rollout" not in flags else shared.replace("--micro_rollout_batch_size 3", "")
        lines.append([str(place), f"{shared} {flags.format(folder=place)}"])
    (folder / "cases.json").write_text(json.dumps(lines))
    printed = re.split(r"END OF .*\n", launch(2, SCRIPT, folder / "cases.json"))
    return {
        name: {"folder": Path(place), "lines": text.splitlines()}
        for name, (place, _), text in zip(CASES, lines, printed, strict=False)
    }


@pytest.mark.parametrize("name", CASES)
def test_the_batch_arithmetic_is_what_the_run_did(outputs: dict[str, Any], name: str) -> None:
    folder = outputs[name]["folder"]
    plan = json.loads((folder / "plan.json").read_text())
    ranks = [json.loads((folder / f"counts_{rank}.json").read_text()) for rank in (0, 1)]
    planned = plan["steps"] * plan["episodes"]
    assert len(planned) == len(ranks[0]) == len(ranks[1])
    for step, *counts in zip(planned, *ranks, strict=True):
        for of_rank in counts:
            assert of_rank["prompts"] == step["n_prompts"]
            assert of_rank["optimizer_steps"] == step["optimizer_steps"]
    assert plan["total"] == sum(step["optimizer_steps"] for step in ranks[0])


def test_the_arithmetic_of_a_case_done_by_hand(outputs: dict[str, Any]) -> None:
    """Two episodes of 4, 4 and 2 prompts, two responses each: 8, 8 and 4 samples, of which a rank has half."""
    plan = json.loads((outputs["watched"]["folder"] / "plan.json").read_text())
    assert [step["n_samples"] for step in plan["steps"]] == [8, 8, 4]
    assert [step["optimizer_steps"] for step in plan["steps"]] == [4, 4, 2]
    assert plan["total"] == 20
    text = "\n".join(outputs["watched"]["lines"])
    assert "4 prompts x 2 responses = 8 samples" in text
    assert "passes of up to 3 samples on each of 2 ranks" in text
    assert "2 epochs of 2 mini-batches of 4 samples, in micro-batches of up to 1 samples on each of 2 ranks" in text
    assert "2 episodes of 10 prompts in 3 batches, the last of 2" in text
    assert "6 steps, 20 optimizer steps" in text


def test_looking_changes_nothing(outputs: dict[str, Any], left_by: Callable[[Path], Any]) -> None:
    """Self-check, histograms, profiler and samples on the console: every number and every weight stays, bit for bit."""
    watched, unwatched = (left_by(outputs[name]["folder"] / "model") for name in ("watched", "unwatched"))
    assert watched.metrics == unwatched.metrics
    assert watched.samples == unwatched.samples
    assert watched.files == unwatched.files
    assert not any("self-check" in line for line in outputs["unwatched"]["lines"])
    assert sum("self-check: masks, EOS" in line for line in outputs["watched"]["lines"]) == 1


def roles(lines: list[str]) -> dict[str, list[str]]:
    """The table of roles by role: trained, frozen, dtype, place; or nothing for those without weights."""
    start = next(i for i, line in enumerate(lines) if re.match(r"\[openppo\] role  ", line))
    table = [re.split(r"  +", line.removeprefix("[openppo] ")) for line in lines[start + 1 : start + 5]]
    return {name: rest for name, _, *rest in table}


def n_elements(model: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in a checkpoint, by name."""
    with safe_open(model / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def total(shapes: dict[str, tuple[int, ...]]) -> int:
    """Elements of all of them."""
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values()]
    return sum(sizes)


def test_parameters_are_counted_as_the_checkpoints_have_them(outputs: dict[str, Any], tiny: Path) -> None:
    actor, reward = total(n_elements(tiny / "actor")), total(n_elements(tiny / "reward"))
    assert roles(outputs["watched"]["lines"]) == {
        "actor": [f"{actor:,}", "0", "fp32", "2 x cpu, ZeRO-2"],
        "critic": [f"{reward:,}", "0", "fp32", "2 x cpu, ZeRO-2"],
        "reference": ["0", f"{actor:,}", "fp32", "2 x cpu, whole"],
        "reward": ["0", f"{reward:,}", "fp32", "2 x cpu, whole"],
    }


def test_adapters_and_partitioned_weights_are_counted_whole(outputs: dict[str, Any], tiny: Path) -> None:
    """An adapter of rank 3 on a layer of (out, in) has 3 (out + in) elements."""
    shapes = n_elements(tiny / "actor")
    adapters = sum(3 * sum(shape) for name, shape in shapes.items() if "_proj" in name)
    reward = total(n_elements(tiny / "reward"))
    assert roles(outputs["lora 3"]["lines"]) == {
        "actor": [f"{adapters:,}", f"{total(shapes):,}", "bf16 + fp32 master", "2 x cpu, ZeRO-3"],
        "critic": [f"{reward:,}", "0", "bf16 + fp32 master", "2 x cpu, ZeRO-3"],
        "reference": [],
        "reward": ["0", f"{reward:,}", "bf16", "2 x cpu, ZeRO-3"],
    }


def phases(file: Path) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of the named spans of a trace, in microseconds."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]:
        if event.get("cat") == "user_annotation":
            spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return spans


def test_each_rank_writes_a_trace_of_each_chosen_step_and_of_no_other(outputs: dict[str, Any]) -> None:
    for name, steps in (("watched", [2]), ("lora 3", [1, 2]), ("unwatched", [])):
        found = sorted(file.name for file in (outputs[name]["folder"] / "model/logs").rglob("*.json.gz"))
        parts = [f"{rank}{part}" for rank in (0, 1) for part in ("", "_part_2")]  # of the rollout, of training on it
        assert found == [f"step_{step:08d}_rank_{part}.json.gz" for step in steps for part in parts]


@pytest.mark.parametrize("rank", (0, 1))
def test_a_trace_names_all_phases_in_their_order_inside_the_step(outputs: dict[str, Any], rank: int) -> None:
    folder, order = outputs["watched"]["folder"] / "model/logs/profile", []
    for part, names in (("", ("generation", "scoring")), ("_part_2", ("experience", "training"))):
        file = folder / f"step_00000002_rank_{rank}{part}.json.gz"
        spans = phases(file)
        ((begin, end),) = spans["step"]
        order += [spans[name][0] for name in names]
        assert all(begin <= first and last <= end for name in spans for first, last in spans[name] if name != "step")
    assert order == sorted(order)
    operators = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= operators or {"aten::addmm", "aten::mm"} & operators


def test_tensorboard_has_histograms_of_all_ranks_at_every_step(outputs: dict[str, Any]) -> None:
    folder = outputs["watched"]["folder"]
    events = EventAccumulator(str(folder / "tb" / "model"), {"histograms": 0}).Reload()
    metrics = [json.loads(line) for line in (folder / "model/logs/metrics.jsonl").read_text().splitlines()]
    assert sorted(events.Tags()["histograms"]) == [
        f"histograms/{name}" for name in ("advantages", "kl", "response_length", "returns", "reward", "values")
    ]
    for name in ("reward", "response_length", "kl", "values", "returns"):
        made = events.Histograms(f"histograms/{name}")
        assert [event.step for event in made] == [1, 2, 3, 4, 5, 6]
        for event, line in zip(made, metrics, strict=True):
            mean = event.histogram_value.sum / event.histogram_value.num
            assert mean == pytest.approx(line[name], rel=1e-5, abs=1e-6)
    assert [event.histogram_value.num for event in events.Histograms("histograms/reward")] == [8, 8, 4] * 2
