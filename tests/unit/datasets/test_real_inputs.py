"""Real tokenizers and data, from the folder OPENPPO_ASSETS."""

import pytest
from transformers import AutoTokenizer

from openppo.config import PPODataConfig, PreferenceConfig, SFTDataConfig, SupervisedConfig
from openppo.datasets import (
    load_preferences,
    load_prompts,
    load_rows,
    load_sft_examples,
    number_rows,
    render_prompt,
    render_whole,
)

NAMES = ["qwen2.5", "mistral-v3", "phi3-mini", "gpt2"]
WITH_CHAT = NAMES[:3]


@pytest.fixture(scope="module", params=NAMES)
def real_tokenizer(request, assets):
    return AutoTokenizer.from_pretrained(assets / "tokenizers" / request.param)


@pytest.fixture(scope="module", params=WITH_CHAT)
def chat_tokenizer(request, assets):
    return AutoTokenizer.from_pretrained(assets / "tokenizers" / request.param)


def rows_of(source, max_samples=None, split="train"):
    return load_rows(str(source), flag="--prompt_data", split=split, max_samples=max_samples)


def sft_examples(rows, tokenizer, chat, max_len=4096):
    supervised = SupervisedConfig("model", "data", apply_chat_template=chat, max_len=max_len)
    return load_sft_examples(number_rows(rows), tokenizer, supervised, SFTDataConfig("question", "answer"))


def assert_prompt_then_response(rows, tokenizer, chat):
    examples, dropped = sft_examples(rows, tokenizer, chat)
    assert dropped == 0
    for row, example in zip(rows, examples, strict=True):
        _, prompt = render_prompt(row["question"], tokenizer, input_template=None, apply_chat_template=chat)
        assert example.token_ids[: len(prompt)] == prompt
        assert example.token_ids[-1] == tokenizer.eos_token_id
        assert example.loss_mask.index(True) == len(prompt)
        response = tokenizer.decode(example.token_ids[len(prompt) :], skip_special_tokens=True)
        assert response.strip() == row["answer"].strip()


def test_plain_examples_of_a_real_tokenizer_are_prompt_response_eos(real_tokenizer, assets):
    assert_prompt_then_response(rows_of(assets / "data/gsm8k/train.jsonl", 20), real_tokenizer, chat=False)


def test_chat_examples_of_a_real_tokenizer_are_prompt_response_eos(chat_tokenizer, assets, caplog):
    assert_prompt_then_response(rows_of(assets / "data/gsm8k/train.jsonl", 20), chat_tokenizer, chat=True)
    assert not caplog.records, "the response was cut out of the rendering, without the fallback"


def test_chat_example_is_tokenized_like_its_whole_conversation(chat_tokenizer):
    row = {"question": "Say yes.", "answer": "yes"}
    messages = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}]
    (example,), _ = sft_examples([row], chat_tokenizer, chat=True)
    assert example.token_ids == render_whole(messages, chat_tokenizer, input_template=None, apply_chat_template=True)


def test_a_rendered_prompt_never_has_two_bos(real_tokenizer):
    bos = real_tokenizer.bos_token_id
    for chat in (False, True) if real_tokenizer.chat_template else (False,):
        _, ids = render_prompt("Say yes.", real_tokenizer, input_template=None, apply_chat_template=chat)
        assert bos is None or ids.count(bos) <= 1
        assert ids[-1] != real_tokenizer.eos_token_id or chat


def test_mistral_chat_has_exactly_one_bos(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/mistral-v3")
    text, ids = render_prompt("Say yes.", tokenizer, input_template=None, apply_chat_template=True)
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 2, "the trap is still there"
    assert ids.count(tokenizer.bos_token_id) == 1


def test_gpt2_without_chat_template_is_an_error(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/gpt2")
    with pytest.raises(ValueError, match="--apply_chat_template: the tokenizer of --pretrain has no chat template"):
        render_prompt("a", tokenizer, input_template=None, apply_chat_template=True)


def test_gsm8k_folder_gives_its_splits_and_prompts_with_labels(assets):
    rows = rows_of(assets / "data/gsm8k", split="test")
    assert len(rows) == 1319
    assert len(rows_of(assets / "data/gsm8k", split="train")) == 7473
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/gpt2")
    config = PPODataConfig("data", input_key="question", label_key="answer", prompt_max_len=100)
    loaded = load_prompts(number_rows(rows[:100]), tokenizer, config)
    assert 0 < loaded.dropped < 100
    assert len(loaded.prompts) + loaded.dropped == 100
    assert all(len(prompt.token_ids) <= 100 for prompt in loaded.prompts)
    assert all(prompt.label == prompt.row["answer"] for prompt in loaded.prompts)


def test_hh_rlhf_is_read_from_its_packed_file_and_its_folder(assets):
    rows = rows_of(assets / "data/hh-rlhf/harmless-base-test.jsonl.gz")
    assert len(rows) == 2312
    assert rows_of(assets / "data/hh-rlhf", split="test") == rows
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/gpt2")
    pairs, dropped = load_preferences(number_rows(rows[:50]), tokenizer, SupervisedConfig("m", "d"), PreferenceConfig())
    assert len(pairs) + dropped == 50
    assert all(pair.chosen_ids[-1] == pair.rejected_ids[-1] == tokenizer.eos_token_id for pair in pairs)
    assert tokenizer.decode(pairs[0].chosen_ids[:-1]) == rows[0]["chosen"]


def test_alpaca_json_array_is_read(assets):
    rows = rows_of(assets / "data/alpaca/alpaca_en_demo.json")
    assert len(rows) == 999
    assert set(rows[0]) == {"instruction", "input", "output"}
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/gpt2")
    supervised = SupervisedConfig("m", "d", input_template="### Instruction:\n{}\n\n### Response:\n")
    examples, dropped = load_sft_examples(number_rows(rows[:50]), tokenizer, supervised, SFTDataConfig("instruction"))
    assert len(examples) + dropped == 50
    with pytest.raises(ValueError, match="--dataset, row 1: the text is empty"):
        load_sft_examples(number_rows(rows), tokenizer, supervised, SFTDataConfig("input"))
