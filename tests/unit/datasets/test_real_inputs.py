"""Real tokenizers and data, from the folder OPENPPO_ASSETS."""

import re

import pytest
from transformers import AutoTokenizer

from openppo.config import PPODataConfig, PreferenceConfig, ProcessConfig, SFTDataConfig, SupervisedConfig
from openppo.datasets import (
    load_mixed_rows,
    load_preferences,
    load_process_examples,
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


WITH_TEMPLATE = SupervisedConfig("m", "d", apply_chat_template=True, max_len=100_000)


def mixed_rows(source, split="train"):
    return load_mixed_rows([(str(source), None)], flag="--dataset", split=split, max_samples=None, seed=0)


def rows_of(source, max_samples=None, split="train"):
    rows = load_rows(str(source), flag="--prompt_data", split=split, max_samples=max_samples)
    return [row.row for row in rows]


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


def test_gsm8k_is_recognized_and_rendered_with_the_qwen_template(assets):
    (row, *_) = rows = mixed_rows(assets / "data/gsm8k", split="test")
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/qwen2.5")
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
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    (example,), _ = load_sft_examples(number_rows([{"messages": CHAT}]), tokenizer, WITH_TEMPLATE, SFTDataConfig())
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    whole = tokenizer(rendered.rstrip("\n"), add_special_tokens=False)["input_ids"]  # Qwen has a newline after EOS
    assert example.token_ids == whole
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids)
    assert [t for t, target in zip(tokens, example.loss_mask, strict=True) if target] == TARGETS[name]


def test_chats_of_many_turns_are_cut_where_generation_would_start(chat_tokenizer, assets):
    rows = mixed_rows(assets / "data/alpaca/dpo_en_demo.json")
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
    rows = mixed_rows(assets / "data/alpaca/dpo_en_demo.json")[-60:]
    pairs, dropped = load_preferences(rows, chat_tokenizer, WITH_TEMPLATE, PreferenceConfig())
    assert (len(pairs), dropped) == (60, 0)
    for row, pair in zip(rows, pairs, strict=True):
        whole = as_openai([*row.row["conversations"], row.row["rejected"]])
        ids = render_whole(whole, chat_tokenizer, input_template=None, apply_chat_template=True)
        assert pair.rejected_ids == ids


def test_hh_rlhf_is_read_from_its_packed_file_and_its_folder(assets):
    rows = rows_of(assets / "data/hh-rlhf/harmless-base-test.jsonl.gz")
    assert len(rows) == 2312
    assert rows_of(assets / "data/hh-rlhf", split="test") == rows


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5"])
def test_hh_transcripts_become_pairs_prompts_and_responses(assets, name):
    tokenizer, chat = AutoTokenizer.from_pretrained(assets / "tokenizers" / name), name != "gpt2"
    rows = mixed_rows(assets / "data/hh-rlhf", split="test")[:500]
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


def test_math_shepherd_has_its_placeholders_in_the_ids_of_the_whole_text(assets):
    rows = mixed_rows(assets / "data/prm/samples_math-shepherd.jsonl")
    supervised = SupervisedConfig("m", "d", max_len=4096)
    for name in ("mistral-v3", "phi3-mini"):
        tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
        examples, dropped = load_process_examples(rows, tokenizer, supervised, ProcessConfig())
        assert dropped == 0
        for row, example in zip(rows, examples, strict=True):
            assert example.token_ids == tokenizer(row.row["input"])["input_ids"]


@pytest.mark.parametrize("name", WITH_CHAT)
def test_math_shepherd_is_judged_step_by_step(assets, name):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    rows = mixed_rows(assets / "data/prm/samples_math-shepherd.jsonl")
    examples, _ = load_process_examples(rows, tokenizer, SupervisedConfig("m", "d", max_len=4096), ProcessConfig())
    (placeholder,) = tokenizer("ки", add_special_tokens=False)["input_ids"]
    for row, example in zip(rows, examples, strict=True):
        labels = [label for label in example.labels if label != -100]
        marks = "".join(tokenizer.convert_ids_to_tokens(label).strip("▁") for label in labels)
        assert marks == "".join(re.findall(r" ([+-])(?=\n|$)", row.row["label"]))
        assert [label != -100 for label in example.labels] == [t == placeholder for t in example.token_ids]


def test_mr_gsm8k_is_judged_up_to_its_first_wrong_step(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/qwen2.5")
    rows = mixed_rows(assets / "data/prm/mr_gsm8k_labelled.jsonl")
    examples, dropped = load_process_examples(rows, tokenizer, WITH_TEMPLATE, ProcessConfig())
    assert (len(examples), dropped) == (590, 0)
    for row, example in zip(rows, examples, strict=True):
        labels = tokenizer.convert_ids_to_tokens([label for label in example.labels if label != -100])
        assert labels == ["+"] * (row.row["model_output_solution_first_error_step"] - 1) + ["-"]


def test_gpt2_has_no_token_for_the_usual_placeholder(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/gpt2")
    rows = mixed_rows(assets / "data/prm/samples_math-shepherd.jsonl")
    with pytest.raises(ValueError, match="--placeholder_token 'ки' is 2 tokens of the tokenizer of --pretrain"):
        load_process_examples(rows, tokenizer, SupervisedConfig("m", "d"), ProcessConfig())


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
    recognized, _ = load_sft_examples(number_rows(rows[:50]), tokenizer, supervised, SFTDataConfig())
    with_input = next(n for n, row in enumerate(rows[:50]) if row["input"])
    text = tokenizer.decode(recognized[with_input].token_ids)
    assert f"\n{rows[with_input]['instruction']}\n{rows[with_input]['input']}\n" in text
