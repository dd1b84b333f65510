"""Generation against plain transformers, and files that are whole or absent."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from openppo.cli.options import parse_options
from openppo.config import GenerateConfig
from openppo.jobs import prompts
from openppo.jobs.generate import GenerateJob
from openppo.jobs.prompts import write_rows
from openppo.types import SingleProcess
from tests.unit.rollout.test_decode_graphs import RunsAgain

PROMPTS = ["abc", "z", "what is 7 times 8", "hello there", "b", "9 8 7"]
NEW_TOKENS = 9

Generate = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def policy(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with large random weights, whose responses differ and sometimes end."""
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(models / "actor")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.8)
    model.lm_head.weight.data[model.config.eos_token_id] *= 2
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(models / "actor").save_pretrained(folder)
    return folder


@pytest.fixture
def generate(policy: Path, tmp_path: Path) -> Generate:
    """Runs the command's job in this process, with further options; returns the lines it wrote."""
    rows = [{"input": text, "answer": i, "id": f"row {i}"} for i, text in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*options: str) -> list[dict[str, Any]]:
        output = tmp_path / "new" / "out.jsonl"
        arguments = (
            f"--pretrain {policy} --prompt_data {tmp_path}/prompts.jsonl --output_path {output}"
        )
        arguments += f" --input_key input --label_key answer --generate_max_len {NEW_TOKENS}"
        GenerateJob(parse_options(GenerateConfig, [*arguments.split(), *options])).fit()
        return [json.loads(line) for line in output.read_text().splitlines()]

    return run


@torch.no_grad()
def by_transformers(policy: Path, prompt: str) -> tuple[list[int], float]:
    """The greedy response of plain ``generate`` and the mean log-prob of its tokens."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(policy),
        AutoTokenizer.from_pretrained(policy),
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    whole = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    log_probs = model(whole).logits[0, :-1].log_softmax(-1).gather(-1, whole[0, 1:, None])[:, 0]
    n_prompt = ids.shape[1]
    return whole[0, n_prompt:].tolist(), log_probs[n_prompt - 1 :].mean().item()


def test_greedy_responses_are_those_of_plain_transformers(generate, policy, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    lines = generate()
    assert [line["prompt"] for line in lines] == PROMPTS
    for i, line in enumerate(lines):
        ids, log_prob = by_transformers(policy, line["prompt"])
        expected = {
            "source": str(tmp_path / "prompts.jsonl"),
            "row": i,
            "sample": 0,
            "prompt": PROMPTS[i],
            "label": i,
        }
        expected |= {
            "response": tokenizer.decode(ids, skip_special_tokens=True),
            "n_tokens": len(ids),
        }
        expected["finish_reason"] = "stop" if ids[-1] == tokenizer.eos_token_id else "length"
        assert line == expected | {"mean_log_prob": pytest.approx(log_prob, abs=1e-5)}
    assert {line["finish_reason"] for line in lines} == {"stop", "length"}, "both are tested"


def test_a_peft_folder_answers_as_peft_itself(generate, policy, tmp_path):
    torch.manual_seed(0)
    adapters = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(policy), adapters).eval()
    adapted.save_pretrained(tmp_path / "adapters")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    lines = generate("--pretrain", str(tmp_path / "adapters"))
    for line in lines:
        ids = tokenizer(line["prompt"], return_tensors="pt")["input_ids"]
        whole = adapted.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert line["response"] == tokenizer.decode(
            whole[0, ids.shape[1] :], skip_special_tokens=True
        )
    assert [line["response"] for line in lines] != [line["response"] for line in generate()]


def test_special_tokens_that_the_model_wrote_are_in_its_text(generate, policy, tmp_path):
    plain = [line["response"] for line in generate()]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens([AddedToken(letter, special=True) for letter in sorted({*"".join(plain)})])
    declares = shutil.copytree(policy, tmp_path / "declares")
    tokenizer.save_pretrained(declares)
    assert [line["response"] for line in generate("--pretrain", str(declares))] == plain
    assert any(plain)


def test_recorded_steps_give_the_same_lines(generate, monkeypatch):
    """A graph for each power of two of rows that run together; more in the check before."""
    lines, n_recorded = generate(), []
    for check in ("off", "on"):
        recorder = RunsAgain()
        monkeypatch.setattr(
            prompts, "choose_recorder", lambda *given, recorder=recorder: lambda: recorder
        )
        assert generate("--engine_check", check) == lines
        n_recorded.append(recorder.n_recorded)
    running = [sum(line["n_tokens"] > step for line in lines) for step in range(1, NEW_TOKENS)]
    assert n_recorded[0] == len({(n - 1).bit_length() for n in running if n > 0})
    assert n_recorded[1] > n_recorded[0]


def test_several_samples_of_a_prompt_are_numbered_and_differ(generate):
    lines = generate("--n_samples_per_prompt", "3", "--temperature", "1")
    assert [(line["row"], line["sample"]) for line in lines] == [
        (i, k) for i in range(len(PROMPTS)) for k in range(3)
    ]
    assert len({line["response"] for line in lines}) > 2 * len(PROMPTS)
    assert lines == generate("--n_samples_per_prompt", "3", "--temperature", "1")
    assert lines != generate("--n_samples_per_prompt", "3", "--temperature", "1", "--seed", "43")
    assert [line["row"] for line in generate("--prompt_max_len", "10")] == [0, 1, 4, 5], (
        "longer ones are dropped"
    )


def test_no_input_and_no_file_of_others_is_replaced(policy, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        '{"source": "a", "row": 0, "prompt": "a", "input": "a"}\n'
    )
    (tmp_path / "reward.py").write_text("def reward_fn(response): return 0.0\n")
    options = f"--pretrain {policy} --prompt_data {tmp_path}/prompts.jsonl --input_key input --output_path"
    refused = {
        f"{tmp_path}/prompts.jsonl": "is read by --prompt_data",
        f"{policy}/config.json": "is read by --pretrain",
        f"{tmp_path}/reward.py": "holds what this command has not written",
    }
    before = {path: Path(path).read_text() for path in refused}
    for path, message in refused.items():
        with pytest.raises(ValueError, match=f"^--output_path {path} {message}"):
            GenerateJob(parse_options(GenerateConfig, [*options.split(), path]))
    assert {path: Path(path).read_text() for path in refused} == before


def test_an_earlier_output_is_replaced(generate):
    assert generate() == generate()


def test_a_file_that_cannot_be_finished_leaves_the_earlier_one_alone(tmp_path):
    class Unwritable:
        def __str__(self) -> str:
            raise RuntimeError("halfway")

    write_rows(tmp_path / "out.jsonl", [{"a": 1}], SingleProcess())
    with pytest.raises(RuntimeError, match="halfway"):
        write_rows(tmp_path / "out.jsonl", [{"a": 2}, {"a": Unwritable()}], SingleProcess())
    assert (tmp_path / "out.jsonl").read_text() == '{"a": 1}\n'
    write_rows(tmp_path / "out.jsonl", [{"a": "ü\ud800"}], SingleProcess())
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8")) == {"a": "ü\ud800"}
