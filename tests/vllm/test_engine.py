"""What vLLM samples, against forwards and greedy generation of transformers with the same weights."""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).with_name("run_engine.py")
PROMPTS = [[3, 4, 5], [7], [8, 8, 3, 9, 10, 4], [5, 3], [9, 9, 9], [4, 10, 7, 3]]
LONG_PROMPT = [3 + i % 8 for i in range(140)]
EOS = {1, 6}
N_TOKENS, N_GREEDY = 12, 10


@pytest.fixture(scope="module")
def out(inputs, tmp_path_factory, launch):
    """The folder with what run_engine.py wrote."""
    folder = tmp_path_factory.mktemp("engine")
    launch(0, SCRIPT, inputs, folder)
    return folder


@pytest.fixture(scope="module")
def result(out):
    """What the engine answered."""
    return json.loads((out / "result.json").read_text())


@pytest.fixture(scope="module")
def llama(inputs):
    """The model with its first weights."""
    return AutoModelForCausalLM.from_pretrained(inputs / "llama")


@torch.no_grad()
def logits_of_responses(model, prompt, response):
    """Float32 (tokens of the response, V)."""
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]


def warped(logits, temperature, top_k, top_p):
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
def test_log_probs_are_of_the_sampled_distribution_until_eos_or_the_limit(llama, result, name, warps):
    completions = result["sampled"][name]
    assert {c["finish_reason"] for c in completions} == {"stop", "length"} or name != "plain"
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids, reason = completion["token_ids"], completion["finish_reason"]
        rows = logits_of_responses(llama, prompt, ids)
        expected = [warped(row, *warps)[token] for row, token in zip(rows, ids, strict=True)]
        assert completion["log_probs"] == pytest.approx(expected, abs=1e-4)
        assert not EOS & set(ids[:-1])
        assert (ids[-1] in EOS) if reason == "stop" else (ids[-1] not in EOS and len(ids) == N_TOKENS)


def text_of(ids):
    return "".join("___abcdefgh"[i] for i in ids)


def test_a_stop_ends_a_response_where_it_is_complete(result):
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


def test_nothing_ends_a_response_before_the_least_length(llama, result):
    ends = sorted(EOS | {8, 9})
    for prompt, completion in zip(PROMPTS, result["sampled"]["late"], strict=True):
        ids = completion["token_ids"]
        assert len(ids) >= 6
        assert not set(ends) & set(ids[:6])
        rows = logits_of_responses(llama, prompt, ids)
        rows[:6, ends] = -torch.inf
        expected = rows.log_softmax(-1)[range(len(ids)), ids].tolist()
        assert completion["log_probs"] == pytest.approx(expected, abs=1e-4)
        last = completion["finish_reason"] == "stop"
        assert last == (ids[-1] in ends or text_of(ids[-1:]) in ("b", "c"))


def tokens(completions):
    return [completion["token_ids"] for completion in completions]


def test_a_response_depends_on_its_seed_and_not_on_its_neighbours(result):
    found = result["sampled"]
    assert tokens(found["alone"]) == tokens(found["one by one"]) == tokens(found["plain"])
    assert tokens(found["other seeds"]) != tokens(found["plain"])


@torch.no_grad()
def expected_greedy(model):
    """The likeliest tokens by a whole forward for each."""
    found = []
    for prompt in [*PROMPTS, LONG_PROMPT]:
        ids = []
        while len(ids) < N_GREEDY and not EOS & set(ids[-1:]):
            ids.append(int(model(torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
        found.append(ids)
    return found


def test_weights_are_taken_over_in_place_each_time(llama, out, result):
    assert tokens(result["greedy first"]) == expected_greedy(llama)
    assert all(set(completion["log_probs"]) == {0.0} for completion in result["greedy first"]), "as with HFEngine"
    assert tokens(result["greedy changed"]) == expected_greedy(AutoModelForCausalLM.from_pretrained(out / "changed"))
    assert tokens(result["greedy first"])[-1] != tokens(result["greedy changed"])[-1], "the long prompt can tell"


def test_adapters_are_merged_on_the_way_and_stay_as_they_are(out, result):
    adapted = AutoPeftModelForCausalLM.from_pretrained(out / "adapted")
    assert tokens(result["greedy adapted"]) == expected_greedy(adapted)
    assert tokens(result["greedy adapted"]) != tokens(result["greedy first"])
    assert result["adapters stay"]


@pytest.mark.parametrize("name", ["tied", "qwen2", "qwen3"])
def test_heads_tied_to_embeddings_biases_and_norms_are_taken_over(inputs, out, result, name):
    model, before = (AutoModelForCausalLM.from_pretrained(folder / name) for folder in (out, inputs))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name != "qwen3")
    assert tokens(result[f"greedy {name}"]) == expected_greedy(model) != expected_greedy(before)


def test_a_signal_ends_generation_and_leaves_nothing_behind(result):
    found = result["interrupted"]
    assert (found["signal"], found["busy"]) == ("SIGTERM", False)
    assert found["again"] == result["greedy changed"]


def test_what_vllm_would_cut_or_refuses_is_said_with_our_flags(result):
    too_long, refused = result["interrupted"]["too long"], result["refused"]
    assert too_long.startswith("A prompt of 195 tokens and a response of up to 12 exceed the 200 ")
    assert "--prompt_max_len" in too_long
    assert refused.startswith("--rollout_engine vllm with --vllm_gpu_memory_utilization 0.1: vLLM cannot")
    assert "100000" in refused, "vLLM's own words follow"


def test_the_trainer_keeps_its_process_group_and_threads(result):
    assert result["group"]
    before, after, changed = result["threads"]
    assert (after, changed) == (before, before + 1)
