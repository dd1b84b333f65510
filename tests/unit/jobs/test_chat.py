"""Chat: answers are those of generate, turns continue recorded ids, and text streams in whole characters."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from openppo.agents.text_stream import TextStream
from openppo.config import ChatConfig, GenerateConfig, RowsConfig, from_options
from openppo.datasets.prompts import render_prompt
from openppo.jobs.chat import ChatJob, Conversation
from openppo.rewards.response_text import response_text
from openppo.rollout.policy import FrozenPolicy
from openppo.rollout.sampling import decoder, sampling_params
from openppo.strategy.weights import WholeWeights
from openppo.types import FinishReason, SamplingParams
from tests.fork_server import PYTHON_PATH
from tests.playing import sample_responses
from tests.unit.agents.conftest import ScriptedEngine, make_chat_tokenizer

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny random model of chats, which answers with letters."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = make_chat_tokenizer()
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    LlamaForCausalLM(LlamaConfig(**size, **SIZES)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def loaded(folder: Path, **options: Any) -> FrozenPolicy:
    policy = FrozenPolicy(from_options(ChatConfig, folder=str(folder), **options), "FOLDER")
    policy.load(lambda actor: actor.eval(), max_batch_size=1)
    return policy


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("has_template", [True, False])
def test_the_first_answer_is_the_response_of_generate(folder, temperature, has_template):
    policy = loaded(folder)
    if not has_template:
        policy.tokenizer.chat_template = None
    options = from_options(
        GenerateConfig,
        pretrain=str(folder),
        prompt_data="x",
        output_path="x",
        temperature=temperature,
        generate_max_len=30,
        min_new_tokens=12,
    )
    params = sampling_params(options)
    prompt = render_prompt(
        "Hello there", policy.tokenizer, RowsConfig(apply_chat_template=has_template)
    )
    conversation = Conversation(policy, params, seed=3)
    with policy.engine.with_weights(WholeWeights(policy.actor.model)):
        (expected,) = sample_responses(policy.engine, [prompt], params, n_samples=1, seed=3)
        pieces = list(conversation.ask("Hello there"))
    assert "".join(pieces) == response_text(expected, policy.tokenizer)
    assert len(pieces) > 3, "they come token by token"


def scripted(script: Any, **options: Any) -> tuple[Conversation, ScriptedEngine]:
    """A conversation with an engine that answers by a script."""
    tokenizer = make_chat_tokenizer()
    engine = ScriptedEngine(tokenizer, script)
    policy: Any = SimpleNamespace(
        tokenizer=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        engine=engine,
        context=options.pop("context", None),
    )
    params = SamplingParams(options.pop("most", 50), stop=options.pop("stop", ()))
    return Conversation(policy, params, seed=0, **options), engine


def said(conversation: Conversation, *texts: str) -> list[str]:
    return ["".join(conversation.ask(text)) for text in texts]


def test_each_turn_continues_the_recorded_ids():
    # The template cuts thoughts of earlier turns, so a rendering would have other ids.
    conversation, engine = scripted(lambda text: "<think>so</think>yes", system="Be brief.")
    assert said(conversation, "one", "two", "three") == ["<think>so</think>yes"] * 3
    for (prompt, sampled), (next_prompt, _) in zip(
        engine.journal, engine.journal[1:], strict=False
    ):
        assert next_prompt[: len(prompt) + len(sampled)] == prompt + sampled
    text = conversation.renderer.decode(engine.journal[2][0])
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert text.count("<think>so</think>yes<|im_end|>\n<|im_start|>user\n") == 2
    assert [handle for *_, handle in engine.submitted] == [None, 0, 1], "keys are kept"
    assert len({seed for _, seed, _ in engine.submitted}) == 3

    conversation.reset()
    said(conversation, "one")
    assert engine.journal[3][0] == engine.journal[0][0]


def test_a_stopped_answer_is_recorded_and_the_next_turn_follows_it():
    conversation, engine = scripted(lambda text: "abcdefgh")
    pieces = []
    pieces.extend(conversation.ask("one", lambda: len(engine.running[0][2]) == 3))
    assert "".join(pieces) == "abc"
    assert not engine.busy, "the request is cancelled"
    assert conversation.last.finish_reason is FinishReason.ABORT
    said(conversation, "two")
    text = conversation.renderer.decode(engine.journal[0][0])
    assert "assistant\nabc<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in text


def test_a_full_context_shortens_the_answer_and_then_is_an_error():
    conversation, engine = scripted(lambda text: "a" * 40)
    said(conversation, "one")
    n_prompt = len(engine.journal[0][0])

    conversation, _ = scripted(lambda text: "a" * 40, context=n_prompt + 10)
    assert said(conversation, "one") == ["a" * 10]
    assert conversation.last.finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match=rf"reads {n_prompt + 10} at most: /reset begins anew"):
        said(conversation, "two")
    conversation.reset()
    assert said(conversation, "one") == ["a" * 10]


def test_a_stop_text_is_never_shown():
    conversation, _ = scripted(lambda text: "ab END cd", stop=("END",))
    assert said(conversation, "one") == ["ab "]
    conversation, _ = scripted(lambda text: "ab EN cd", stop=("END",))
    assert said(conversation, "one") == ["ab EN cd"], "what only begins like it is"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_characters_of_several_bytes_come_whole():
    tokenizer = byte_tokenizer()
    text = "naïve 日本語, 👩‍🚀 and a real \ufffd; é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    stream = TextStream(decoder(tokenizer))
    pieces = [stream.piece(ids[:n]) for n in range(1, len(ids) + 1)]
    assert "".join([*pieces, stream.end(text)]) == text
    assert {*filter(None, pieces)} >= {"ï", "日", "本", "語", "👩", "🚀", "é"}


def test_bytes_that_are_no_text_appear_once_at_the_end():
    tokenizer = byte_tokenizer()
    ids = tokenizer("aé", add_special_tokens=False)["input_ids"][:-1]
    stream = TextStream(decoder(tokenizer))
    pieces = [stream.piece(ids[:n]) for n in range(1, len(ids) + 1)]
    assert pieces == ["a", ""]
    assert stream.end(decoder(tokenizer)(ids)) == "\ufffd"


def test_a_reward_model_is_refused_though_its_weights_would_load(tmp_path):
    tokenizer = make_chat_tokenizer()
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, tie_word_embeddings=True, **SIZES)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"^FOLDER .*: a reward model or critic \(LlamaForSequenceCl.*no text"
    ):
        ChatJob(from_options(ChatConfig, folder=str(tmp_path)))


def test_lines_of_a_pipe_are_turns(folder):
    words = [sys.executable, "-m", "openppo", "chat", folder, "--temperature", "0"]
    lines = "hello\nhello\n\n/reset\n hello \n/exit\nnever\n"
    done = subprocess.run(
        [*words, "--generate_max_len", "8"],
        input=lines,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a new conversation begins") == 1
    assert done.stderr.count("cut after 8 tokens: a larger --generate_max_len") >= 1
    answers = done.stdout
    assert answers[: len(answers) // 3], "something is said"
    first = answers[: answers.index("\n") + 1]
    assert answers.endswith(first) and answers.count(first) >= 2, "a reset forgets"
