"""Episodes with megabytes of text end at their limits, and those beside them as they would alone."""

import json
import shlex
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.distributed.runs import CHAT, logged, vector

LONGEST = "=" * 1000
CLIENT = """
import json, os, sys, urllib.error, urllib.request

def chat(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": sys.stdin.read()}]
messages += [chat(messages), {"role": "user", "content": "x" * int(sys.argv[1])}]
for attempt in range(5):
    try:
        messages.append(chat(messages))
        break
    except urllib.error.HTTPError as error:
        sys.stderr.write(error.read().decode())
else:
    sys.exit(1)
said = messages[1]["content"] + messages[3]["content"]
print(json.dumps({"reward": sum(letter.isupper() for letter in said)}))
"""


def save_model_of_bytes(folder):
    """A model that reads bytes, and one long token."""
    units = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({unit: number for number, unit in enumerate(units)}, []))
    core.add_special_tokens(["<pad>", "<eos>", "<user>", "<assistant>", "<tool>"])
    core.add_tokens([LONGEST])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "chat_template": CHAT}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        initializer_range=0.2,
        **sizes,
        **ends,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_episodes_beside_megabytes_of_text_end_normally_and_train(tmp_path, launch):
    save_model_of_bytes(tmp_path / "model")
    cannot_fit, might_fit = 6_400_000, 1_500_000  # 2000 of the longest token have two million
    rows = [{"question": f"say {i}", "n": n} for i, n in enumerate((cannot_fit, 10, might_fit, 10))]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(CLIENT)
    flags = f"""--pretrain {tmp_path}/model --prompt_data tasks.jsonl --input_key question --save_path trained
        --advantage_estimator group_norm --n_samples_per_prompt 2 --rollout_batch_size 4 --train_batch_size 8
        --generate_max_len 8 --episode_max_len 2000 --init_kl_coef 0 --actor_learning_rate 1e-3 --agent_timeout 30"""
    command = f"{shlex.quote(sys.executable)} agent.py {{n}}"
    launch(
        1, "-m", "openppo.cli.train_ppo", *flags.split(), "--agent_command", command, cwd=tmp_path
    )
    (metrics,) = logged(tmp_path / "trained")
    endings = {
        name: metrics[f"agent/{name}"]
        for name in ("completed", "context_full", "timeout", "agent_error")
    }
    assert endings == {"completed": 0.5, "context_full": 0.5, "timeout": 0, "agent_error": 0}
    assert (vector(tmp_path / "trained") - vector(tmp_path / "model")).norm() > 0
