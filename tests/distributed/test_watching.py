"""What a run tells at its start is what it then does, and looking at it changes nothing."""

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed.runs import OPTIONS, left_by, outcome, vector

COMMON = """--pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
    --input_key input --max_samples 10 --generate_max_len 6 --n_samples_per_prompt 2 --rollout_batch_size 4
    --train_batch_size 4"""
TWICE = f"{COMMON} --micro_rollout_batch_size 3 --max_epochs 2 --num_episodes 2 --micro_train_batch_size 1"
DROPOUT = f"{COMMON} --zero_stage 3 --lora_rank 2 --lora_dropout 0.3"
CASES = {
    "watched": f"{TWICE} --profile_steps 2 --use_tensorboard {{folder}}/tb --log_samples_every 1",
    "unwatched": f"{TWICE} --config {OPTIONS}/no_self_check.yaml --log_samples_every 0",
    "lora": f"""{COMMON} --micro_rollout_batch_size 3 --zero_stage 3 --lora_rank 3 --critic_lora_rank 0 --bf16
        --profile_steps 1-2 --micro_train_batch_size 2""",
    "check on": f"{DROPOUT} --engine_check on",
    "check off": f"{DROPOUT} --engine_check off",
}
Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_cases: Callable[..., str]) -> Runs:
    """Each case with its printed ``lines``, on two ranks: 10 prompts in batches of 4, 4 and 2, two responses each."""
    folder = tmp_path_factory.mktemp("watching")
    printed = re.split(r"(?:case [\w ]+\n)+", run_cases(2, folder, CASES))[1:]  # each rank says it
    return {
        name: outcome(folder / name) | {"lines": text.splitlines()}
        for name, text in zip(CASES, printed, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_the_batch_arithmetic_is_what_the_run_did(runs, name):
    text = re.sub(
        r"\s+", " ", " ".join(line.removeprefix("[openppo]") for line in runs[name]["lines"])
    )
    steps, optimizer_steps = map(int, re.findall(r"(\d+) steps, (\d+) optimizer steps", text)[0])
    assert (steps, optimizer_steps) == (len(runs[name]["logged"]), runs[name]["optimizer_steps"])
    if name == "watched":  # by hand: 8, 8 and 4 samples, of which a rank has half; twice
        assert (steps, optimizer_steps) == (6, 20)
        assert [len(step) for step in runs[name]["samples"]] == [8, 8, 4] * 2
        assert "4 prompts x 2 responses = 8 samples" in text
        assert "passes of up to 3 samples on each of 2 ranks" in text
        assert (
            "2 epochs of 2 mini-batches of 4 samples, in micro-batches of up to 1 samples on each of 2"
            in text
        )
        assert "2 episodes of 10 prompts in 3 batches, the last of 2" in text


@pytest.mark.parametrize("pair", [("watched", "unwatched"), ("check on", "check off")])
def test_looking_changes_nothing(runs, pair):
    """Self-check, histograms, profiler and samples on the console: every number and every weight stays, bit for bit."""
    watched, unwatched = (left_by(runs[name]["folder"] / "model") for name in pair)
    assert watched == unwatched
    assert not any("self-check" in line for line in runs["unwatched"]["lines"])
    assert sum("self-check: masks, EOS" in line for line in runs["watched"]["lines"]) == 1


def roles(lines: list[str]) -> dict[str, str]:
    """The facts of each role: parameters, dtype, place; empty for those without weights."""
    plain = [line.removeprefix("[openppo]").removeprefix(" ") for line in lines]
    table = plain[next(i for i, line in enumerate(plain) if line.startswith("actor  ")) :]
    text = "\n".join(table[: table.index("")])
    of_roles = re.findall(r"^(\w+)(.*(?:\n .*)*)", text, flags=re.MULTILINE)
    facts = {
        name: re.search(r"[\d,]+ (trained|frozen), .*", " ".join(rest.split()))
        for name, rest in of_roles
    }
    return {name: match[0] if match else "" for name, match in facts.items()}


def test_parameters_are_counted_as_the_checkpoints_have_them(runs, tiny):
    """An adapter of rank 3 on a layer of (out, in) has 3 (out + in) elements; partitioned weights count whole."""
    actor, reward = (f"{len(vector(tiny / name)):,}" for name in ("actor", "reward"))
    assert roles(runs["watched"]["lines"]) == {
        "actor": f"{actor} trained, fp32, 2 x cpu, ZeRO-2",
        "critic": f"{reward} trained, fp32, 2 x cpu, ZeRO-2",
        "reference": f"{actor} frozen, fp32, 2 x cpu, whole",
        "reward": f"{reward} frozen, fp32, 2 x cpu, whole",
    }
    with safe_open(tiny / "actor" / "model.safetensors", "pt") as file:
        adapted = [file.get_slice(name).get_shape() for name in file.keys() if "_proj" in name]  # noqa: SIM118
    adapters = 3 * sum(map(sum, adapted))
    assert roles(runs["lora"]["lines"]) == {
        "actor": f"{adapters:,} trained, {actor} frozen, bf16 + fp32 master, 2 x cpu, ZeRO-3",
        "critic": f"{reward} trained, bf16 + fp32 master, 2 x cpu, ZeRO-3",
        "reference": "",
        "reward": f"{reward} frozen, bf16, 2 x cpu, ZeRO-3",
    }


def test_each_rank_writes_traces_of_chosen_steps_with_all_phases_in_order(runs):
    for name, steps in (("watched", [2]), ("lora", [1, 2]), ("unwatched", [])):
        found = sorted(
            file.name for file in (runs[name]["folder"] / "model/logs").rglob("*.json.gz")
        )
        parts = [
            f"{rank}{part}" for rank in (0, 1) for part in ("", "_part_2")
        ]  # of the rollout, of training on it
        assert found == [f"step_{step:08d}_rank_{part}.json.gz" for step in steps for part in parts]
    folder, spans = runs["watched"]["folder"] / "model/logs/profile", {}
    for part in ("", "_part_2"):
        trace = json.loads(
            gzip.decompress((folder / f"step_00000002_rank_1{part}.json.gz").read_bytes())
        )
        spans |= {
            e["name"]: e["ts"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"
        }
    order = [spans[name] for name in ("generation", "scoring", "experience", "training")]
    assert order == sorted(order)
    assert {"aten::addmm", "aten::mm"} & {event.get("name") for event in trace["traceEvents"]}


def test_tensorboard_has_histograms_of_all_ranks_at_every_step(runs):
    run = runs["watched"]
    events = EventAccumulator(
        str(run["folder"].parent / "tb" / "model"), {"histograms": 0}
    ).Reload()
    names = ["advantages", "kl", "response_length", "returns", "reward", "values"]
    assert sorted(events.Tags()["histograms"]) == [f"histograms/{name}" for name in names]
    for name in names[1:]:
        made = events.Histograms(f"histograms/{name}")
        assert [event.step for event in made] == [1, 2, 3, 4, 5, 6]
        means = [event.histogram_value.sum / event.histogram_value.num for event in made]
        assert means == pytest.approx([line[name] for line in run["logged"]], rel=1e-5, abs=1e-6)
    assert [event.histogram_value.num for event in events.Histograms("histograms/reward")] == [
        8,
        8,
        4,
    ] * 2
