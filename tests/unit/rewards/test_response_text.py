"""The text of a response: what ends or pads it is off, special tokens that the model wrote are in it."""

import dataclasses
import logging
import string

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from openppo.rewards import response_text
from openppo.rewards.function_values import values_of
from openppo.rewards.model import RewardModelText
from openppo.rewards.scoring import answer_text, step_ends, step_tokens, turn_texts
from openppo.types import Completion, FinishReason, Prompt, Sample
from tests.conftest import save_tokenizer
from tests.samples import with_last

TAGS = ["<|end|>", "<reason>", "</reason>", "</answer>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A token per letter; tags are special, <|end|> ends turns beside <eos>."""
    return save_tokenizer(tmp_path_factory.mktemp("tags"), [*string.ascii_lowercase, "\n"], TAGS)


@pytest.fixture
def response(tokenizer, make_sample):
    """A finished response to "q" of tokens that are separated by blanks."""

    def make(tokens: str, truncated: bool = False, stop: tuple[str, ...] = ()) -> Sample:
        ids = tokenizer.convert_tokens_to_ids(tokens.split(" "))
        sample = make_sample(tokenizer.convert_tokens_to_ids(["q"]), ids, truncated=truncated)
        return dataclasses.replace(sample, stop=stop)

    return make


@pytest.mark.parametrize(
    ("tokens", "text"),
    {
        "<reason> a </reason> b <eos>": "<reason>a</reason>b",
        "<reason> a </reason> b <|end|>": "<reason>a</reason>b",
        "a </reason> <eos>": "a</reason>",
        "a <eos> b <pad> c <eos> <pad>": "a<eos>b<pad>c",
        "<eos>": "",
    }.items(),
)
def test_only_the_ending_of_a_finished_response_is_off(tokens, text, tokenizer, response):
    values = values_of(response(tokens), tokenizer)
    assert (values["response"], values["turns"], values["solution_str"]) == (text, [text], text)
    assert answer_text(response(tokens), tokenizer) == text


def test_a_response_cut_off_keeps_its_last_tag(tokenizer, response):
    assert answer_text(response("a </reason>", truncated=True), tokenizer) == "a</reason>"
    assert answer_text(response("a <pad>", truncated=True), tokenizer) == "a"


def test_a_stop_text_stays_though_its_token_is_special(tokenizer, response):
    assert answer_text(response("a </answer>", stop=("</answer>",)), tokenizer) == "a</answer>"
    assert answer_text(response("a </answer>", stop=("b</answer>",)), tokenizer) == "a", (
        "another one ended it"
    )
    assert answer_text(response("a <eos>", stop=("</answer>",)), tokenizer) == "a"


def test_each_turn_before_the_last_has_its_ending_off(tokenizer, response):
    single = response("<reason> a <|end|> x b </reason> <|end|>")
    played = with_last(single, action_mask=[t not in (0, 4) for t in range(8)])
    assert turn_texts(played, tokenizer) == ["<reason>a", "b</reason>"]


def test_steps_are_those_of_the_text_that_rewards_see(tokenizer, response):
    played = response("<reason> \n a \n </reason> \n <eos>")
    assert [i - 1 for i in step_tokens(played, tokenizer, "\n")] == [0, 2, 4]
    assert len([step for step in answer_text(played, tokenizer).split("\n") if step]) == 3


def test_another_reward_model_reads_special_tokens_of_the_policy(tokenizer, response, tmp_path):
    own = save_tokenizer(tmp_path, [*string.ascii_lowercase, *"<>/"])
    ids = RewardModelText(tokenizer, own, "--reward_pretrain other")(
        response("<reason> a </reason> <eos>")
    )
    assert own.decode(ids) == "ask<reason>a</reason><eos>"


@pytest.mark.parametrize(("name", "end"), [("qwen2.5", "<|im_end|>"), ("phi3-mini", "<|end|>")])
def test_tags_added_to_real_tokenizers_are_kept(name, end, assets, make_sample):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<reason>", "</reason>"]}, False)
    ids = tokenizer(f"<reason>one two</reason>three{end}", add_special_tokens=False)["input_ids"]
    assert answer_text(make_sample([4], ids), tokenizer) == "<reason>one two</reason>three"


def test_a_tokenizer_in_python_puts_no_blanks_around_tags(make_sample):
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<reason>", "</reason>"]}, False)
    text = "<reason>one two</reason>three"
    ids = tokenizer(text)["input_ids"]
    assert answer_text(make_sample([4], ids), tokenizer) == text
    assert step_ends(ids, tokenizer, " ") == [ids.index(35) - 1, len(ids) - 2]


def test_an_engine_tells_what_stop_texts_a_response_had(tokenizer):
    completion = Completion(
        tokenizer.convert_tokens_to_ids(["a", "</answer>"]),
        log_probs=[0.0] * 2,
        versions=[0] * 2,
        finish_reason=FinishReason.STOP,
    )
    sample = Sample.of_response(Prompt("q", [4]), completion, group=0, stop=("</answer>",))
    assert response_text.response_text(sample, tokenizer) == "a</answer>"


def test_the_log_tells_once_that_responses_have_special_tokens(
    tokenizer, response, caplog, monkeypatch
):
    monkeypatch.setattr(response_text, "_MENTIONED", set())
    caplog.set_level(logging.INFO, "openppo")
    answer_text(response("a <eos>"), tokenizer)
    assert caplog.messages == []
    for _ in range(2):
        answer_text(response("<reason> a </reason> <eos>"), tokenizer)
    (line,) = caplog.messages
    assert "'<reason>'" in line and "rewards" in line


def test_calls_of_an_agent_end_a_turn_too(tokenizer, response):
    played = with_last(response("a <|end|>"), finish_reason=FinishReason.TOOL_CALL)
    assert turn_texts(played, tokenizer) == ["a"]
