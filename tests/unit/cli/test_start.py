"""What commands settle when they start: for GPUs, tried on CPUs, and the watchdog around them."""

import logging
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from openppo.config import DeepSpeedConfig, RunConfig
from openppo.strategy import comm
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.deepspeed import DeepspeedStrategy


@pytest.mark.parametrize("command", ["ppo", "sft", "rm", "prm", "generate", "evaluate", "serve_rm"])
def test_cudnn_attention_is_off_when_models_are_loaded(command, run_line):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)  # as torch has it at the start of a process
    model = "--reward_pretrain" if command == "serve_rm" else "--pretrain"
    assert "its weights cannot be read" in run_line(f"{command} {model} M/broken_weights").stderr
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize("bf16", [False, True])
def test_float32_on_a_gpu_is_named_with_its_remedy(bf16, monkeypatch, caplog):
    DeepspeedStrategy(DeepSpeedConfig(bf16=bf16))
    InferenceStrategy(bf16)
    with caplog.at_level(logging.INFO, logger="openppo"):
        comm.set_up_gpu(bf16)
        assert caplog.records == [], "on a CPU"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        comm.set_up_gpu(bf16)
    assert ["--bf16" in record.getMessage() for record in caplog.records] == (
        [] if bf16 else [True]
    )


@pytest.mark.parametrize(
    ("line", "heartbeat", "stall"),
    [("serve_rm", 45.0, 0.0), ("sft --heartbeat_timeout 30", 30.0, 2700.0)],
)
def test_only_training_can_stall(line, heartbeat, stall, run_line, monkeypatch):
    def watch(
        limits: RunConfig, where: object, options: object, how_to_resume: Callable[[], str]
    ) -> None:
        assert (limits.heartbeat_timeout, limits.stall_timeout) == (heartbeat, stall)
        sys.exit(7)

    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog", watch)
    assert run_line(line).code == 7


RESUME = "the same command with --load_checkpoint resumes from the newest checkpoint"


@pytest.mark.parametrize(
    ("line", "step", "has_checkpoint", "line_of_report"),
    [
        ("serve_rm", 0, False, ""),
        ("sft", 3, False, ""),
        ("sft", 3, True, RESUME),
        ("ppo", 3, True, RESUME),
        ("ppo", 0, True, ""),  # of an earlier run, which this one would have moved
        ("ppo --load_checkpoint", 0, True, RESUME),
    ],
)
def test_a_report_offers_to_resume_only_from_a_checkpoint_of_the_run(
    line, step, has_checkpoint, line_of_report, run_line, monkeypatch, tmp_path
):
    def watch(
        limits: object, where: object, options: object, how_to_resume: Callable[[], str]
    ) -> None:
        assert how_to_resume() == line_of_report
        sys.exit(7)

    command = line.split()[0]
    if has_checkpoint:
        (tmp_path / f"ckpt/checkpoints_{command}/latest").mkdir(parents=True)
    monkeypatch.setattr("openppo.strategy.watchdog.Watchdog", watch)
    monkeypatch.setattr("openppo.tracking.phase.current.step", step)
    assert run_line(line).code == 7


@pytest.mark.parametrize("command", ["ppo", "sft", "rm", "prm", "generate", "evaluate", "serve_rm"])
@pytest.mark.parametrize("flaw", ["--lod_checkpoint 1", "--{model} M/headless/config.json"])
def test_errors_before_training_are_written_for_the_launcher(
    command, flaw, run_line, monkeypatch, tmp_path
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    model = "reward_pretrain" if command == "serve_rm" else "pretrain"
    ended = run_line(f"{command} {flaw.replace('{model}', model)}")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=ended.code, error_file=str(file))
    summary = ChildFailedError("command", {0: failure}).format_msg()
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert f"  traceback : {line.removeprefix('error: ')}\n" in summary


@pytest.mark.parametrize("line", ["ppo", "sft"])
def test_out_of_memory_the_watch_can_say_what_each_model_takes(line, run_line, monkeypatch):
    for trainer in ("ppo.PPOTrainer", "supervised.loop.SupervisedTrainer"):
        monkeypatch.setattr(f"openppo.trainer.{trainer}.fit", lambda self: sys.exit(0))
    watch = Mock()
    monkeypatch.setattr(
        "openppo.strategy.watchdog.Watchdog", lambda *given, how_to_resume: nullcontext(watch)
    )
    assert run_line(line).code == 0
    (explain,) = watch.explain_memory_with.call_args.args
    explained = "\n".join(line for _, line in explain("training"))
    assert re.search(r"(actor|model) 0 MiB", explained), explained


@pytest.mark.parametrize(
    ("line", "roles"),
    [
        ("ppo --reward_pretrain M/reward", {"actor", "critic", "reference", "reward model"}),
        ("sft", {"model"}),
        ("rm", {"reward model"}),
    ],
)
def test_each_model_goes_without_padding_where_it_can(line, roles, run_line, monkeypatch):
    tried: list[str] = []
    for module in ("build.models", "build.supervised", "rewards.build"):
        monkeypatch.setattr(
            f"openppo.{module}.pack_where_exact", lambda *given, name: tried.append(name)
        )
    for trainer in ("ppo.PPOTrainer", "supervised.loop.SupervisedTrainer"):
        monkeypatch.setattr(f"openppo.trainer.{trainer}.fit", lambda self: sys.exit(0))
    assert run_line(line).code == 0
    assert set(tried) == roles


SHOWS_ALLOCATOR = """
import sys, torch
from openppo.cli.options import run_command
from openppo.config import TrainPPOConfig

def build(config):
    print(f"allocator: {torch._C._accelerator_getAllocatorSettings()}.")
    sys.exit()

run_command(TrainPPOConfig, "__main__:build")
"""


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ("hf", {}, "expandable_segments:True"),
        ("vllm", {}, ""),
        ("hf", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("hf", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
    ],
)
def test_torch_reads_growing_segments_unless_others_decide(
    engine, given, expected, launcher, monkeypatch
):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    flags = f"--pretrain m --prompt_data d --reward_fn f --rollout_engine {engine}".split()
    done = launcher.run(["-c", SHOWS_ALLOCATOR, *flags], **given)
    assert f"allocator: {expected}." in done.stdout, done.stdout


LEAVES_A_THREAD = """
import sys, threading, time
from types import SimpleNamespace
from openppo.cli.options import run_command
from openppo.config import TrainPPOConfig

def fit():
    print("done")
    ENDING

def build(config):
    threading.Thread(target=time.sleep, args=[1000]).start()
    return SimpleNamespace(fit=fit, close=lambda: None)

run_command(TrainPPOConfig, "__main__:build")
"""


@pytest.mark.parametrize(
    ("ending", "status", "says"),
    [
        ("pass", 0, "done"),
        ("sys.exit()", 0, "done"),
        ("sys.exit(7)", 7, "done"),
        ("sys.exit('no more')", 1, "no more"),
    ],
)
def test_a_command_waits_for_no_thread_of_its_users(ending, status, says, launcher):
    words = [
        "-c",
        LEAVES_A_THREAD.replace("ENDING", ending),
        *"--pretrain m --prompt_data d --reward_fn f".split(),
    ]
    done = launcher.run(words, timeout=60)
    assert (done.returncode, says in done.stdout) == (status, True), done.stdout
