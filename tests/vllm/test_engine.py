"""What vLLM samples, against forwards and greedy generation of transformers with the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).with_name("run_engine.py")
PROMPTS = [[3, 4, 5], [7], [8, 8, 3, 9, 10, 4], [5, 3], [9, 9, 9], [4, 10, 7, 3]]
LONG_PROMPT = [3 + i % 8 for i in range(140)]
EOS = {1, 6}
N_TOKENS, N_GREEDY = 12, 10
Completions = list[dict[str, Any]]


@pytest.fixture(scope="module")
def out(inputs: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> Path:
    """The folder with what run_engine.py wrote."""
    folder = tmp_path_factory.mktemp("engine")
    launch(0, SCRIPT, inputs, folder)
    return folder


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    """What the engine answered."""
    loaded: dict[str, Any] = json.loads((out / "result.json").read_text())
    return loaded


@torch.no_grad()
def logits_of_responses(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Float32 (tokens of the response, V)."""
    logits: torch.Tensor = model(torch.tensor([[*prompt, *response]])).logits[0]
    return logits[len(prompt) - 1 : -1]


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    """Log-probs of one distribution after temperature, then top-k, then top-p, token by token in plain Python."""
    probabilities = (logits / temperature).double().softmax(-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:top_k]
    total, kept, covered = sum(probabilities[i] for i in order), [], 0.0
    for i in order:
        if covered < top_p:
            kept.append(i)
        covered += probabilities[i] / total
    total = sum(probabilities[i] for i in kept)
    return [float(torch.tensor(p / total).log()) if i in kept else -torch.inf for i, p in enumerate(probabilities)]


@pytest.mark.parametrize(
    ("name", "warps"), [("plain", (1.0, 11, 1.0)), ("warm", (0.7, 11, 1.0)), ("cut", (1.3, 5, 0.8))]
)
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(
    inputs: Path, result: dict[str, Any], name: str, warps: tuple[float, int, float]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs / "llama")
    for prompt, completion in zip(PROMPTS, result["sampled"][name], strict=True):
        ids = completion["token_ids"]
        rows = logits_of_responses(model, prompt, ids)
        expected = [warped(row, *warps)[token] for row, token in zip(rows, ids, strict=True)]
        assert completion["log_probs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["plain", "warm", "cut"])
def test_a_response_ends_at_any_of_several_eos_ids_or_at_its_limit(result: dict[str, Any], name: str) -> None:
    completions = result["sampled"][name]
    assert {c["finish_reason"] for c in completions} == {"stop", "length"} or name != "plain"
    for completion in completions:
        ids, reason = completion["token_ids"], completion["finish_reason"]
        assert not EOS & set(ids[:-1])
        assert (ids[-1] in EOS) if reason == "stop" else (ids[-1] not in EOS and len(ids) == N_TOKENS)


def text_of(ids: list[int]) -> str:
    return "".join("___abcdefgh"[i] for i in ids)


def test_a_stop_ends_a_response_where_it_is_complete(result: dict[str, Any]) -> None:
    ended = 0
    for free, ours in zip(result["sampled"]["plain"], result["sampled"]["stops"], strict=True):
        ids = free["token_ids"]
        ends = (8 in ids[:n] or any(stop in text_of(ids[:n]) for stop in ("ab", "hg", "ee")) for n in range(1, 13))
        n = next((n for n, ends_here in enumerate(ends, 1) if ends_here), len(ids))
        assert ours["token_ids"] == ids[:n]
        assert ours["log_probs"] == pytest.approx(free["log_probs"][:n], abs=1e-5)
        assert ours["finish_reason"] == ("stop" if n < len(ids) else free["finish_reason"])
        ended += n < len(ids)
    assert ended > 0


def test_nothing_ends_a_response_before_the_least_length(inputs: Path, result: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(inputs / "llama")
    ends = sorted(EOS | {8, 9})
    for prompt, completion in zip(PROMPTS, result["sampled"]["late"], strict=True):
        ids = completion["token_ids"]
        assert len(ids) >= 6
        assert not set(ends) & set(ids[:6])
        rows = logits_of_responses(model, prompt, ids)
        rows[:6, ends] = -torch.inf
        expected = rows.log_softmax(-1)[range(len(ids)), ids].tolist()
        assert completion["log_probs"] == pytest.approx(expected, abs=1e-4)
        last = completion["finish_reason"] == "stop"
        assert last == (ids[-1] in ends or text_of(ids[-1:]) in ("b", "c"))


def tokens(completions: Completions) -> list[list[int]]:
    return [completion["token_ids"] for completion in completions]


def test_a_response_depends_on_its_seed_and_not_on_its_neighbours(result: dict[str, Any]) -> None:
    found = result["sampled"]
    assert tokens(found["alone"]) == tokens(found["one by one"]) == tokens(found["plain"])
    assert tokens(found["other seeds"]) != tokens(found["plain"])


def expected_greedy(model: Any) -> list[list[int]]:
    """The likeliest tokens by a whole forward for each."""
    found = []
    for prompt in [*PROMPTS, LONG_PROMPT]:
        ids: list[int] = []
        while len(ids) < N_GREEDY and not EOS & set(ids[-1:]):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
        found.append(ids)
    return found


def test_weights_are_taken_over_in_place_each_time(inputs: Path, out: Path, result: dict[str, Any]) -> None:
    first, changed = (AutoModelForCausalLM.from_pretrained(folder) for folder in (inputs / "llama", out / "changed"))
    assert tokens(result["greedy first"]) == expected_greedy(first)
    assert tokens(result["greedy changed"]) == expected_greedy(changed)
    assert tokens(result["greedy first"])[-1] != tokens(result["greedy changed"])[-1], "the long prompt can tell"


def test_greedy_choices_are_certain_as_with_the_other_engine(result: dict[str, Any]) -> None:
    assert all(set(completion["log_probs"]) == {0.0} for completion in result["greedy first"])


def test_adapters_are_merged_on_the_way_and_stay_as_they_are(out: Path, result: dict[str, Any]) -> None:
    adapted = AutoPeftModelForCausalLM.from_pretrained(out / "adapted")
    assert tokens(result["greedy adapted"]) == expected_greedy(adapted)
    assert tokens(result["greedy adapted"]) != tokens(result["greedy first"])
    assert result["adapters stay"]


@pytest.mark.parametrize("name", ["tied", "qwen2", "qwen3"])
def test_heads_tied_to_embeddings_biases_and_norms_are_taken_over(
    inputs: Path, out: Path, result: dict[str, Any], name: str
) -> None:
    model, before = (AutoModelForCausalLM.from_pretrained(folder / name) for folder in (out, inputs))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name != "qwen3")
    assert tokens(result[f"greedy {name}"]) == expected_greedy(model) != expected_greedy(before)


def test_a_signal_ends_generation_and_leaves_nothing_behind(out: Path, result: dict[str, Any]) -> None:
    found = result["interrupted"]
    assert found["signal"] == "SIGTERM"
    assert not found["busy"]
    assert found["again"] == result["greedy changed"]


def test_a_response_that_vllm_would_cut_is_refused(result: dict[str, Any]) -> None:
    found = result["interrupted"]["too long"]
    assert found.startswith("A prompt of 195 tokens and a response of up to 12 exceed the 200 ")
    assert "--prompt_max_len" in found


def test_the_process_group_outlives_an_engine(result: dict[str, Any]) -> None:
    assert result["group"]


def test_what_vllm_refuses_is_said_with_our_flags(inputs: Path, result: dict[str, Any]) -> None:
    assert result["refused"].startswith("--rollout_engine vllm with --vllm_gpu_memory_utilization 0.1: vLLM cannot")
    assert "100000" in result["refused"], "vLLM's own words follow"


def test_the_trainer_keeps_its_threads_and_may_change_them(result: dict[str, Any]) -> None:
    before, after, changed = result["threads"]
    assert after == before
    assert changed == before + 1
