"""Real tokenizers and data, from the folder OPENPPO_ASSETS."""

import re
from functools import cache

import pytest
from transformers import AutoTokenizer

from openppo.config import PPODataConfig, PreferenceConfig, ProcessConfig, RowsConfig, SFTDataConfig, SupervisedConfig
from openppo.datasets import (
    load_mixed_rows,
    load_preferences,
    load_process_examples,
    load_prompts,
    load_sft_examples,
    number_rows,
    render_prompt,
    render_whole,
)

WITH_CHAT = ["qwen2.5", "mistral-v3", "phi3-mini"]


@cache
def tokenizer_of(assets, name):
    return AutoTokenizer.from_pretrained(assets / "tokenizers" / name)


@pytest.fixture(scope="module", params=WITH_CHAT)
def chat_tokenizer(request, assets):
    return tokenizer_of(assets, request.param)


WITH_TEMPLATE = SupervisedConfig("m", "d", apply_chat_template=True, max_len=100_000)


def rows_of(source, split="train"):
    return load_mixed_rows(RowsConfig(), str(source), flag="--dataset", split=split, seed=0)


@pytest.mark.parametrize(
    ("name", "chat"),
    [(name, chat) for name in [*WITH_CHAT, "gpt2"] for chat in (False, True) if name != "gpt2" or not chat],
)
def test_examples_are_prompt_response_eos(assets, name, chat):
    tokenizer, rows = tokenizer_of(assets, name), rows_of(assets / "data/gsm8k", "test")[:20]
    supervised = SupervisedConfig("model", "data", apply_chat_template=chat, max_len=4096)
    examples, dropped = load_sft_examples(rows, tokenizer, supervised, SFTDataConfig("question", "answer"))
    assert dropped == 0
    for row, example in zip(rows, examples, strict=True):
        _, prompt = render_prompt(row.row["question"], tokenizer, input_template=None, apply_chat_template=chat)
        assert tokenizer.bos_token_id in (None, tokenizer.eos_token_id) or prompt.count(tokenizer.bos_token_id) <= 1
        assert example.token_ids[: len(prompt)] == prompt
        assert example.token_ids[-1] == tokenizer.eos_token_id
        assert example.loss_mask.index(True) == len(prompt)
        response = tokenizer.decode(example.token_ids[len(prompt) :], skip_special_tokens=True)
        assert response.strip() == row.row["answer"].strip()
        if chat:
            turns = [("user", row.row["question"]), ("assistant", row.row["answer"])]
            messages = [{"role": role, "content": text} for role, text in turns]
            whole = render_whole(messages, tokenizer, input_template=None, apply_chat_template=True)
            assert example.token_ids == whole


def test_gsm8k_is_recognized_and_rendered_with_the_qwen_template(assets):
    assert len(rows_of(assets / "data/gsm8k")) == 7473
    (row, *_) = rows = rows_of(assets / "data/gsm8k", "test")
    tokenizer = tokenizer_of(assets, "qwen2.5")
    loaded = load_prompts(rows, tokenizer, PPODataConfig("gsm8k", apply_chat_template=True))
    assert (len(loaded.prompts), loaded.dropped) == (1319, 0)
    prompt = loaded.prompts[0]
    assert prompt.text == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{row.row['question']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids == tokenizer(prompt.text)["input_ids"]
    assert prompt.label.endswith("#### 18")
    assert prompt.messages == [{"role": "user", "content": row.row["question"]}]
    assert prompt.source == str(assets / "data/gsm8k")


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Two plus two?"},
    {"role": "assistant", "content": "It is four."},
]
TARGETS = {
    "qwen2.5": ["Hello", ".", "<|im_end|>", "It", "Ġis", "Ġfour", ".", "<|im_end|>"],
    "mistral-v3": ["▁Hello", ".", "</s>", "▁It", "▁is", "▁four", ".", "</s>"],
    "phi3-mini": ["Hello", ".", "<|end|>", "It", "▁is", "▁four", ".", "<|end|>", "<|endoftext|>"],
}


@pytest.mark.parametrize("name", WITH_CHAT)
def test_all_answers_of_a_chat_are_targets_in_the_ids_of_the_whole_rendering(assets, name):
    tokenizer = tokenizer_of(assets, name)
    (example,), _ = load_sft_examples(number_rows([{"messages": CHAT}]), tokenizer, WITH_TEMPLATE, SFTDataConfig())
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    whole = tokenizer(rendered.rstrip("\n"), add_special_tokens=False)["input_ids"]  # Qwen has a newline after EOS
    assert example.token_ids == whole
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids)
    assert [t for t, target in zip(tokens, example.loss_mask, strict=True) if target] == TARGETS[name]


def test_chats_of_many_turns_are_cut_where_generation_would_start(chat_tokenizer, assets):
    rows = rows_of(assets / "data/alpaca/dpo_en_demo.json")
    chats = [as_openai(row.row["conversations"] + [row.row["chosen"]]) for row in rows]
    long = [chat for chat in chats if len(chat) > 5][:20]
    examples, _ = load_sft_examples(
        number_rows([{"messages": chat} for chat in long]), chat_tokenizer, WITH_TEMPLATE, SFTDataConfig()
    )
    for chat, example in zip(long, examples, strict=True):
        starts = [t for t in range(1, len(example.loss_mask)) if example.loss_mask[t] > example.loss_mask[t - 1]]
        answers = [n for n, turn in enumerate(chat) if turn["role"] == "assistant"]
        for n, start in zip(answers, starts, strict=True):
            _, asked = render_prompt(chat[:n], chat_tokenizer, input_template=None, apply_chat_template=True)
            assert example.token_ids[:start] == asked


def as_openai(turns):
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    return [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]


def test_sharegpt_pairs_are_their_whole_conversations(chat_tokenizer, assets):
    rows = rows_of(assets / "data/alpaca/dpo_en_demo.json")[-60:]
    pairs, dropped = load_preferences(rows, chat_tokenizer, WITH_TEMPLATE, PreferenceConfig())
    assert (len(pairs), dropped) == (60, 0)
    for row, pair in zip(rows, pairs, strict=True):
        whole = as_openai([*row.row["conversations"], row.row["rejected"]])
        ids = render_whole(whole, chat_tokenizer, input_template=None, apply_chat_template=True)
        assert pair.rejected_ids == ids


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5"])
def test_hh_transcripts_become_pairs_prompts_and_responses(assets, name):
    tokenizer, chat = tokenizer_of(assets, name), name != "gpt2"
    rows = rows_of(assets / "data/hh-rlhf", "test")[:500]
    supervised = SupervisedConfig("m", "d", apply_chat_template=chat, max_len=4096)
    pairs, dropped = load_preferences(rows, tokenizer, supervised, PreferenceConfig())
    prompts = load_prompts(rows, tokenizer, PPODataConfig("d", apply_chat_template=chat, prompt_max_len=4096)).prompts
    assert (len(pairs), len(prompts), dropped) == (500, 500, 0)
    for row, pair, prompt in zip(rows, pairs, prompts, strict=True):
        assert pair.chosen_ids[: len(prompt.token_ids)] == pair.rejected_ids[: len(prompt.token_ids)]
        assert pair.chosen_ids[: len(prompt.token_ids)] == prompt.token_ids
        if chat:
            assert prompt.text.endswith("<|im_start|>assistant\n")
        else:
            assert tokenizer.decode(pair.chosen_ids[:-1]) == row.row["chosen"]
            assert tokenizer.decode(pair.rejected_ids[:-1]) == row.row["rejected"]


@pytest.mark.parametrize("name", WITH_CHAT)
def test_math_shepherd_is_judged_step_by_step_in_the_ids_of_the_whole_text(assets, name):
    tokenizer, rows = tokenizer_of(assets, name), rows_of(assets / "data/prm/samples_math-shepherd.jsonl")
    supervised = SupervisedConfig("m", "d", max_len=4096)
    examples, dropped = load_process_examples(rows, tokenizer, supervised, ProcessConfig())
    (placeholder,) = tokenizer("ки", add_special_tokens=False)["input_ids"]
    assert dropped == 0
    for row, example in zip(rows, examples, strict=True):
        if name != "qwen2.5":
            assert example.token_ids == tokenizer(row.row["input"])["input_ids"]
        labels = [label for label in example.labels if label != -100]
        marks = "".join(tokenizer.convert_ids_to_tokens(label).strip("▁") for label in labels)
        assert marks == "".join(re.findall(r" ([+-])(?=\n|$)", row.row["label"]))
        assert [label != -100 for label in example.labels] == [t == placeholder for t in example.token_ids]
