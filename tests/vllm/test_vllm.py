"""What vLLM samples, against forwards and greedy generation of transformers with the same weights; PPO with it.

Everything runs in processes of its own, since vLLM changes the one that it is loaded into. Stale weights in it would
show as log-probs that differ from the actor's.
"""

import importlib.util
import json
import os
import random
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from openppo.models import Actor
from tests.conftest import save_tokenizer
from tests.vllm.run import EOS, LONG_PROMPT, PROMPTS

absent = importlib.util.find_spec("vllm") is None
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(absent, reason="vllm is not installed; docs/vllm.md says how"),
]
SCRIPT = Path(__file__).with_name("run.py")
N_TOKENS, N_GREEDY, N_TRAINED = 12, 10, 8
REWARD = "def reward_fn(response):\n    return response.count('a') / (len(response) + 1)\n"
LETTERS = "abcdefgh"
MODELS = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "head_dim": 32}),
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
HEADS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # of 32 dimensions, the fewest for vLLM on CPUs
IDS = {"vocab_size": 3 + len(LETTERS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with models of several families, ``prompts.jsonl`` (input), and ``reward.py``: the share of a."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, (family, more) in MODELS.items():
        save_tokenizer(folder / name, LETTERS)
        torch.manual_seed(7)
        config = family(**IDS, **SIZES, **HEADS, initializer_range=0.2, **more)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    rng = random.Random(7)
    rows = [{"input": "".join(rng.choices(LETTERS, k=rng.randint(1, 9)))} for _ in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB, in the processes that tests start
    return folder


@pytest.fixture(scope="module")
def out(inputs, tmp_path_factory, launch):
    """The folder with what the engine answered, and its models."""
    folder = tmp_path_factory.mktemp("engine")
    launch(0, SCRIPT, inputs, folder, real=True)
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
    return [
        float(torch.tensor(p / total).log()) if i in kept else -torch.inf
        for i, p in enumerate(probabilities)
    ]


@pytest.mark.parametrize(
    ("name", "warps"), [("plain", (1.0, 11, 1.0)), ("warm", (0.7, 11, 1.0)), ("cut", (1.3, 5, 0.8))]
)
def test_log_probs_are_of_the_sampled_distribution_until_eos_or_the_limit(
    llama, result, name, warps
):
    completions = result["sampled"][name]
    assert {c["finish_reason"] for c in completions} == {"stop", "length"} or name != "plain"
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids, reason = completion["token_ids"], completion["finish_reason"]
        rows = logits_of_responses(llama, prompt, ids)
        expected = [warped(row, *warps)[token] for row, token in zip(rows, ids, strict=True)]
        assert completion["log_probs"] == pytest.approx(expected, abs=1e-4)
        assert not set(EOS) & set(ids[:-1])
        assert (
            (ids[-1] in EOS) if reason == "stop" else (ids[-1] not in EOS and len(ids) == N_TOKENS)
        )


@pytest.mark.parametrize(
    ("name", "warps"), [("plain", (1.0, 11, 1.0)), ("cut", (1.3, 5, 0.8)), ("greedy", None)]
)
def test_ids_that_are_left_out_have_probability_0(llama, result, name, warps):
    n_sampled = 0
    for prompt, completion in zip(PROMPTS, result["of some"][name], strict=True):
        ids = completion["token_ids"]
        rows = logits_of_responses(llama, prompt, ids)
        rows[:, [5, 9, 10]] = -torch.inf
        n_sampled += len(ids)
        if warps is None:
            assert rows.argmax(-1).tolist() == ids
        else:
            expected = [warped(row, *warps)[token] for row, token in zip(rows, ids, strict=True)]
            assert completion["log_probs"] == pytest.approx(expected, abs=1e-4)
    assert n_sampled > 12


def text_of(ids):
    return "".join("___abcdefgh"[i] for i in ids)


def test_a_stop_ends_a_response_where_it_is_complete(result):
    ended = 0
    for free, ours in zip(result["sampled"]["plain"], result["sampled"]["stops"], strict=True):
        ids = free["token_ids"]
        ends = (
            8 in ids[:n] or any(stop in text_of(ids[:n]) for stop in ("ab", "hg", "ee"))
            for n in range(1, 13)
        )
        n = next((n for n, ends_here in enumerate(ends, 1) if ends_here), len(ids))
        assert ours["token_ids"] == ids[:n]
        assert ours["log_probs"] == pytest.approx(free["log_probs"][:n], abs=1e-5)
        assert ours["finish_reason"] == ("stop" if n < len(ids) else free["finish_reason"])
        ended += n < len(ids)
    assert ended > 0


def test_nothing_ends_a_response_before_the_least_length(llama, result):
    ends = sorted({*EOS, 8, 9})
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


def test_a_cancelled_request_changes_no_other(result):
    numbers, completions = result["cancelled"]
    assert numbers == [0, *range(2, len(PROMPTS))]
    assert tokens(completions) == [tokens(result["sampled"]["plain"])[number] for number in numbers]


@torch.no_grad()
def test_a_prompt_that_continues_an_earlier_request_reuses_its_keys_and_values(llama, result):
    """A block of them at least; greedily sampled tokens are those of forwards over all."""
    longer, [completion], n_reused = result["resumed"]
    assert 0 < n_reused < len(longer)
    ids = completion["token_ids"]
    assert logits_of_responses(llama, longer, ids).argmax(-1).tolist() == ids


@torch.no_grad()
def expected_greedy(model):
    """The likeliest tokens by a whole forward for each."""
    found = []
    for prompt in [*PROMPTS, LONG_PROMPT]:
        ids = []
        while len(ids) < N_GREEDY and not set(EOS) & set(ids[-1:]):
            ids.append(int(model(torch.tensor([[*prompt, *ids]])).logits[0, -1].argmax()))
        found.append(ids)
    return found


def test_weights_are_taken_over_in_place_each_time(llama, out, result):
    assert tokens(result["greedy first"]) == expected_greedy(llama)
    assert all(set(completion["log_probs"]) == {0.0} for completion in result["greedy first"]), (
        "as with HFEngine"
    )
    assert tokens(result["greedy changed"]) == expected_greedy(
        AutoModelForCausalLM.from_pretrained(out / "changed")
    )
    assert tokens(result["greedy first"])[-1] != tokens(result["greedy changed"])[-1], (
        "the long prompt can tell"
    )


def test_adapters_are_merged_on_the_way_and_stay_as_they_are(out, result):
    adapted = AutoPeftModelForCausalLM.from_pretrained(out / "adapted")
    assert tokens(result["greedy adapted"]) == expected_greedy(adapted)
    assert tokens(result["greedy adapted"]) != tokens(result["greedy first"])
    assert result["adapters stay"]


@pytest.mark.parametrize("name", ["tied", "qwen2", "qwen3"])
def test_heads_tied_to_embeddings_biases_and_norms_are_taken_over(inputs, out, result, name):
    model, before = (
        AutoModelForCausalLM.from_pretrained(folder / name) for folder in (out, inputs)
    )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name != "qwen3")
    assert tokens(result[f"greedy {name}"]) == expected_greedy(model) != expected_greedy(before)


def test_a_signal_leaves_nothing_behind_refusals_name_our_flags_and_group_and_threads_stay(result):
    found, refused = result["interrupted"], result["refused"]
    assert (found["signal"], found["busy"], found["again"]) == (
        "SIGTERM",
        False,
        result["greedy changed"],
    )
    assert found["too long"].startswith(
        "A prompt of 195 tokens and a response of up to 12 exceed the 200 "
    )
    assert "--prompt_max_len" in found["too long"]
    assert refused.startswith(
        "--rollout_engine vllm with --vllm_gpu_memory_utilization 0.1: vLLM cannot"
    )
    assert "100000" in refused, "vLLM's own words follow"
    before, after, changed = result["threads"]
    assert (result["group"], after, changed) == (True, before, before + 1)


def test_ranks_that_share_a_copy_sample_what_each_would_alone(inputs, result, tmp_path, launch):
    """Whatever the other submits, when, and cancels; each keeps a half of the weights."""
    launch(2, SCRIPT, inputs, tmp_path, real=True)
    for rank, n in enumerate((2, 6)):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["share"] == 0.5
        for name in ("plain", "warm", "cut", "stops", "late"):
            for ours, alone in zip(found[name], result["sampled"][name][:n], strict=True):
                assert (ours["token_ids"], ours["finish_reason"]) == (
                    alone["token_ids"],
                    alone["finish_reason"],
                )
                assert ours["log_probs"] == pytest.approx(alone["log_probs"], abs=1e-4)
        assert found["entering"] == tokens(result["sampled"]["plain"])[: n - 1], (
            "the last is cancelled"
        )


@pytest.fixture(scope="module")
def train(inputs, tmp_path_factory, launch):
    """``train(ranks, options)`` runs two steps in an episode, and returns the folder of the model."""

    def run(ranks, options, folder=None, pretrain=inputs / "llama"):
        folder = folder or tmp_path_factory.mktemp("run") / "model"
        arguments = f"""--rollout_engine vllm --pretrain {pretrain} --prompt_data {inputs}/prompts.jsonl
            --reward_fn {inputs}/reward.py --rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size 2
            --generate_max_len {N_TRAINED} --prompt_max_len 16 --actor_learning_rate 1e-2 --lr_scheduler constant
            --lr_warmup_ratio 0 --init_kl_coef 0 --advantage_estimator reinforce --save_path {folder} {options}"""
        script = (SCRIPT,) if ranks else ("-m", "openppo.cli.train_ppo")
        output = launch(ranks, *script, *arguments.split(), real=True)
        assert "Traceback" not in output
        return folder

    return run


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_samples_are_the_actors(folder):
    """Of both steps, and that a step changes log-probs by more than the bound."""
    logged = lines(folder / "logs" / "metrics.jsonl")
    assert len(logged) == 2
    for metrics in logged:
        assert metrics["rollout_log_prob_gap_max"] < 1e-4
        assert abs(metrics["rollout_kl_k1"]) < 1e-4
        assert metrics["rollout_kl"] < 1e-6
        assert metrics["actor_grad_norm"] > 0


@torch.no_grad()
def greedy_answer(model, tokenizer, prompt):
    ids, new = tokenizer(prompt)["input_ids"], []
    while len(new) < N_TRAINED and tokenizer.eos_token_id not in new:
        new.append(int(model(torch.tensor([[*ids, *new]])).logits[0, -1].argmax()))
    return tokenizer.decode(new)


@pytest.mark.parametrize(
    ("ranks", "options", "saved"),
    [
        (0, "--eval_steps 1 --ema_beta 0.5", AutoModelForCausalLM),
        (2, "--eval_steps 2 --zero_stage 2", AutoModelForCausalLM),
        (2, "--eval_steps 2 --zero_stage 3", AutoModelForCausalLM),
        (0, "--eval_steps 2 --zero_stage 2 --lora_rank 4", AutoPeftModelForCausalLM),
        (2, "--eval_steps 2 --zero_stage 3 --lora_rank 4", AutoPeftModelForCausalLM),
        (2, "--eval_steps 1 --zero_stage 3 --vllm_tensor_parallel_size 2", AutoModelForCausalLM),
    ],
)
def test_samples_are_the_actors_and_the_last_evaluation_is_of_what_is_saved(
    inputs, train, ranks, options, saved
):
    folder = train(ranks, f"--eval_data {inputs}/prompts.jsonl {options}")
    assert_samples_are_the_actors(folder)
    model, tokenizer = saved.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    evaluated = [
        line for line in lines(folder / "logs" / "samples.jsonl") if line.get("evaluation")
    ][-4:]
    assert len(evaluated) == 4
    for sample in evaluated:
        assert sample["response"] == greedy_answer(model, tokenizer, sample["prompt"])


def test_a_peft_folder_is_a_start_like_any_other(inputs, train, tmp_path):
    adapted = Actor(str(inputs / "llama"), lora_rank=4, lora_alpha=8).model
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapters")
    assert_samples_are_the_actors(train(0, "", pretrain=tmp_path / "adapters"))


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(train):
    whole, folder = train(0, "--num_episodes 2"), train(0, "--num_episodes 1")
    train(0, "--num_episodes 2 --load_checkpoint", folder)
    logged, expected = (lines(f / "logs" / "metrics.jsonl") for f in (folder, whole))
    assert [metrics["step"] for metrics in logged] == [1, 2, 3, 4]
    for found, other in zip(logged, expected, strict=True):
        for name in ("reward", "response_length", "entropy", "actor_grad_norm"):
            assert found[name] == pytest.approx(other[name], rel=1e-4)
