"""serve_agent as a real process, with requests of OpenAI's form."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory, chat_tokenizer) -> Path:
    """A tiny random model of chats."""
    folder = tmp_path_factory.mktemp("chat_model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "eos_token_id": chat_tokenizer.eos_token_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(chat_tokenizer), **sizes, **ends)).save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder


def chat(url: str, key: str) -> dict:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "model": "any", "max_tokens": 5}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers), timeout=60) as got:
        return json.load(got)


def test_any_key_is_an_episode_until_the_server_is_interrupted(model, tmp_path):
    said, logged = tmp_path / "stdout", tmp_path / "stderr"
    command = [sys.executable, "-m", "openppo", "serve_agent", "--pretrain", model, "--port", "0", "--max_turns", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=said.open("w"), stderr=logged.open("w"))
    try:
        while process.poll() is None and "my_agent.py" not in said.read_text():
            time.sleep(0.05)
        url = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY", said.read_text())[1]
        answers = [chat(url, key) for key in ("one", "one", "two")]
        assert [answer["usage"]["completion_tokens"] <= 5 for answer in answers] == [True] * 3
        assert answers[0]["choices"] == answers[2]["choices"] != answers[1]["choices"], "one seed for each episode"
        with pytest.raises(urllib.error.HTTPError) as refused:
            chat(url, "one")
        assert refused.value.code == 400 and "max_turns" in refused.value.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
    log = logged.read_text()
    assert re.search(r"one, turn 1: rendered whole; \d+ tokens read, \d sampled", log)
