"""OpenRLHF 0.6.1 as a participant, the last release with PPO on one node without Ray, made to run on a CPU.

ray, flash_attn and torch.cuda are stubs, and FusedAdam is torch.optim.AdamW. Generation is its generate_samples(),
experience the rest of make_experience_list(), training its ppo_train().
"""

import argparse
import importlib.machinery
import os
import runpy
import socket
import sys
import tempfile
import time
import types
from contextlib import suppress
from typing import Any

import turns

os.environ["DS_ACCELERATOR"] = "cpu"


def describe_group_of_one() -> None:
    """To its process group, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )


class _NoTurnLeftError(Exception):
    """Leaves the trainer's loop."""


def stub(name: str, **attributes: Any) -> types.ModuleType:
    """A module of that name, to import."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(attributes, __version__="0.0")
    sys.modules[name] = module
    return module


def _absent(*_: Any, **__: Any) -> None:
    raise RuntimeError("a stub of the CPU benchmark was called")


def _undecorated(*args: Any, **_: Any) -> Any:
    return args[0] if args and callable(args[0]) else lambda function: function


def stub_gpu_packages() -> None:
    """What its modules import and a CPU has no use for."""
    flash, utils = stub("flash_attn"), stub("flash_attn.utils")
    flash.utils = utils  # type: ignore[attr-defined]
    utils.distributed = stub("flash_attn.utils.distributed", all_gather=_absent)  # type: ignore[attr-defined]
    padding = ("index_first_axis", "pad_input", "unpad_input", "rearrange")
    flash.bert_padding = stub("flash_attn.bert_padding", **dict.fromkeys(padding, _absent))  # type: ignore[attr-defined]
    stub("ray", remote=_undecorated, get=_absent, put=_absent, is_initialized=lambda: False)
    for name in ("ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        stub(name, placement_group=_absent, PlacementGroupSchedulingStrategy=object)
    stub("ray.actor", ActorHandle=object)
    import transformers

    transformers.utils.import_utils._flash_attn_available = False  # type: ignore[attr-defined]
    transformers.utils.is_flash_attn_2_available = lambda: False


def move_cuda_to_cpu() -> None:
    """Calls that name a CUDA device mean the CPU."""
    import torch

    torch.cuda.current_device = lambda: 0
    for name in ("empty_cache", "synchronize", "set_device", "manual_seed_all"):
        setattr(
            torch.cuda, name, lambda *_, **__: None
        )  # one each: torch's compiler has rules by function

    def on_cpu(device: Any) -> Any:
        named = isinstance(device, str) and device.startswith("cuda")
        cuda = isinstance(device, torch.device) and device.type == "cuda"
        return torch.device("cpu") if isinstance(device, int) or named or cuda else device

    def redirect(kind: Any) -> None:
        original = kind.to

        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            args = (on_cpu(args[0]), *args[1:]) if args else args
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            return original(self, *args, **kwargs)

        kind.to = to

    redirect(torch.Tensor)
    redirect(torch.nn.Module)


def replace_fused_adam() -> None:
    """DeepSpeed's fused Adam is CUDA's."""
    import openrlhf.utils.deepspeed.deepspeed as strategy
    import torch

    strategy.FusedAdam = strategy.DeepSpeedCPUAdam = torch.optim.AdamW
    train_config = strategy.get_train_ds_config

    def allowing_adamw(*args: Any, **kwargs: Any) -> dict[str, Any]:
        allowed = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        return train_config(*args, **kwargs) | allowed

    strategy.get_train_ds_config = allowing_adamw
    # on GPUs too, 0.6.1 reads these arguments, which only its Ray command has
    argparse.Namespace.vllm_enable_sleep = False  # type: ignore[attr-defined]
    argparse.Namespace.packing_samples = False  # type: ignore[attr-defined]


def take_turns(clock: turns.Turns) -> None:
    """A turn ends with the trainer's ppo_train()."""
    from openrlhf.trainer.ppo_trainer import PPOTrainer
    from openrlhf.trainer.ppo_utils.experience_maker import NaiveExperienceMaker

    generate, make, train = (
        NaiveExperienceMaker.generate_samples,
        NaiveExperienceMaker.make_experience_list,
        PPOTrainer.ppo_train,
    )
    seen: dict[str, float] = {}

    def timed_generation(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        samples = generate(*args, **kwargs)
        seen["generation"] = time.perf_counter() - start
        seen["tokens"] = int(sum(sample.action_mask.sum() for sample in samples))
        return samples

    def timed_experience(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        experiences = make(*args, **kwargs)
        seen["experience"] = time.perf_counter() - start - seen["generation"]
        return experiences

    def timed_training(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        status = train(*args, **kwargs)
        clock.report(training=time.perf_counter() - start, **seen)
        if not clock.wait():
            raise _NoTurnLeftError
        return status

    NaiveExperienceMaker.generate_samples = timed_generation
    NaiveExperienceMaker.make_experience_list = timed_experience
    PPOTrainer.ppo_train = timed_training


def command(arguments: Any, folder: str) -> list[str]:
    """The command line of its train_ppo."""
    models = arguments.assets / arguments.workload
    options = {
        "pretrain": models / "policy",
        "reward_pretrain": models / "reward",
        "critic_pretrain": models / "reward",
        "prompt_data": arguments.assets / "prompts.jsonl",
        "input_key": "input",
        "rollout_batch_size": turns.BATCH,
        "micro_rollout_batch_size": arguments.rollout_micro,
        "train_batch_size": turns.BATCH,
        "micro_train_batch_size": turns.MICRO_TRAIN_BATCH,
        "max_epochs": 1,
        "num_episodes": 100,  # ends with the turns
        "prompt_max_len": 64,
        "generate_max_len": turns.NEW_TOKENS[arguments.workload],
        "zero_stage": 2,
        "actor_learning_rate": 1e-6,
        "critic_learning_rate": 1e-6,
        "init_kl_coef": 0.05,
        "save_path": folder,
        "ckpt_path": f"{folder}/checkpoints",
    }
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["train_ppo", *given, *(["--bf16"] if arguments.dtype == "bf16" else [])]


def main() -> None:
    """Load, then take turns."""
    parser = turns.options(__doc__)
    parser.add_argument("--rollout_micro", type=int, default=8, help="its micro_rollout_batch_size")
    arguments = parser.parse_args()
    clock = turns.Turns()

    import torch
    import transformers

    turns.use_threads()
    describe_group_of_one()
    stub_gpu_packages()
    move_cuda_to_cpu()
    import deepspeed
    from openrlhf.trainer.ppo_trainer import PPOTrainer

    replace_fused_adam()
    take_turns(clock)
    fit = PPOTrainer.fit

    def fit_in_turns(*args: Any, **kwargs: Any) -> None:  # everything is loaded when it is called
        clock.ready(
            openrlhf="0.6.1",
            torch=torch.__version__,
            transformers=transformers.__version__,
            deepspeed=deepspeed.__version__,
        )
        if clock.wait():
            fit(*args, **kwargs)

    PPOTrainer.fit = fit_in_turns
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = command(arguments, folder)
        with suppress(_NoTurnLeftError):
            runpy.run_module("openrlhf.cli.train_ppo", run_name="__main__")


if __name__ == "__main__":
    main()
