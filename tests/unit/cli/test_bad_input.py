"""Whatever a user gets wrong ends in one line that names the flag and what to do; never in a traceback.

Most cases run the command inside this process; some, of each kind, in one of its own or on several ranks.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import REPO, Launcher

RunCommand = Callable[..., Any]

FILES = {
    "prompts.jsonl": '{"input": "abc", "answer": "d"}\n' * 4,
    "tool.jsonl": '{"input": "ab<tool>c"}\n' * 4,
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "malformed.jsonl": '{"input": "a"}\n{"input": \n',
    "not_objects.jsonl": '["a", "b"]\n',
    "gap.jsonl": '{"input": "a"}\n{"inputs": "b"}\n',
    "numbers.jsonl": '{"input": 3}\n',
    "chat.jsonl": '{"input": [{"role": "user", "content": "a"}]}\n',
    "notes.txt": "a\n",
    "table.csv": "input,answer\na,b,c\n",
    "latin.csv": b"input\ncaf\xe9\n",
    "broken.parquet": b"PAR1 nothing",
    "sft.jsonl": '{"input": "abc", "output": "de"}\n' * 4,
    "long.jsonl": json.dumps({"input": "a" * 70, "output": "b"}) + "\n",
    "pairs.jsonl": '{"prompt": "a", "chosen": "bc", "rejected": "de", "margin": "much"}\n' * 4,
    "reward.py": "def other():\n    pass\ndef reward_fn(prompts, responses, labels):\n    return [0] * len(prompts)\n",
    "needs.py": "import not_there\n",
    "exits.py": "import sys\nsys.exit()\n",
    "leaves.py": "import os\ndef reward_fn(response):\n    os._exit(0)\n",
    "params.py": "def reward_fn(prompts, colour):\n    return [0] * len(prompts)\n",
    "bare.jsonl": '{"input": "abc"}\n' * 4,
    "strange.jsonl": '{"foo": "abc", "bar": "d"}\n',
    "steps.jsonl": '{"input": "ab x c x", "label": "ab y c z"}\n' * 4,
    "uneven_steps.jsonl": '{"input": "ab x c x", "label": ["y"]}\n',
    "loader.py": (
        "def rows(source):\n    return 3\ndef texts(source):\n    return ['a']\ndef none(source):\n    return []\n"
    ),
    "bad.yaml": "gama: 0.9\n",
    "list.yaml": "- gamma\n",
}


CUT_SHORT = '{"input": "a"}\n\n{"input": '
DATA_FILES: dict[str, tuple[str | bytes, str]] = {
    "cut.jsonl": (
        CUT_SHORT,
        ", line 3: not valid JSON (Expecting value at column 10). The file ends in this line: it may be cut off",
    ),
    "broken.jsonl": (CUT_SHORT + "\n", ", line 3: not valid JSON"),
    "html.jsonl": ("<html>\n", ", line 1: not valid JSON"),
    "pointer.jsonl": ("version https://git-lfs.github.com/spec/v1\n", ", line 1: not valid JSON"),
    "zeros.jsonl": (b"\0" * 64, ", line 1: not valid JSON"),
    "twice.jsonl": ('{"input": "a", "input": "b"}\n', ", line 1: not valid JSON ('input' occurs twice"),
    "deep.jsonl": ("[" * 100_000, ", line 1: not valid JSON (maximum recursion depth"),
    "digits.jsonl": ('{"input": ' + "9" * 5000 + "}", ", line 1: not valid JSON (Exceeds the limit"),
    "latin.jsonl": (b'{"input": "a"}\r\n{"input": "caf\xe9"}\r\n', ", line 2: not UTF-8 text (byte 0xe9"),
    "latin.json": (b'[{"input": "a"},\n{"input": "caf\xe9"}]', ", line 2: not UTF-8 text (byte 0xe9"),
    "utf16.jsonl": ('{"input": "a"}\n'.encode("utf-16"), ", line 1: not UTF-8 text (byte 0xff"),
    "object.json": ('{\n"input": "a"\n}', ", line 1: not valid JSON"),
    "array.json": ('[{"input": "a"},\n{"input": }]', ", line 2: not valid JSON"),
    "texts.json": ('["a"]', ", row 1: not an object but str"),
    "no_array.json": ("[]", ": empty, it has no rows"),
    "empty.json": ("", ": empty, it has no rows"),
    "empty.csv": ("", ": empty, it has no rows"),
    "header.csv": ("input\n", ": empty, it has no rows"),
    "quotes.csv": ('input\n"a', ", line 2: not valid CSV"),
    "twice.csv": ("input,input\na,b\n", ", line 1: column 'input' occurs twice"),
    "zero.parquet": (b"", ", from row 1 on: not a whole Parquet file"),
    "zero.jsonl.gz": (b"", ": empty, it has no rows"),
    "cut.jsonl.gz": (gzip.compress(b'{"input": "a"}\n')[:-9], ": cannot be read"),
    "table.xlsx": (b"PK", ": unknown kind of file"),
    "no_data/config.json": ("{}", ": no data file in this folder"),
    "state/state.json": ("{}", ": a folder saved by 'datasets' that cannot be read"),
    "splits/dataset_dict.json": ("{", ": a folder saved by 'datasets' that cannot be read"),
}
"""Files that no command can read, and what is said of them after the name of the file (or of its folder)."""

BAD_ROWS: list[tuple[str, str, dict[str, Any], str]] = [
    ("prompts", "empty", {"input": ""}, "the text is empty"),
    ("prompts", "null", {"input": None}, "not a text but NoneType"),
    ("prompts", "list", {"input": ["ab"]}, "needs --apply_chat_template"),
    ("prompts", "object", {"input": {"text": "ab"}}, "not a text but dict"),
    ("prompts", "not a number", {"input": float("nan")}, "not a text but float: nan"),
    ("prompts", "half a character", {"input": "a\ud83d"}, "half of a surrogate pair, U+D83D"),
    ("prompts", "other columns", {"text": "abc"}, "no column 'input'"),
    ("documents", "null", {"text": None}, "not a text but NoneType"),
    ("documents", "number", {"text": 3}, "not a text but int"),
    ("documents", "half a character", {"text": "\udc00"}, "half of a surrogate pair, U+DC00"),
    ("sft", "empty prompt", {"input": "", "output": "de"}, "the text is empty"),
    ("sft", "null", {"input": "abc", "output": None}, "not a text but NoneType"),
    ("sft", "no output", {"input": "abc"}, "no column 'output'"),
    ("sft", "half a character", {"input": "abc", "output": "\ud83d"}, "half of a surrogate pair, U+D83D"),
    ("pairs", "null side", {"prompt": "a", "chosen": None, "rejected": "de", "margin": 1}, "not a text but NoneType"),
    ("pairs", "null prompt", {"prompt": None, "chosen": "b", "rejected": "d", "margin": 1}, "'prompt' is null"),
    ("pairs", "not a number", {"prompt": "a", "chosen": "b", "rejected": "d", "margin": float("nan")}, "number: nan"),
    ("pairs", "infinite", {"prompt": "a", "chosen": "b", "rejected": "d", "margin": float("-inf")}, "number: -inf"),
    ("pairs", "huge", {"prompt": "a", "chosen": "b", "rejected": "d", "margin": 10**400}, "is not a number: 1000"),
    ("pairs", "switch", {"prompt": "a", "chosen": "b", "rejected": "d", "margin": True}, "is not a number: True"),
    ("steps", "null", {"input": None, "label": "a"}, "not a text but NoneType"),
    ("steps", "no placeholder", {"input": "abc", "label": "abc"}, "no placeholder 'x'"),
    ("steps", "one judgement", {"input": "ab x c x", "label": ["y"]}, "2 steps and 1 judgements"),
    ("steps", "not a number", {"input": "a x", "label": [float("nan")]}, "must lie in [0, 1]: [nan]"),
    ("steps", "no probability", {"input": "a x", "label": [1.5]}, "must lie in [0, 1]: [1.5]"),
    ("steps", "null label", {"input": "a x", "label": None}, "neither a text nor a list"),
]
"""Task, name, row and what is said of it; each is the third of a file whose second line is blank."""
GOOD_ROWS: dict[str, dict[str, Any]] = {
    "prompts": {"input": "abc", "answer": "d"},
    "documents": {"text": "abc"},
    "sft": {"input": "abc", "output": "de"},
    "pairs": {"prompt": "a", "chosen": "bc", "rejected": "de", "margin": 1},
    "steps": {"input": "ab x c x", "label": "ab y c z"},
}
FLAGS_OF_TASK = {
    "prompts": [
        ("train_ppo", "prompt_data"),
        ("train_ppo", "eval_data"),
        ("generate", "prompt_data"),
        ("evaluate", "prompt_data"),
    ],
    "documents": [("train_ppo", "pretrain_data")],
    "sft": [("train_sft", "dataset"), ("train_sft", "eval_dataset")],
    "pairs": [("train_rm", "dataset"), ("train_rm", "eval_dataset")],
    "steps": [("train_prm", "dataset"), ("train_prm", "eval_dataset")],
}
"""The flags that take data of each task."""


def bad_row_file(task: str, name: str) -> str:
    """The file of a row of ``BAD_ROWS``."""
    return f"{task}_{name.replace(' ', '_')}.jsonl"


GOOD: dict[str, dict[str, Any]] = {
    "train_ppo": {
        "pretrain": "M/actor",
        "prompt_data": "D/prompts.jsonl",
        "reward_fn": "D/reward.py",
        "rollout_batch_size": 4,
        "train_batch_size": 4,
        "generate_max_len": 8,
    },
    "train_sft": {"pretrain": "M/actor", "dataset": "D/sft.jsonl", "train_batch_size": 4},
    "train_rm": {"pretrain": "M/actor", "dataset": "D/pairs.jsonl", "train_batch_size": 4},
    "train_prm": {
        "pretrain": "M/actor",
        "dataset": "D/steps.jsonl",
        "train_batch_size": 4,
        "placeholder_token": "x",
        "reward_tokens": "y z",
    },
    "generate": {
        "pretrain": "M/actor",
        "prompt_data": "D/prompts.jsonl",
        "generate_max_len": 8,
        "output_path": "o.jsonl",
    },
    "evaluate": {
        "pretrain": "M/actor",
        "prompt_data": "D/prompts.jsonl",
        "generate_max_len": 8,
        "reward_fn": "D/reward.py",
    },
    "merge_lora": {"lora_path": "M/actor", "save_path": "merged"},
    "serve_rm": {"reward_pretrain": "M/reward"},
}
"""A command line that works; M/ is the folder of models and D/ the folder of data."""


@dataclass
class Case:
    """One mistake: options laid over those of ``GOOD``, where None takes one away and True gives a switch."""

    name: str
    options: dict[str, Any]
    says: list[str]
    """What the line must contain, the flag first."""
    command: str = "train_ppo"
    ranks: int = 0
    """With torchrun on so many ranks; 0: without torchrun."""

    def arguments(self, models: Path, data: Path) -> list[str]:
        """The command line."""
        arguments = []
        for name, value in {**GOOD[self.command], **self.options}.items():
            if value is not None:
                words = in_folders(str(value), models, data).split(" ")
                arguments += [f"--{name}"] if value is True else [f"--{name}", *words]
        return arguments

    def check(self, code: int, stderr: str, models: Path, data: Path) -> None:
        """One line of ours, that says what it must."""
        lines = [line for line in stderr.splitlines() if line.startswith("error")]
        assert len(lines) == 1, stderr
        for part in self.says:
            assert in_folders(part, models, data) in lines[0]
        assert "secret" not in stderr
        assert code == (1 if self.ranks else 2), "torchrun makes 1 of every exit status"
        assert f'File "{REPO}/openppo' not in stderr, "no traceback through our code"
        assert "Traceback" not in stderr or self.ranks, "torchrun ends with a traceback of its own"


def in_folders(text: str, models: Path, data: Path) -> str:
    """``text`` with the folders put in."""
    return text.replace("M/", f"{models}/").replace("D/", f"{data}/")


def reward_model(name: str) -> dict[str, Any]:
    """Score with a model instead of the function."""
    return {"reward_fn": None, "reward_pretrain": f"M/{name}"}


NO_FILE = "no such file or folder"
JSON_REMEDY = "Put one JSON object on each line"
DATA = [
    Case(
        "missing data file", {"prompt_data": "D/none.jsonl"}, ["--prompt_data D/none.jsonl", NO_FILE, "Check the path"]
    ),
    Case("no time for signs of life", {"heartbeat_timeout": 1}, ["--heartbeat_timeout", "between 5 and 3600"]),
    Case("time to stall below zero", {"stall_timeout": -5}, ["--stall_timeout", "0 waits for ever"]),
    Case("missing data folder", {"prompt_data": "D/a/b/c"}, ["--prompt_data D/a/b/c", NO_FILE, "Check the path"]),
    Case("empty data file", {"prompt_data": "D/empty.jsonl"}, ["--prompt_data D/empty.jsonl", "no rows", "Choose"]),
    Case("blank data file", {"prompt_data": "D/blank.jsonl"}, ["--prompt_data D/blank.jsonl", "no rows", "Choose"]),
    Case(
        "malformed line", {"prompt_data": "D/malformed.jsonl"}, ["--prompt_data D/malformed.jsonl, line 2", JSON_REMEDY]
    ),
    Case("rows that are no objects", {"prompt_data": "D/not_objects.jsonl"}, ["--prompt_data", "line 1", JSON_REMEDY]),
    Case("unknown kind of file", {"prompt_data": "D/notes.txt"}, ["--prompt_data D/notes.txt", "Use .jsonl"]),
    Case("ragged CSV", {"prompt_data": "D/table.csv"}, ["--prompt_data D/table.csv, line 2", "Put quotes around"]),
    Case(
        "CSV that is not UTF-8", {"prompt_data": "D/latin.csv"}, ["--prompt_data D/latin.csv", "Save the file as UTF-8"]
    ),
    Case("damaged Parquet", {"prompt_data": "D/broken.parquet"}, ["--prompt_data D/broken.parquet", "Write it again"]),
    Case("no such column", {"input_key": "q"}, ["--input_key", "--prompt_data, row 1", "'q'", "input, answer"]),
    Case("a row lacks it", {"prompt_data": "D/gap.jsonl"}, ["--input_key", "row 2", "inputs"]),
    Case("no such label", {"label_key": "l"}, ["--label_key", "--prompt_data, row 1", "'l'", "input, answer"]),
    Case(
        "prompts that are numbers", {"prompt_data": "D/numbers.jsonl"}, ["--prompt_data, row 1", "not a text but int"]
    ),
    Case("chat without template", {"prompt_data": "D/chat.jsonl"}, ["--prompt_data, row 1", "--apply_chat_template"]),
    Case("no chat template", {"apply_chat_template": True}, ["--apply_chat_template", "Leave the flag out"]),
    Case("template without place", {"input_template": "Q:"}, ["--input_template", "must contain {} once"]),
    Case("prompts all too long", {"prompt_max_len": 2}, ["--prompt_max_len 2", "shortest has 3", "Raise"]),
    Case("beyond the context", {"generate_max_len": 62}, ["--generate_max_len 62", "64 tokens", "Lower"]),
    Case("missing documents", {"pretrain_data": "D/none.jsonl"}, ["--pretrain_data D/none.jsonl", NO_FILE]),
    Case(
        "no such column of documents",
        {"pretrain_data": "D/prompts.jsonl", "pretrain_key": "t"},
        ["--pretrain_key", "--pretrain_data, row 1", "'t'"],
    ),
]
DRY_RUN = [
    Case(
        "dry run for ranks that cannot share the batch",
        {"dry_run": True, "dry_run_ranks": 3},
        ["--train_batch_size 4", "3 ranks", "use a multiple of 3"],
    ),
    Case("ranks without a dry run", {"dry_run_ranks": 8}, ["--dry_run_ranks", "--dry_run only"]),
    Case("dry run without data", {"dry_run": True, "prompt_data": "D/none.jsonl"}, ["--prompt_data", NO_FILE]),
    Case("dry run without a reward function", {"dry_run": True, "reward_fn": "D/bare.jsonl"}, ["--reward_fn"]),
    Case(
        "dry run without a reward model",
        {"dry_run": True, "reward_fn": None, "reward_pretrain": "M/none"},
        ["--reward_pretrain M/none", "no such local folder"],
    ),
    Case("dry run of SFT without a model", {"dry_run": True, "pretrain": "M/none"}, ["--pretrain M/none"], "train_sft"),
]
MODELS = [
    Case("missing model", {"pretrain": "M/none"}, ["--pretrain M/none", "no such local folder", "Check the path"]),
    Case("folder that is no model", {"pretrain": "M/no_config"}, ["--pretrain M/no_config", "has no config.json"]),
    Case("file as model", {"pretrain": "D/notes.txt"}, ["--pretrain D/notes.txt", "this is a file; give the folder"]),
    Case("broken config", {"pretrain": "M/broken_config"}, ["--pretrain M/broken_config", "its config cannot be read"]),
    Case("unknown kind of model", {"pretrain": "M/unknown_kind"}, ["--pretrain M/unknown_kind", "abacus"]),
    Case("no weights", {"pretrain": "M/config_only"}, ["--pretrain M/config_only", "its weights cannot be read"]),
    Case("broken weights", {"pretrain": "M/broken_weights"}, ["--pretrain M/broken_weights", "Check the folder"]),
    Case(
        "no tokenizer",
        {"pretrain": "M/no_tokenizer"},
        ["--pretrain M/no_tokenizer: its", "no tokenizer files"],
    ),
    Case("reward model as actor", {"pretrain": "M/reward"}, ["--pretrain M/reward", "lacks lm_head.weight", "Give a"]),
    Case("missing reward model", reward_model("none"), ["--reward_pretrain M/none", "Check the path"]),
    Case("reward folder that is no model", reward_model("no_config"), ["--reward_pretrain M/no_config", "config.json"]),
    Case(
        "reward without weights", reward_model("config_only"), ["--reward_pretrain M/config_only", "Check the folder"]
    ),
    Case("reward with broken weights", reward_model("broken_weights"), ["--reward_pretrain M/broken_weights"]),
    Case(
        "reward without head",
        reward_model("headless"),
        ["--reward_pretrain M/headless", "has no scalar head 'score.weight'", "train_rm", "--value_head_prefix"],
    ),
    Case(
        "reward with two labels",
        reward_model("two_labels"),
        ["--reward_pretrain M/two_labels", "several labels", "exactly one", "train_rm"],
    ),
    Case(
        "critic that starts from a reward model with other tokens",
        reward_model("other_vocabulary"),
        ["--reward_pretrain M/other_vocabulary", "another vocabulary than --pretrain M/actor", "--critic_pretrain"],
    ),
    Case(
        "critic with a shorter context",
        {"critic_pretrain": "M/short", "generate_max_len": 8},
        ["The longest prompt has 3 tokens", "8 tokens of --critic_pretrain M/short", "Lower"],
    ),
    Case("missing reference", {"ref_pretrain": "M/none"}, ["--ref_pretrain M/none", "Check the path"]),
    Case(
        "reference with another vocabulary",
        {"ref_pretrain": "M/other_vocabulary"},
        ["--ref_pretrain M/other_vocabulary", "another vocabulary than --pretrain M/actor", "same family"],
    ),
    Case(
        "reference with a short context",
        {"ref_pretrain": "M/short", "generate_max_len": 8},
        ["The longest prompt has 3 tokens", "8 tokens of --ref_pretrain M/short", "Lower"],
    ),
    Case("missing critic", {"critic_pretrain": "M/none"}, ["--critic_pretrain M/none", "Check the path"]),
    Case(
        "critic with two labels", {"critic_pretrain": "M/two_labels"}, ["--critic_pretrain M/two_labels", "exactly one"]
    ),
    Case(
        "critic without weights", {"critic_pretrain": "M/config_only"}, ["--critic_pretrain M/config_only", "Check the"]
    ),
    Case(
        "critic that reads other tokens",
        {"critic_pretrain": "M/other_vocabulary"},
        ["--critic_pretrain M/other_vocabulary", "another vocabulary than --pretrain M/actor", "same family"],
    ),
    Case("flash-attn not installed", {"flash_attn": True, "bf16": True}, ["--flash_attn", "pip install flash-attn"]),
    Case("flash-attn in float32", {"flash_attn": True}, ["--flash_attn needs --bf16"]),
    Case("vllm not installed", {"rollout_engine": "vllm"}, ["--rollout_engine vllm", "pip install openppo[vllm]"]),
    Case(
        "folder cannot be written", {"save_path": "D/notes.txt"}, ["--save_path D/notes.txt", "choose another folder"]
    ),
]
TOKENS = [
    Case(
        f"{command}: PAD without embedding",
        {"pretrain": "M/unresized"},
        ["--pretrain M/unresized: token '[PAD]' has the id 40", "embeddings of 40 ids", "41 tokens. Give the model"],
        command,
    )
    for command in ("train_ppo", "train_sft", "train_rm", "train_prm", "generate", "evaluate")
] + [
    Case("dry run: PAD without embedding", {"pretrain": "M/unresized", "dry_run": True}, ["--pretrain M/unresized:"]),
    Case(
        "a prompt with a token without embedding",
        {"pretrain": "M/tool", "prompt_data": "D/tool.jsonl"},
        ["--pretrain M/tool: token '<tool>' has the id 40", "embeddings of 40 ids"],
    ),
    *(
        Case(
            f"{role} with fewer embeddings",
            {"pretrain": "M/resized", **options},
            [f"--{flag} M/reward_unresized has embeddings of 40 token ids", "--pretrain M/resized samples 41"],
        )
        for role, flag, options in (
            ("reward model", "reward_pretrain", {**reward_model("reward_unresized"), "advantage_estimator": "remax"}),
            ("dry run: reward model", "reward_pretrain", {**reward_model("reward_unresized"), "dry_run": True}),
            ("critic", "critic_pretrain", {"critic_pretrain": "M/reward_unresized"}),
        )
    ),
    Case("serve: no embedding", {"reward_pretrain": "M/reward_unresized"}, ["token '[PAD]' has the id 40"], "serve_rm"),
]
RESCALED = [
    Case(
        f"{command}: rows beyond the context at which positions are rescaled",
        {"pretrain": "M/rescaled"},
        ["context of 3 tokens" if limit == "generate" else "reads 3. Lower --max_len to 3", "what else is in a batch"],
        command,
    )
    for command, limit in (
        *((name, "generate") for name in ("train_ppo", "generate", "evaluate")),
        *((name, "max") for name in ("train_sft", "train_rm", "train_prm")),
    )
]
VERIFIED = {"reward_fn": None, "verifiable_reward": "exact_match", "label_key": "answer"}
REWARDS = [
    Case(
        "missing reward file", {"reward_fn": "D/none.py"}, ["--reward_fn D/none.py", "no such file", "Check the path"]
    ),
    Case("missing function", {"reward_fn": "D/reward.py:f"}, ["--reward_fn", "no function 'f'", "other, reward_fn"]),
    Case("reward file of another kind", {"reward_fn": "D/notes.txt"}, ["--reward_fn D/notes.txt", "path.py:name"]),
    Case("reward that needs more", {"reward_fn": "D/needs.py"}, ["--reward_fn D/needs.py", "'not_there'", "Install"]),
    Case("reward file that exits", {"reward_fn": "D/exits.py"}, ["--reward_fn D/exits.py", "sys.exit()", "Take the"]),
    Case(
        "several reward files", {"reward_fn": "D/reward.py D/f.py"}, ["--reward_fn takes one value", "Leave the others"]
    ),
    Case(
        "reward files with commas", {"reward_fn": "D/reward.py,D/f.py"}, ["--reward_fn D/reward.py,D/f.py", "one file"]
    ),
    Case(
        "weight of no reward",
        {**VERIFIED, "reward_weights": "regex=1"},
        ["--reward_weights names regex", "are reward."],
    ),
    Case("no reward", {"reward_fn": None}, ["--reward_fn", "--reward_pretrain", "pass"]),
    Case("unknown parameter", {"reward_fn": "D/params.py"}, ["--reward_fn D/params.py", "'colour'", "answer, input"]),
    Case("weight that is no number", {"reward_weights": "a=b"}, ["--reward_weights", "NAME=NUMBER"]),
    Case("server that is down", {"reward_fn": None, "remote_rm_url": "http://127.0.0.1:9"}, ["--remote_rm_url"]),
    Case("server without scheme", {"reward_fn": None, "remote_rm_url": "localhost:9/x"}, ["--remote_rm_url", "http"]),
    Case(
        "missing file for the server",
        {"reward_fn": None, "remote_rm_url": "D/none.py"},
        ["--remote_rm_url D/none.py", "Check the path"],
    ),
    Case(
        "missing token file", {"remote_rm_url": "http://127.0.0.1:9", "remote_rm_token_file": "D/none"}, ["token_file"]
    ),
    Case(
        "verifier without label",
        {"verifiable_reward": "exact_match", "prompt_data": "D/bare.jsonl"},
        ["--verifiable_reward", "--label_key"],
    ),
    Case("regex missing", {"verifiable_reward": "regex"}, ["--verifiable_reward regex needs --verify_regex"]),
    Case("bad regex", {"verifiable_reward": "regex", "verify_regex": "("}, ["--verify_regex"]),
    Case("length missing", {"verifiable_reward": "length"}, ["needs --verify_length"]),
    Case("missing PRM", {"prm_pretrain": "M/none"}, ["--prm_pretrain M/none", "Check the path"]),
    Case("PRM without the placeholder", {"prm_pretrain": "M/actor"}, ["--prm_placeholder_token"]),
    Case(
        "PRM without the tokens",
        {"prm_pretrain": "M/actor", "prm_placeholder_token": "x", "prm_reward_tokens": "good bad"},
        ["--prm_reward_tokens"],
    ),
    Case(
        "reward model without statistics",
        {**reward_model("reward"), "normalize_reward": True},
        ["--normalize_reward", "--reward_pretrain M/reward", "train_rm", "--reward_normalizer running"],
    ),
    Case("normalized without model", {"normalize_reward": True}, ["--normalize_reward", "--reward_normalizer running"]),
]
FLAGS_OF_MODELS = [
    *(("train_ppo", flag) for flag in ("pretrain", "reward_pretrain", "critic_pretrain", "prm_pretrain")),
    *((command, "pretrain") for command in ("train_sft", "train_rm", "train_prm", "generate", "evaluate")),
    *(("evaluate", flag) for flag in ("reward_pretrain", "prm_pretrain")),
    ("serve_rm", "reward_pretrain"),
    ("merge_lora", "lora_path"),
]
TRUST = [
    Case(f"{flag} of {command}: {name}", {flag: f"M/{model}", **options}, [f"--{flag} M/{model}: ", says], command)
    for command, flag in FLAGS_OF_MODELS
    for model in ["own_adapters" if command == "merge_lora" else "own_code"]
    for name, options, says in (
        ("own code", {}, "it brings Python code of its own (auto_map in its config)"),
        ("own code, trusted", {"trust_remote_code": True}, "its own code ran"),
    )
] + [
    Case("tokenizer with code", {"pretrain": "M/own_tokenizer"}, ["--pretrain M/own_tokenizer: it brings Python code"]),
    Case(
        "tokenizer with code, trusted",
        {"pretrain": "M/own_tokenizer", "trust_remote_code": True},
        ["--pretrain M/own_tokenizer: its tokenizer cannot be loaded: its own code ran"],
    ),
    Case(
        "reward model's tokenizer with code",
        {"reward_pretrain": "M/own_tokenizer", "reward_fn": None, "advantage_estimator": "reinforce"},
        ["--reward_pretrain M/own_tokenizer: it brings Python code"],
    ),
    Case("pickle", {"pretrain": "M/pickle"}, ["--pretrain M/pickle: its weights are a pickle file", "safetensors"]),
    Case("reward pickle", reward_model("reward_pickle"), ["--reward_pretrain M/reward_pickle: its weights are"]),
    Case("critic pickle", {"critic_pretrain": "M/pickle"}, ["--critic_pretrain M/pickle: its weights are a pickle"]),
    Case("SFT: pickle", {"pretrain": "M/pickle"}, ["--pretrain M/pickle: its weights are a pickle"], "train_sft"),
    Case("RM: pickle", {"pretrain": "M/pickle"}, ["--pretrain M/pickle: its weights are a pickle"], "train_rm"),
    Case("PRM: pickle", {"pretrain": "M/pickle"}, ["--pretrain M/pickle: its weights are a pickle"], "train_prm"),
    Case("generate: pickle", {"pretrain": "M/pickle"}, ["--pretrain M/pickle: its weights are a pickle"], "generate"),
    Case(
        "serve: pickle", {"reward_pretrain": "M/reward_pickle"}, ["--reward_pretrain M/reward_pickle: its"], "serve_rm"
    ),
    Case(
        "password in an address",
        {"reward_fn": None, "remote_rm_url": "http://me:secret@127.0.0.1:9/"},
        ["--remote_rm_url http://***@127.0.0.1:9/: no reward server answers there"],
    ),
]
ALGORITHMS = [
    Case("groups of one", {"advantage_estimator": "rloo"}, ["--advantage_estimator rloo", "--n_samples_per_prompt"]),
    Case("dynamic groups of one", {"dynamic_sampling": True}, ["--dynamic_sampling", "--n_samples_per_prompt"]),
    Case(
        "no critic to freeze the actor for",
        {"advantage_estimator": "reinforce", "freezing_actor_steps": 2},
        ["--freezing_actor_steps", "--advantage_estimator reinforce has none", "leave it out"],
    ),
    Case(
        "no critic to pretrain",
        {"advantage_estimator": "remax", "value_pretrain_steps": 2},
        ["--value_pretrain_steps", "leave it out"],
    ),
    Case(
        "no critic to save",
        {"advantage_estimator": "reinforce", "save_value_network": True},
        ["--save_value_network", "leave it out"],
    ),
    Case(
        "no critic to load",
        {"advantage_estimator": "reinforce", "critic_pretrain": "M/reward"},
        ["--critic_pretrain", "leave it out"],
    ),
    Case("KL loss of k1", {"use_kl_loss": True}, ["--use_kl_loss", "Use --kl_estimator k2 or k3"]),
    Case("target without KL", {"kl_target": 1, "init_kl_coef": 0}, ["--kl_target", "positive one"]),
    Case("dual clip below one", {"dual_clip": 0.5}, ["--dual_clip must be above 1"]),
    Case("correction of nothing", {"rollout_correction_high": 2}, ["--rollout_correction_high", "choose tis, mis"]),
    Case("overlong buffer", {"overlong_buffer_len": 9}, ["--overlong_buffer_len 9", "--generate_max_len 8"]),
    Case("evaluation of nothing", {"eval_before_training": True}, ["--eval_before_training needs --eval_data"]),
    Case("missing held-out prompts", {"eval_data": "D/none.jsonl"}, ["--eval_data D/none.jsonl", NO_FILE]),
    Case("greedy samples", {"eval_n_samples_per_prompt": 4}, ["--eval_n_samples_per_prompt 4", "--eval_temperature"]),
    Case("unknown target", {"lora_rank": 2, "target_modules": "nothing"}, ["--target_modules nothing"]),
    Case(
        "4 bits under ZeRO-3", {"lora_rank": 2, "load_in_4bit": True, "zero_stage": 3}, ["--load_in_4bit", "0, 1 or 2"]
    ),
    Case("4 bits without LoRA", {"load_in_4bit": True}, ["--load_in_4bit", "--lora_rank"]),
    Case("zpg without ZeRO-3", {"zpg": 2}, ["--zpg 2", "--zero_stage 3"]),
]
SHAPES = [
    Case(
        "unknown columns",
        {"prompt_data": "D/strange.jsonl"},
        ["--prompt_data D/strange.jsonl", "--input_key", "foo, bar"],
    ),
    Case("shape that does not fit", {"data_format": "alpaca"}, ["alpaca", "'instruction'", "input, answer"]),
    Case("shares", {"prompt_data_probs": "0.5,0.5"}, ["--prompt_data_probs", "each of the 1 sources"]),
    Case("name missing between commas", {"prompt_data": "D/prompts.jsonl,"}, ["--prompt_data", "empty name"]),
    Case("loader without name", {"dataset_class": "D/loader.py"}, ["--dataset_class D/loader.py", "path.py:name"]),
    Case("missing loader", {"dataset_class": "D/none.py:rows"}, ["--dataset_class D/none.py:rows", "Check the path"]),
    Case("loader of another name", {"dataset_class": "D/loader.py:f"}, ["--dataset_class", "'f'", "rows"]),
    Case("loader that gives a number", {"dataset_class": "D/loader.py:rows"}, ["--dataset_class", "gave int"]),
    Case("loader that gives texts", {"dataset_class": "D/loader.py:texts"}, ["--dataset_class", "rows of str"]),
    Case("loader that gives nothing", {"dataset_class": "D/loader.py:none"}, ["--dataset_class", "gave no rows"]),
]
TOOLS = [
    Case("PRM: no placeholder", {"placeholder_token": "none"}, ["--placeholder_token 'none'"], "train_prm"),
    Case("PRM: reward tokens", {"reward_tokens": "good bad"}, ["--reward_tokens"], "train_prm"),
    Case("PRM: one token twice", {"reward_tokens": "y y"}, ["--reward_tokens", "two different"], "train_prm"),
    Case("PRM: strange rows", {"dataset": "D/strange.jsonl"}, ["--dataset", "--input_key", "foo, bar"], "train_prm"),
    Case("PRM: a step unjudged", {"dataset": "D/uneven_steps.jsonl"}, ["--dataset", "row 1", "2 steps"], "train_prm"),
    Case("generate: missing model", {"pretrain": "M/none"}, ["--pretrain M/none", "Check the path"], "generate"),
    Case("generate: missing prompts", {"prompt_data": "D/none.jsonl"}, ["--prompt_data D/none.jsonl"], "generate"),
    Case("generate: folder", {"output_path": "D/notes.txt/o.jsonl"}, ["--output_path D/notes.txt/o.jsonl"], "generate"),
    Case("generate: greedy samples", {"n_samples_per_prompt": 2}, ["raise --temperature"], "generate"),
    Case("generate: context", {"generate_max_len": 99}, ["--generate_max_len 99", "Lower"], "generate"),
    Case("evaluate: no reward", {"reward_fn": None}, ["No reward is given", "--reward_fn"], "evaluate"),
    Case("evaluate: missing reward", {"reward_fn": "D/none.py"}, ["--reward_fn D/none.py", "Check"], "evaluate"),
    Case("evaluate: missing model", {"pretrain": "M/none"}, ["--pretrain M/none", "Check the path"], "evaluate"),
    Case("merge: no adapters", {}, ["--lora_path M/actor", "adapter_config.json"], "merge_lora"),
    Case("merge: missing", {"lora_path": "M/none"}, ["--lora_path M/none"], "merge_lora"),
    Case("merge: into itself", {"save_path": "M/actor"}, ["--save_path", "--lora_path"], "merge_lora"),
    Case("serve: missing model", {"reward_pretrain": "M/none"}, ["--reward_pretrain M/none"], "serve_rm"),
    Case("serve: no head", {"reward_pretrain": "M/headless"}, ["--reward_pretrain M/headless", "head"], "serve_rm"),
    Case("serve: everyone", {"host": "0.0.0.0"}, ["--host 0.0.0.0", "--token_file"], "serve_rm"),
    Case("serve: no token file", {"token_file": "D/none"}, ["--token_file D/none"], "serve_rm"),
    Case("serve: empty token", {"token_file": "D/empty.jsonl"}, ["--token_file D/empty.jsonl"], "serve_rm"),
    Case("serve: port", {"port": 99999}, ["--port"], "serve_rm"),
]
OTHER_FLAGS = [pair for pairs in FLAGS_OF_TASK.values() for pair in pairs][1:]
BROKEN_FILES = [
    Case(f"{flag} of {command}: {name}", {flag: f"D/{path}"}, [f"--{flag} D/{path}{says}"], command)
    for i, (name, (_, says)) in enumerate(DATA_FILES.items())
    for command, flag in (("train_ppo", "prompt_data"), OTHER_FLAGS[i % len(OTHER_FLAGS)])
    for path in [name.split("/")[0]]
]
"""Each file with --prompt_data of train_ppo and, in turn, with one of the others."""
PAIRS_WITH_MARGIN = {"dataset": "D/pairs_one.jsonl", "margin_key": "margin"}
BROKEN_ROWS = [
    Case(
        f"{flag} of {command}: {name}",
        (PAIRS_WITH_MARGIN if task == "pairs" else {}) | {flag: f"D/{bad_row_file(task, name)}"},
        [f"--{flag}, row 2 of D/{bad_row_file(task, name)} (line 3): ", says],
        command,
    )
    for task, name, _, says in BAD_ROWS
    for command, flag in FLAGS_OF_TASK[task]
]
OPTIONS = [
    Case(
        "steps that do not divide the samples",
        {"train_batch_size": 3},
        ["--train_batch_size 3", "--rollout_batch_size 4 x --n_samples_per_prompt 1", "make"],
    ),
    Case("offload without ZeRO", {"adam_offload": True, "zero_stage": 0}, ["--adam_offload", "use --zero_stage 1"]),
    Case("switch with a value", {"bf16": "true"}, ["--bf16", "use --bf16 or --no_bf16"]),
    Case("unknown flag", {"gama": 0.9}, ["--gama", "did you mean --gamma?"]),
    Case("missing config file", {"config": "D/none.yaml"}, ["--config D/none.yaml", "No such file"]),
    Case("config that is a list", {"config": "D/list.yaml"}, ["--config D/list.yaml", "option: value"]),
    Case("unknown option in config", {"config": "D/bad.yaml"}, ["--config D/bad.yaml", "did you mean gamma?"]),
]
SUPERVISED = [
    Case("SFT: no input", {"input_key": "q"}, ["--input_key", "--dataset, row 1", "input, output"], "train_sft"),
    Case("SFT: no output", {"output_key": "o"}, ["--output_key", "--dataset, row 1", "input, output"], "train_sft"),
    Case("SFT: empty file", {"dataset": "D/empty.jsonl"}, ["--dataset D/empty.jsonl", "Choose"], "train_sft"),
    Case("SFT: all too long", {"max_len": 3}, ["--max_len 3", "shortest has 6", "Raise"], "train_sft"),
    Case(
        "SFT: beyond the context",
        {"dataset": "D/long.jsonl"},
        ["--max_len 512: the longest row has 72 tokens", "--pretrain M/actor reads 64. Lower --max_len to 64"],
        "train_sft",
    ),
    Case("SFT: missing held-out", {"eval_dataset": "D/none.jsonl"}, ["--eval_dataset D/none.jsonl"], "train_sft"),
    Case("SFT: held-out of no shape", {"eval_dataset": "D/strange.jsonl"}, ["--eval_dataset", "foo, bar"], "train_sft"),
    Case("SFT: missing model", {"pretrain": "M/none"}, ["--pretrain M/none", "Check the path"], "train_sft"),
    Case("SFT: reward model", {"pretrain": "M/reward"}, ["--pretrain M/reward", "lm_head.weight"], "train_sft"),
    Case("SFT: flag of PPO", {"gamma": 1}, ["--gamma"], "train_sft"),
    Case("RM: no chosen", {"chosen_key": "c"}, ["--chosen_key", "--dataset, row 1", "prompt, chosen"], "train_rm"),
    Case("RM: no rejected", {"rejected_key": "r"}, ["--rejected_key", "--dataset, row 1"], "train_rm"),
    Case("RM: no prompt", {"prompt_key": "p"}, ["--prompt_key", "--dataset, row 1"], "train_rm"),
    Case("RM: margin is no number", {"margin_key": "margin"}, ["--margin_key", "row 1", "'much'"], "train_rm"),
    Case("RM: empty file", {"dataset": "D/empty.jsonl"}, ["--dataset D/empty.jsonl", "Choose"], "train_rm"),
    Case("RM: all too long", {"max_len": 2}, ["--max_len 2", "shortest has", "Raise"], "train_rm"),
    Case("RM: two labels", {"pretrain": "M/two_labels"}, ["--pretrain M/two_labels", "exactly one"], "train_rm"),
    Case("RM: no weights", {"pretrain": "M/config_only"}, ["--pretrain M/config_only", "Check the"], "train_rm"),
    Case(
        "RM: log-exp with margin",
        {"margin_key": "margin", "loss": "logexp"},
        ["--margin_key works with --loss sigmoid only"],
        "train_rm",
    ),
]
IN_PROCESS = [
    *(DATA + BROKEN_FILES + BROKEN_ROWS + DRY_RUN + MODELS + TOKENS + RESCALED + TRUST),
    *(REWARDS + ALGORITHMS + SHAPES + OPTIONS + SUPERVISED + TOOLS),
]
PROCESSES = [
    next(case for case in IN_PROCESS if case.name == name)
    for name in ("missing data file", "reward without head", "unknown flag", "no reward", "RM: no chosen")
] + [
    Case(
        "ranks and steps",
        {"rollout_batch_size": 5, "train_batch_size": 5},
        ["--train_batch_size 5", "2 ranks"],
        ranks=2,
    ),
    Case(
        "ranks and prompts", {"rollout_batch_size": 5, "n_samples_per_prompt": 4}, ["--rollout_batch_size 5"], ranks=2
    ),
    Case("ranks and head", reward_model("headless"), ["--reward_pretrain M/headless", "scalar head"], ranks=2),
    Case("ranks and file", {"dataset": "D/none.jsonl"}, ["--dataset D/none.jsonl"], "train_sft", ranks=2),
    Case("rank that leaves", {"reward_fn": "D/leaves.py"}, ["--reward_fn D/leaves.py", "os._exit(0)", "Take"], ranks=1),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``FILES``."""
    folder = tmp_path_factory.mktemp("data")
    contents = FILES | {name: content for name, (content, _) in DATA_FILES.items()}
    for task, name, row, _ in BAD_ROWS:
        contents[bad_row_file(task, name)] = f"{json.dumps(GOOD_ROWS[task])}\n\n{json.dumps(row)}\n"
    contents |= {f"{task}_one.jsonl": json.dumps(row) for task, row in GOOD_ROWS.items()}
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_no_table_of_cases_is_left_out() -> None:
    run = {id(case) for case in IN_PROCESS + PROCESSES}
    tables = {name: table for name, table in globals().items() if isinstance(table, list) and name.isupper()}
    cases = {(name, case.name): id(case) for name, table in tables.items() for case in table if isinstance(case, Case)}
    assert [case for case, identity in cases.items() if identity not in run] == []


@pytest.mark.parametrize("case", IN_PROCESS, ids=lambda case: case.name)
def test_a_mistake_ends_in_one_line_with_flag_and_remedy(
    case: Case, run_in_process: RunCommand, models: Path, data: Path
) -> None:
    ended = run_in_process(case.command, *case.arguments(models, data))
    case.check(ended.code, ended.stderr, models, data)


def test_a_dry_run_ends_with_status_0_before_any_weight_is_read(
    run_in_process: RunCommand, models: Path, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "openppo.strategy.deepspeed.DeepspeedStrategy.close", lambda self: None
    )  # others need the group
    loaded: list[str] = []
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: loaded.append("weights"))
    for command in ("train_ppo", "train_sft", "train_rm", "train_prm"):
        case = Case("", {"dry_run": True, "dry_run_ranks": 4, "dry_run_memory": 80}, [], command)
        ended = run_in_process(command, *case.arguments(models, data))
        assert ended.code == 0, ended.stderr
        for part in ("memory of each of 4 ranks", "training", "fits into 80.0 GiB", "checkpoint"):
            assert part in ended.stderr
    assert loaded == []
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize(
    ("command", "options", "roles"),
    [
        (
            "train_ppo",
            {"reward_fn": None, "reward_pretrain": "M/reward"},
            ["reward model", "critic", "actor", "reference"],
        ),
        ("train_sft", {}, ["model"]),
        ("train_rm", {}, ["model"]),
        ("train_prm", {}, ["model"]),
    ],
)
def test_every_start_says_what_each_model_takes_before_one_is_loaded(
    command: str,
    options: dict[str, Any],
    roles: list[str],
    run_in_process: RunCommand,
    models: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: sys.exit(0))
    ended = run_in_process(command, *Case("", options, [], command).arguments(models, data))
    (line,) = [line for line in ended.stderr.splitlines() if "estimated memory: " in line]
    places = [line.index(f"{role} 0 MiB") for role in roles]
    assert places == sorted(places)
    assert "at most 0 MiB, in " in line


def test_without_a_mistake_every_command_reaches_its_training(
    run_in_process: RunCommand, models: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trainer in ("ppo.PPOTrainer", "supervised.loop.SupervisedTrainer"):
        monkeypatch.setattr(f"openppo.trainer.{trainer}.fit", lambda self: sys.exit(0))
    for command in ("train_ppo", "train_sft", "train_rm", "train_prm"):
        ended = run_in_process(command, *Case("", {}, [], command).arguments(models, data))
        assert ended.code == 0


@pytest.mark.parametrize(
    ("command", "task"), [("train_ppo", "prompts"), ("train_sft", "sft"), ("train_rm", "pairs"), ("train_prm", "steps")]
)
def test_one_row_is_enough_to_train_on(
    command: str, task: str, run_in_process: RunCommand, models: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trainer in ("ppo.PPOTrainer", "supervised.loop.SupervisedTrainer"):  # the process group must stay
        monkeypatch.setattr(f"openppo.trainer.{trainer}.close", lambda self: sys.exit(0))
    flag = "prompt_data" if task == "prompts" else "dataset"
    ended = run_in_process(command, *Case("", {flag: f"D/{task}_one.jsonl"}, [], command).arguments(models, data))
    assert ended.code == 0
    assert Path("ckpt/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"gamma": "high"}, "--gamma"), ({"zero_stage": 5}, "--zero_stage"), ({"pretrain": None}, "--pretrain")],
)
def test_a_value_of_the_wrong_kind_or_a_missing_flag_is_named_in_a_box(
    options: dict[str, Any], flag: str, run_in_process: RunCommand, models: Path, data: Path
) -> None:
    ended = run_in_process("train_ppo", *Case("", options, []).arguments(models, data))
    assert ended.code == 2
    assert flag in ended.stderr
    assert "Traceback" not in ended.stderr


# Processes of their own


@pytest.mark.parametrize("case", PROCESSES, ids=lambda case: case.name)
def test_a_mistake_in_a_run_of_its_own_ends_in_one_line_with_flag_and_remedy(
    case: Case, launcher: Launcher, models: Path, data: Path, tmp_path: Path
) -> None:
    words = ["-m", f"openppo.cli.{case.command}", *case.arguments(models, data)]
    ended = launcher.run(words, case.ranks, cwd=tmp_path, separate=True, real=case.name == "ranks and head")
    case.check(ended.returncode, ended.stderr, models, data)
    assert ended.stdout == ""
