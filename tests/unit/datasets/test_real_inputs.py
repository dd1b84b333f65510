"""Real tokenizers and data, from the folder OPENPPO_ASSETS."""

import re
from functools import cache

import pytest
from transformers import AutoTokenizer

from openppo.agents.renderer import Renderer
from openppo.config import RowsConfig
from openppo.datasets import load_mixed_rows, render_prompt, render_whole
from openppo.datasets.templates import as_messages
from tests.unit.agents.real_templates import trl_templates
from tests.unit.datasets.loaders import WITH_CHAT, load, shown, turns

CHATS = ["qwen2.5", "mistral-v3", "phi3-mini"]


@cache
def tokenizer_of(assets, name):
    return AutoTokenizer.from_pretrained(assets / "tokenizers" / name)


@pytest.fixture(params=CHATS)
def chat_tokenizer(request, assets):
    return tokenizer_of(assets, request.param)


def rows_of(source, split="train"):
    return load_mixed_rows(RowsConfig(), str(source), flag="--dataset", split=split, seed=0)


def whole_of(chat, tokenizer):
    return render_whole(chat, tokenizer, RowsConfig(**WITH_CHAT)).token_ids


@pytest.mark.parametrize(
    ("name", "chat"), [*((name, chat) for name in CHATS for chat in (False, True)), ("gpt2", False)]
)
def test_examples_are_prompt_response_eos(assets, name, chat):
    tokenizer, rows = tokenizer_of(assets, name), rows_of(assets / "data/gsm8k", "test")[:20]
    columns = {"input_key": "question", "output_key": "answer"}
    examples = load("sft", rows, tokenizer, columns, apply_chat_template=chat)
    assert len(examples) == 20
    for row, example in zip(rows, examples, strict=True):
        prompt = render_prompt(
            row.row["question"], tokenizer, RowsConfig(apply_chat_template=chat)
        ).token_ids
        assert (
            tokenizer.bos_token_id in (None, tokenizer.eos_token_id)
            or prompt.count(tokenizer.bos_token_id) <= 1
        )
        assert example.token_ids[: len(prompt)] == prompt
        assert (example.loss_mask.index(True), example.token_ids[-1]) == (
            len(prompt),
            tokenizer.eos_token_id,
        )
        response = tokenizer.decode(example.token_ids[len(prompt) :], skip_special_tokens=True)
        assert response.strip() == row.row["answer"].strip()


CHAT = [
    *turns(system="Be brief.", user="Hi there.", assistant="Hello."),
    *turns(user="Two plus two?", assistant="It is four."),
]
TARGETS = {
    "qwen2.5": ["Hello", ".", "<|im_end|>", "It", "Ġis", "Ġfour", ".", "<|im_end|>"],
    "mistral-v3": ["▁Hello", ".", "</s>", "▁It", "▁is", "▁four", ".", "</s>"],
    "phi3-mini": ["Hello", ".", "<|end|>", "It", "▁is", "▁four", ".", "<|end|>", "<|endoftext|>"],
}


@pytest.mark.parametrize("name", CHATS)
def test_all_answers_of_a_chat_are_targets_in_the_ids_of_the_whole_rendering(assets, name):
    tokenizer = tokenizer_of(assets, name)
    (example,) = load("sft", [{"messages": CHAT}], tokenizer, **WITH_CHAT)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False).rstrip(
        "\n"
    )  # Qwen has a newline after EOS
    assert example.token_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids)
    assert [t for t, target in zip(tokens, example.loss_mask, strict=True) if target] == TARGETS[
        name
    ]


CALL = {"name": "weather", "arguments": '{"city": "Paris"}'}
WEATHER = [
    *turns(user="Weather?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"},
    *turns(assistant="It is sunny."),
]
OPENAI = [
    *turns(user="Weather?"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    *turns(assistant="It is sunny."),
]
WITHOUT_IDS = [
    *turns(user="Weather?"),
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
    {"role": "tool", "content": "sunny"},
    *turns(assistant="It is sunny."),
]
OLDER = [
    *turns(user="Weather?"),
    {"role": "assistant", "content": None, "function_call": CALL},
    {"role": "function", "name": "weather", "content": "sunny"},
    *turns(assistant="It is sunny."),
]
QWEN_DEFAULT = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
WITH_CALLS = {
    "qwen2.5": QWEN_DEFAULT
    + "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n«<tool_call>\n"
    '{{"name": "weather", "arguments": {{"city": "Paris"}}}}\n</tool_call><|im_end|>»\n<|im_start|>user\n'
    "<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n«It is sunny.<|im_end|>»",
    "mistral-v3": '<s>[INST] Weather?[/INST]«[TOOL_CALLS] [{{"name": "weather", "arguments": {{"city": "Paris"}}, '
    '"id": "{0}"}}]</s>»[TOOL_RESULTS] {{"content": "sunny", "call_id": "{0}"}}[/TOOL_RESULTS]«It is sunny.</s>»',
}


@pytest.mark.parametrize("name", WITH_CALLS)
@pytest.mark.parametrize(
    ("chat", "call_id"),
    [
        (WEATHER, "abcdefghi"),
        (OLDER, "c00000001"),
        (OPENAI, "c00001000"),
        (WITHOUT_IDS, "c00001000"),
    ],
    ids=["short ids", "older", "ids of OpenAI", "no ids"],
)
def test_calls_of_rows_have_the_tokens_of_an_agents_episode(assets, name, chat, call_id):
    tokenizer = tokenizer_of(assets, name)
    (example,) = load("sft", [{"messages": chat}], tokenizer, **WITH_CHAT)
    assert shown(example, tokenizer) == WITH_CALLS[name].format(call_id)
    renderer = Renderer(tokenizer, "json", [tokenizer.eos_token_id])
    episode = renderer.encode(
        renderer.rendered(as_messages(chat), for_generation=False).rstrip("\n")
    )
    assert example.token_ids == episode


PREFILLED = {
    "qwen2.5": QWEN_DEFAULT + "<|im_start|>user\nWhat is 1+2?<|im_end|>\n<|im_start|>assistant\n{}",
    "mistral-v3": "<s>[INST] What is 1+2?[/INST] {}",
    "phi3-mini": "<|user|>\nWhat is 1+2?<|end|>\n<|assistant|>\n{}",
}


@pytest.mark.parametrize("prefill", ["<think>\n", "The answer is"])
def test_a_prompt_that_ends_in_the_assistants_turn_is_that_of_transformers(
    chat_tokenizer, request, prefill
):
    chat = [*turns(user="What is 1+2?"), *turns(assistant=prefill)]
    (prompt,) = load("prompts", [{"prompt": chat}], chat_tokenizer, **WITH_CHAT)
    assert prompt.text == PREFILLED[request.node.callspec.params["chat_tokenizer"]].format(prefill)
    of_transformers = chat_tokenizer.apply_chat_template(
        chat, continue_final_message=True, return_dict=False
    )
    assert prompt.token_ids == of_transformers
    (example,) = load(
        "sft", [{"prompt": chat, "completion": " three."}], chat_tokenizer, **WITH_CHAT
    )
    assert example.token_ids[: example.loss_mask.index(True)] == prompt.token_ids


@pytest.mark.parametrize("prefill", ["<think>\n", "The answer is"])
def test_every_real_template_continues_a_prompt_as_it_was_trained(assets, prefill):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/qwen2.5")
    tokenizer.bos_token = "<|endoftext|>"
    chat = [*turns(user="What is 1+2?"), *turns(assistant=prefill)]
    row = {
        "prompt": chat,
        "completion": "\n3\n</think>\n\nThree." if "think" in prefill else " three.",
    }
    refused = set()
    for name, template in trl_templates().items():
        tokenizer.chat_template = template
        try:
            (example,) = load("sft", [row], tokenizer, **WITH_CHAT)
        except ValueError:
            refused.add(name.removesuffix("_training"))
            continue
        (prompt,) = load("prompts", [{"prompt": chat}], tokenizer, **WITH_CHAT)
        assert prompt.text.endswith(prefill)
        assert prompt.text.count("<think>") == prefill.count("<think>") or "</think>" in prompt.text
        assert example.token_ids[: example.loss_mask.index(True)] == prompt.token_ids, name
    of_parts, rewrite_thoughts = (
        {"idefics3", "llava_next"},
        {"deepseek_r1_distill", "deepseekv3", "glm4moe"},
    )
    assert refused == of_parts | (rewrite_thoughts if "think" in prefill else set())


def as_openai(chat):
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    return [{"role": roles[turn["from"]], "content": turn["value"]} for turn in chat]


def test_sharegpt_chats_are_cut_where_generation_starts_and_pairs_are_whole(chat_tokenizer, assets):
    rows = rows_of(assets / "data/alpaca/dpo_en_demo.json")
    chats = [as_openai(row.row["conversations"] + [row.row["chosen"]]) for row in rows]
    long = [chat for chat in chats if len(chat) > 5][:20]
    examples = load("sft", [{"messages": chat} for chat in long], chat_tokenizer, **WITH_CHAT)
    for chat, example in zip(long, examples, strict=True):
        starts = [
            t
            for t in range(1, len(example.loss_mask))
            if example.loss_mask[t] > example.loss_mask[t - 1]
        ]
        answers = [n for n, turn in enumerate(chat) if turn["role"] == "assistant"]
        for n, start in zip(answers, starts, strict=True):
            asked = render_prompt(chat[:n], chat_tokenizer, RowsConfig(**WITH_CHAT))
            assert example.token_ids[:start] == asked.token_ids
    pairs = load("pairs", rows[-60:], chat_tokenizer, **WITH_CHAT)
    assert len(pairs) == 60
    for row, pair in zip(rows[-60:], pairs, strict=True):
        rejected = as_openai([*row.row["conversations"], row.row["rejected"]])
        assert pair.rejected_ids == whole_of(rejected, chat_tokenizer)


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5"])
def test_hh_transcripts_become_pairs_prompts_and_responses(assets, name):
    tokenizer, options = tokenizer_of(assets, name), {} if name == "gpt2" else WITH_CHAT
    rows = rows_of(assets / "data/hh-rlhf", "test")[:500]
    pairs = load("pairs", rows, tokenizer, **options)
    prompts = load("prompts", rows, tokenizer, prompt_max_len=4096, **options)
    assert len(pairs) == len(prompts) == 500
    for row, pair, prompt in zip(rows, pairs, prompts, strict=True):
        n_asked = len(prompt.token_ids)
        assert pair.chosen_ids[:n_asked] == pair.rejected_ids[:n_asked] == prompt.token_ids
        assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == tokenizer.eos_token_id
        if options:
            assert prompt.text.endswith("<|im_start|>assistant\n")
        else:
            assert tokenizer.decode(pair.chosen_ids[:-1]) == row.row["chosen"]
            assert tokenizer.decode(pair.rejected_ids[:-1]) == row.row["rejected"]


@pytest.mark.parametrize("name", CHATS)
def test_math_shepherd_is_judged_step_by_step_in_the_ids_of_the_whole_text(assets, name):
    tokenizer, rows = (
        tokenizer_of(assets, name),
        rows_of(assets / "data/prm/samples_math-shepherd.jsonl"),
    )
    examples = load("steps", rows, tokenizer)
    (placeholder,) = tokenizer("ки", add_special_tokens=False)["input_ids"]
    assert len(examples) == len(rows)
    for row, example in zip(rows, examples, strict=True):
        assert name == "qwen2.5" or example.token_ids == tokenizer(row.row["input"])["input_ids"]
        labels = [label for label in example.labels if label != -100]
        marks = "".join(tokenizer.convert_ids_to_tokens(label).strip("▁") for label in labels)
        assert marks == "".join(re.findall(r" ([+-])(?=\n|$)", row.row["label"]))
        assert [label != -100 for label in example.labels] == [
            t == placeholder for t in example.token_ids
        ]
