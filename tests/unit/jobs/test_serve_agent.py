"""serve_agent as a real process, with requests of OpenAI's form."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, LlamaConfig, LlamaForCausalLM, LlavaProcessor

from openppo.datasets.media_files import thumbnail
from tests.fork_server import PYTHON_PATH
from tests.images import llava
from tests.unit.agents.conftest import make_chat_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny random model of chats."""
    folder = tmp_path_factory.mktemp("chat_model")
    chat_tokenizer = make_chat_tokenizer()
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ends = {"pad_token_id": 0, "eos_token_id": chat_tokenizer.eos_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(chat_tokenizer), **sizes, **ends)).save_pretrained(
        folder
    )
    chat_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def seeing(tmp_path) -> Path:
    """A tiny LLaVA of chats."""
    tokenizer = make_chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    model = llava()
    model.resize_token_embeddings(len(tokenizer))
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    model.save_pretrained(tmp_path / "llava")
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    more = {"image_token": "<image>", "num_additional_image_tokens": 1}
    LlavaProcessor(CLIPImageProcessorPil(**sizes), tokenizer, 8, "default", **more).save_pretrained(
        tmp_path / "llava"
    )
    tokenizer.save_pretrained(tmp_path / "llava")
    return tmp_path / "llava"


def chat(url: str, key: str, content: Any = "hello") -> dict:
    body = json.dumps(
        {"messages": [{"role": "user", "content": content}], "model": "any", "max_tokens": 5}
    ).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/chat/completions", body, headers), timeout=60
    ) as got:
        return json.load(got)


@contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[tuple[str, Any]]:
    """The address of a server, and its process."""
    said, logged = folder / "stdout", folder / "stderr"
    command = [
        sys.executable,
        "-m",
        "openppo",
        "serve_agent",
        "--pretrain",
        model,
        "--port",
        "0",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=said.open("w"), stderr=logged.open("w")
    )
    try:
        while process.poll() is None and "my_agent.py" not in said.read_text():
            time.sleep(0.05)
        yield re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY", said.read_text())[1], process
    finally:
        process.kill()


def test_any_key_is_an_episode_until_the_server_is_interrupted(model, tmp_path):
    with serving(model, tmp_path, "--max_turns", "2") as (url, process):
        answers = [chat(url, key) for key in ("one", "one", "two")]
        assert [answer["usage"]["completion_tokens"] <= 5 for answer in answers] == [True] * 3
        assert answers[0]["choices"] == answers[2]["choices"] != answers[1]["choices"], (
            "one seed for each episode"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            chat(url, "one")
        assert refused.value.code == 400 and "max_turns" in refused.value.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    log = (tmp_path / "stderr").read_text()
    assert re.search(r"one, turn 1: rendered whole; \d+ tokens read, \d sampled", log)


def test_a_model_that_sees_reads_images_of_requests(seeing, tmp_path):
    part = {"type": "image_url", "image_url": {"url": thumbnail(Image.new("RGB", (16, 16), "red"))}}
    with serving(seeing, tmp_path) as (url, _):
        without = chat(url, "one", [{"type": "text", "text": "hello"}])
        shown = chat(url, "two", [{"type": "text", "text": "hello"}, part])
    assert shown["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] + 4
