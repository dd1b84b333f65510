"""Programs that import nothing of openppo train a model, over two ranks, through the command line."""

import json
import shlex
import sys

import pytest

from tests.distributed.runs import logged, save_chat_model, vector


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model of two layers with a chat template and a token for each character."""
    return save_chat_model(tmp_path_factory.mktemp("chat") / "model")


CLIENT = """
import json, os, sys, urllib.request

def chat(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(2):
    messages += [chat(messages), {"role": "user", "content": sys.argv[1]}]
said = messages[1]["content"] + messages[3]["content"]
assert not any(name.startswith(("openppo", "torch")) for name in sys.modules)
print(json.dumps({"reward": sum(letter.isupper() for letter in said)}))
"""


def test_a_plain_client_trains_a_model_on_two_ranks(chat_model, tmp_path, launch):
    rows = [{"question": f"say {i}", "more": f"and {i}; then"} for i in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(CLIENT)
    flags = f"""--pretrain {chat_model} --prompt_data tasks.jsonl --input_key question --save_path trained
        --advantage_estimator group_norm --n_samples_per_prompt 4 --rollout_batch_size 4 --train_batch_size 16
        --generate_max_len 8 --episode_max_len 160 --init_kl_coef 0 --actor_learning_rate 1e-3"""
    command = f"{shlex.quote(sys.executable)} agent.py {{more}}"
    launch(
        2, "-m", "openppo.cli.train_ppo", *flags.split(), "--agent_command", command, cwd=tmp_path
    )
    metrics = logged(tmp_path / "trained")
    assert [line["step"] for line in metrics] == [1, 2]
    assert {
        (line["agent/completed"], line["agent/turns"], line["agent/bridged_turns"])
        for line in metrics
    } == {(1, 2, 1)}
    assert (vector(tmp_path / "trained") - vector(chat_model)).norm() > 0


def test_a_program_that_does_not_exist_ends_the_run_before_models_load(tmp_path, launch):
    flags = "--pretrain no_model --prompt_data no_data --save_path trained --agent_command no_such_program"
    printed = launch(0, "-m", "openppo.cli.train_ppo", *flags.split(), cwd=tmp_path, status=2)
    assert (
        "--agent_command: there is no program 'no_such_program'. Install it, or write its whole path."
        in printed
    )
    assert "Traceback" not in printed
