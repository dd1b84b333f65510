"""DeepspeedStrategy: from modules to engines that share one process group under ZeRO."""

import logging
import math
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

os.environ.setdefault("DS_LOG_LEVEL", "warning")
if not torch.cuda.is_available():
    # Set before the import, whose search for devices is slow and noisy.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.runtime import compiler as ds_compiler
from transformers import PreTrainedModel, get_scheduler
from transformers.integrations import HfDeepSpeedConfig

from openppo import logger
from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy.comm import InferenceStrategy, collective
from openppo.strategy.compilation import (
    compile_layers,
    compiles_by_default,
    missing_compiler,
    missing_tool,
    obstacle,
)
from openppo.strategy.cpu_adam import load_cpu_adam
from openppo.strategy.determinism import fixed_order, prepare_fixed_order
from openppo.strategy.ds_config import eval_config, merge, train_config
from openppo.strategy.gradient_norm import join_gradient_norms
from openppo.strategy.launches import LaunchWatch
from openppo.strategy.saving import save_model, save_tokenizer
from openppo.strategy.trainable_model import TrainableModel, adapted_layers

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
# An extra for inference that DeepSpeed would compile at start-up; on a GPU this lookup would probe all operators.
if not torch.cuda.is_available():
    deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
# DeepSpeed imports Muon with every other optimizer; compiling it takes a second of CPU at the start of each rank.
ds_compiler.compile = lambda: ds_compiler.dummy_decorator
# DeepSpeed calls collectives that torch 2.13 renames; a user could do nothing about the warnings.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

_SHARE_FOR_WEIGHTS = 0.5
"""Share of the free GPU memory for weights; the rest is for the cache and activations of generation."""


class DeepspeedStrategy(InferenceStrategy):
    """All models of a run in one process group: gloo on CPUs, nccl on GPUs.

    ``overrides`` is merged into the DeepSpeed configurations made from our options. The last ``rollout_ranks`` of the
    launch are not in the process group.
    """

    def __init__(
        self,
        config: DeepSpeedConfig,
        timeout: timedelta = timedelta(hours=1),
        overrides: dict[str, Any] | None = None,
        rollout_ranks: int = 0,
    ) -> None:
        config.validate()
        if config.deterministic:
            prepare_fixed_order()
        super().__init__(config.bf16, timeout, rollout_ranks, fused_kernels=config.fused_kernels)
        deepspeed.init_distributed(dist_init_required=False, verbose=False)

        self.config = config
        self.overrides = overrides or {}
        if self.comm.world_size % config.zpg != 0:
            raise ValueError(
                f"zpg {config.zpg} does not divide the {self.comm.world_size} ranks: use a divisor."
            )

        self.zero_stage = config.zero_stage
        if config.bf16 and config.zero_stage == 0:
            self.zero_stage = 1
            reason = "where DeepSpeed begins to accumulate bf16 gradients in float32"
            logger.info(
                "--bf16 with --zero_stage 0: optimizer states are partitioned as with --zero_stage 1, %s.",
                reason,
            )

        self.compiles = config.compile == "on" or self._compiles_by_default()
        if config.compile == "on" and self.device.type == "cpu":
            logger.info(
                "--compile gains a few percent on CPUs, or loses them: compare time/training_s with and without."
            )

        self._prepared: list[TrainableModel] = []
        self._launches = LaunchWatch(torch.cuda.synchronize if self.device.type == "cuda" else None)
        self.seed_everything(config.seed)

    def seed_everything(self, seed: int) -> None:
        """Seed Python, NumPy and torch alike on every rank, so that fresh weights are equal."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def seed_per_rank(self) -> None:
        """Give each rank its own stream of random numbers; call it after creating the models."""
        self.seed_everything(self.config.seed + 1 + self.comm.rank)

    def training(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward passes of training."""
        return fixed_order() if self.config.deterministic else nullcontext()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load models in partitions under ZeRO-3, and straight to a GPU below it.

        All ranks enter together. transformers learns of the partitions from an object that must stay alive. DeepSpeed
        can make the groups of ``zpg`` only once in a process, so with ``zpg`` the models are loaded whole.
        """
        if self.zero_stage < 3:
            with super().loading():
                yield
            return

        partitions = None
        if self.config.zpg == 1:
            partitions = HfDeepSpeedConfig(merge(eval_config(self.config.bf16), self.overrides))
        yield
        del partitions

    def prepare(
        self, module: nn.Module, adam: AdamConfig, learning_rate: float, total_steps: int
    ) -> TrainableModel:
        """Wrap a module to train its parameters with ``requires_grad`` by AdamW for ``total_steps`` steps."""
        if self.config.gradient_checkpointing:
            _enable_gradient_checkpointing(module)
        if self.compiles:
            self._compile_layers(module)
        self.fuse(module.to(self.device))

        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = self._adam(trained, adam, learning_rate)
        scheduler = learning_rate_schedule(optimizer, adam, total_steps)

        on_gpu = self.device.type == "cuda"
        options = train_config(
            self.config,
            self.zero_stage,
            n_trained=sum(_numel(p) for p in trained),
            n_ranks=self.comm.world_size,
            on_gpu=on_gpu,
        )
        config = merge(options, self.overrides)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
            # Without this, each parameter would get views of Adam's moments, which only DeepSpeed's own checkpoints
            # need. The views would keep the GPU memory of offloaded moments occupied.
            engine.optimizer._hp_optimizer_states_linked = True
        if self.zero_stage in (1, 2):
            join_gradient_norms(engine.optimizer, on_gpu=on_gpu)

        model = TrainableModel(engine, scheduler, self.uncompiled, launches=self._launches)
        self._prepared.append(model)
        return model

    def prepare_frozen(self, module: nn.Module) -> nn.Module:
        """Return ``module`` for evaluation only: on the device, in the run's dtype, partitioned only under ZeRO-3."""
        if self.config.bf16:
            # The buffers stay as they are: rotary frequencies must keep float32.
            for parameter in module.parameters():
                if parameter.is_floating_point():  # weights in 4 bits are packed as integers
                    parameter.data = parameter.data.bfloat16()
        if self.zero_stage < 3:
            return super().prepare_frozen(module)

        module.requires_grad_(False)
        self.fuse(module)
        config = merge(eval_config(self.config.bf16), self.overrides)
        engine, *_ = deepspeed.initialize(model=module, config=config)
        engine.eval()
        return engine

    def fits_gathered(self, engine: TrainableModel, moments_offloaded: bool = False) -> bool:
        """True if every rank has memory for the full weights of a ZeRO-3 model; collective.

        Adam's moments, created in the first step, count too unless they are on the host during generation.
        """
        if self.zero_stage < 3:
            return True
        parameters = list(engine.module.parameters())
        otherwise = "The full weights do not fit on a GPU, so the ranks generate in lockstep, which is slower"
        return self._fits(parameters, moments_offloaded, otherwise)

    def fits_merged(self, engine: TrainableModel, moments_offloaded: bool = False) -> bool:
        """True if adapters can be merged for generation; collective.

        The weights must not be in 4 bits, and a copy of them must fit, under ZeRO-3 in addition to the full weights.
        """
        weights = [layer.base_layer.weight for layer in adapted_layers(engine.module).values()]
        if not all(weight.is_floating_point() for weight in weights):
            if self.is_main:
                logger.info(
                    "--load_in_4bit: responses are sampled with the adapters beside the weights, not merged"
                )
            return False
        if self.zero_stage == 3:
            weights = [*engine.module.parameters(), *weights]
        otherwise = "A copy of the adapted weights does not fit on a GPU, so sampling adds adapters, which is slower"
        return self._fits(weights, moments_offloaded, otherwise)

    def _fits(self, weights: Sequence[Any], moments_offloaded: bool, otherwise: str) -> bool:
        """True if every rank has memory for the whole ``weights``; else warn with ``otherwise``. Collective."""
        if self.device.type == "cpu":
            return True

        needed = sum(_numel(weight) * weight.element_size() for weight in weights)
        free, _ = torch.cuda.mem_get_info(self.device)
        if not (moments_offloaded or self.config.adam_offload):
            free -= self._moment_bytes()
        fits = not self.any_rank(needed > _SHARE_FOR_WEIGHTS * free)
        if not fits and self.is_main:
            sizes = f"{needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free"
            logger.warning("%s: %s.", otherwise, sizes)
        return fits

    def _moment_bytes(self) -> int:
        """Return the bytes of Adam's moments on this rank, two float32 numbers per trained parameter."""
        n_trained = 0
        for model in self._prepared:
            n_trained += sum(_numel(p) for p in model.module.parameters() if p.requires_grad)
        n_shares = 1 if self.zero_stage == 0 else self.comm.world_size
        return 2 * 4 * n_trained // n_shares

    def any_rank(self, flag: bool) -> bool:
        """True on all ranks if ``flag`` is true on any of them."""
        return bool(self.comm.all_reduce(torch.tensor(int(flag)), "max"))

    def uncompiled(self) -> AbstractContextManager[None]:
        """Return a context in which compiled layers run in eager mode.

        Passes other than training would compile them again.
        """
        return torch.compiler.set_stance("force_eager") if self.compiles else nullcontext()

    def _compiles_by_default(self) -> bool:
        """Decide ``--compile auto`` alike on all ranks; collective on GPUs."""
        if self.config.compile == "off" or not compiles_by_default(self.device):
            return False
        reason = obstacle(self.config, self.device)
        if not self.any_rank(bool(reason)):
            return True
        if self.is_main:
            _log_uncompiled(reason or "another rank cannot compile them")
        return False

    def _compile_layers(self, module: nn.Module) -> None:
        """Compile the layers of ``module``; ``ValueError`` for ``--compile on`` if that is not possible."""
        if self.config.compile == "on":
            _require("--compile", missing_tool(self.device))
        if compile_layers(module):
            return
        if self.config.compile == "on":
            raise ValueError(
                f"--compile: {type(module).__name__} does not name its layers; omit the flag."
            )
        if self.is_main:
            _log_uncompiled(f"{type(module).__name__} does not name them")

    def save_pretrained(self, model: Any, folder: str | Path, tokenizer: Any = None) -> None:
        """Write a model, or the adapters of a PEFT model, and tokenizer; all ranks raise ``OSError`` alike."""

        def write() -> None:
            # It fails only after its collectives, so no rank waits for another.
            save_model(model, Path(folder), self.is_main)
            if self.is_main and tokenizer is not None:
                save_tokenizer(tokenizer, Path(folder))

        def failure(message: str) -> OSError:
            return OSError(f"the model cannot be written to {folder}: {message}")

        collective(self.comm, write, (OSError, SafetensorError), raised=failure)

    def _adam(
        self, parameters: list[nn.Parameter], adam: AdamConfig, learning_rate: float
    ) -> torch.optim.Optimizer:
        """Return AdamW on the device, or DeepSpeed's on the host for ``--adam_offload``."""
        options: dict[str, Any] = {
            "lr": learning_rate,
            "betas": adam.adam_betas,
            "weight_decay": adam.l2,
        }
        if not self.config.adam_offload:
            return torch.optim.AdamW(parameters, fused=True, **options)
        _require("--adam_offload", missing_compiler("CXX", "c++"))
        load_cpu_adam()
        return DeepSpeedCPUAdam(parameters, adamw_mode=True, **options)


def get_strategy(config: DeepSpeedConfig) -> DeepspeedStrategy:
    """Return the strategy for these options, with the process group joined."""
    return DeepspeedStrategy(config)


def learning_rate_schedule(
    optimizer: torch.optim.Optimizer, adam: AdamConfig, total_steps: int
) -> LambdaLR:
    """Return the schedule of ``total_steps``: linear warm-up, its steps rounded up, then as in transformers.

    The first of n warm-up steps has 1/n of the peak rate; with 0, as in transformers, its rollout would be wasted.
    """
    n_warmup = 0
    if adam.lr_scheduler != "constant":
        n_warmup = math.ceil(adam.lr_warmup_ratio * total_steps)
    scheduler_options = None
    if adam.lr_scheduler == "cosine_with_min_lr":
        scheduler_options = {"min_lr_rate": 0.1}

    schedule = get_scheduler(
        adam.lr_scheduler,
        optimizer,
        n_warmup,
        max(1, total_steps),
        scheduler_specific_kwargs=scheduler_options,
    )
    after_warmup = schedule.lr_lambdas[0]

    def rate(step: int) -> float:
        return (step + 1) / n_warmup if step < n_warmup else after_warmup(step)

    return LambdaLR(optimizer, rate)


def _numel(parameter: Any) -> int:
    """Return the number of elements of a whole parameter, even of one that ZeRO-3 partitions."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _log_uncompiled(reason: str) -> None:
    logger.info(
        "--compile auto: layers of trained models are not compiled, which is slower: %s.", reason
    )


def _require(flag: str, missing: str) -> None:
    """Raise ``ValueError`` if a tool that ``flag`` needs is missing."""
    if missing:
        raise ValueError(f"{flag} needs {missing}: install one, or omit the flag.")


def _enable_gradient_checkpointing(module: nn.Module) -> None:
    model = next(child for child in module.modules() if isinstance(child, PreTrainedModel))
    with warnings.catch_warnings():
        # transformers 5.23 has renamed this method; 5.0 knows only this name.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
