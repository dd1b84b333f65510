"""Whole runs on two ranks: they end, and what they save is what they trained.

A hang shows as a collective that times out, or as a launch that does not end.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

SCRIPT = Path(__file__).with_name("run_steps.py")
LONG = 40
Run = dict[str, Any]


def write_bigram_model(tiny: Path, folder: Path) -> None:
    """A model that ends at once after "a" and says "b" without end after "b"."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "actor")
    model = AutoModelForCausalLM.from_pretrained(tiny / "actor")
    a, b, eos = tokenizer.convert_tokens_to_ids(["a", "b", tokenizer.eos_token])
    with torch.no_grad():
        for layer in model.model.layers:  # the layers add nothing: what follows depends on the last token alone
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), model.config.hidden_size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[eos, a] = model.lm_head.weight[b, b] = 3.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def case(name: str, arguments: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": "train_ppo", "arguments": arguments.split(), **more}


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> dict[str, Run]:
    """Each run's result, the lines of its metrics.jsonl (``logged``) and the folder of its models."""
    folder = tmp_path_factory.mktemp("fit")
    write_bigram_model(tiny, folder / "bigram")
    (folder / "unequal.jsonl").write_text('{"input": "cda"}\n{"input": "cdb"}\n')
    common = f"--reward_pretrain {tiny}/reward --lr_scheduler constant --lr_warmup_ratio 0"
    unequal = f"""{common} --pretrain {folder}/bigram --prompt_data {folder}/unequal.jsonl --num_episodes 3
        --rollout_batch_size 2 --train_batch_size 2 --micro_train_batch_size 1 --generate_max_len {LONG}"""
    common += f" --pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --pretrain_data {tiny}/documents.jsonl"
    common += " --actor_learning_rate 1e-3 --critic_learning_rate 1e-3"
    odd = f"{common} --max_samples 5 --rollout_batch_size 4 --train_batch_size 4 --num_episodes 2 --generate_max_len 8"
    bf16 = f"{common} --bf16 --max_samples 12 --rollout_batch_size 12 --train_batch_size 6 --generate_max_len 8"
    bf16 += " --micro_train_batch_size 1"  # ZeRO-3 cuts others than the rest does, and the order of sums shows in bf16
    cases = [
        case("unequal", f"{unequal} --zero_stage 3"),
        case("unequal in lockstep", f"{unequal} --zero_stage 3", lockstep=True),
        case("odd", f"{odd} --zero_stage 3"),
        case("odd in lockstep", f"{odd} --zero_stage 3", lockstep=True),
        *(case(f"bf16 {stage}", f"{bf16} --zero_stage {stage}") for stage in (0, 1, 2, 3)),
        case("bf16 2 offload", f"{bf16} --zero_stage 2 --adam_offload"),
        case("bf16 3 offload", f"{bf16} --zero_stage 3 --adam_offload"),
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(2, SCRIPT, folder / "cases.json", folder)

    def read(name: str) -> Run:
        logged = (folder / name / "model" / "logs" / "metrics.jsonl").read_text().splitlines()
        result = json.loads((folder / name / "result.json").read_text())
        return {"folder": folder / name, "logged": [json.loads(line) for line in logged], **result}

    return {case["name"]: read(case["name"]) for case in cases}


@pytest.mark.parametrize("name", ("unequal", "unequal in lockstep"))
def test_zero_3_ends_when_one_rank_samples_much_longer_than_the_other(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert len(run["logged"]) == len(run["samples"]) == 3
    for samples in run["samples"]:
        assert sorted(len(sample["response"]) for sample in samples) == [1, LONG]
        assert {sample["finish_reason"] for sample in samples} == {"stop", "length"}
    assert all(line["response_length"] == (1 + LONG) / 2 for line in run["logged"])
    assert all(line["truncated_fraction"] == 0.5 for line in run["logged"])


@pytest.mark.parametrize("name", ("odd", "odd in lockstep"))
def test_an_odd_number_of_prompts_trains_all_of_them(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert [len(samples) for samples in run["samples"]] == [4, 1, 4, 1]  # a rank has no prompt in every second step
    assert [line["step"] for line in run["logged"]] == [1, 2, 3, 4]
    for first, second in (run["samples"][:2], run["samples"][2:]):
        assert len({tuple(sample["prompt"]) for sample in first + second}) == 5


@pytest.mark.parametrize("name", ("unequal", "odd"))
def test_generation_in_lockstep_gives_the_same_tokens(runs: dict[str, Run], name: str) -> None:
    assert runs[f"{name} in lockstep"]["samples"] == [
        [sample | {"score": pytest.approx(sample["score"], abs=1e-5)} for sample in step]
        for step in runs[name]["samples"]
    ]


def test_the_saved_actor_is_a_plain_causal_language_model(runs: dict[str, Run]) -> None:
    run = runs["odd"]
    model = AutoModelForCausalLM.from_pretrained(run["folder"] / "model")
    tokenizer = AutoTokenizer.from_pretrained(run["folder"] / "model")
    for ids, log_probs in zip(run["probe"]["ids"], run["probe"]["log_probs"], strict=True):
        assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids
        logits = model(torch.tensor([ids])).logits[0, :-1]
        plain = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        assert log_probs[1 : len(ids)] == pytest.approx(plain.tolist(), abs=1e-5)
    ids = model.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert ids.shape[1] > 3


def test_the_saved_critic_is_a_plain_classifier_with_one_label(runs: dict[str, Run]) -> None:
    run = runs["odd"]
    model = AutoModelForSequenceClassification.from_pretrained(run["folder"] / "model_critic")
    assert model.config.num_labels == 1
    for ids, values in zip(run["probe"]["ids"], run["probe"]["values"], strict=True):
        if len(ids) > 1:
            score = model(torch.tensor([ids[:-1]])).logits.item()  # of the state in which the last token was chosen
            assert values[len(ids) - 1] == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("stage", ("0", "1", "2", "3", "2 offload", "3 offload"))
def test_bf16_trains(runs: dict[str, Run], tiny: Path, stage: str) -> None:
    run = runs[f"bf16 {stage}"]
    assert run["zero_stage"] == max(int(stage[0]), 1)
    (metrics,) = run["logged"]
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["kl"] == metrics["kl_k3"] == 0  # the reference computes exactly as the actor does
    assert run["buffer_types"] == ["torch.float32"]  # rotary frequencies in bfloat16 would blur positions
    assert run["samples"] == runs["bf16 1"]["samples"]
    for folder, start in (("model", "actor"), ("model_critic", "reward")):
        trained, same, before = (
            torch.cat([p.detach().flatten() for p in load.from_pretrained(path, dtype="auto").parameters()])
            for load in [AutoModelForCausalLM if folder == "model" else AutoModelForSequenceClassification]
            for path in (run["folder"] / folder, runs["bf16 1"]["folder"] / folder, tiny / start)
        )
        assert trained.dtype == torch.bfloat16
        update = (trained.float() - before).norm()
        assert update > 1e-3 * before.norm()
        assert (trained.float() - same.float()).norm() < 0.01 * update
