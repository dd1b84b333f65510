"""What every command does while it is put together: logs, trackers, errors that name the flag of a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import __version__
from openppo.config import ModelConfig, RowsConfig, TrainPPOConfig, flat_dict, parse_template_kwargs
from openppo.config.fields import declared_options, rules_of
from openppo.datasets.media import RowVision
from openppo.datasets.vision import Vision
from openppo.models.lengths import decide_alike, lengths_are_exact
from openppo.models.pretrained import context_length, load_processor, load_tokenizer
from openppo.models.vision_models import placeholders
from openppo.strategy.comm import collective, name_ranks
from openppo.tracking import (
    RolloutTracker,
    Tracker,
    Trackers,
    check_run_folder,
    check_trackers,
    cut_logs,
    environment,
    make_trackers,
    prepare_rollouts,
    progress_bar,
    save_run,
    set_aside_logs,
    setup_logging,
)
from openppo.trainer.callbacks import check_metric
from openppo.types import Comm, Prompt

if TYPE_CHECKING:  # commands that do not train need no DeepSpeed
    from openppo.datasets import ShowRows
    from openppo.strategy.deepspeed import DeepspeedStrategy


T = TypeVar("T")


def quiet_libraries() -> None:
    """Log on rank 0 as the commands do; of other libraries only errors, and no bars for weights that load quickly.

    For loops of your own, called before anything is built. Without it a program has the step lines alone.
    """
    setup_logging(int(os.environ.get("RANK", "0")))
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # peft and transformers about each other
    warnings.filterwarnings(
        "ignore", message="fan_in_fan_out", category=UserWarning
    )  # peft has set it right
    transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE = (
        0  # an error instead of a question on stdin
    )


def check_options(config: Any, comm: Comm, **given: bool | None) -> None:
    """``config.validate()`` with ``given``, and ``ValueError`` if ranks have different options or versions.

    Ranks with another seed or batch size would train different models or deadlock.
    """
    mine = {
        "openppo": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    mine["CUDA"] = "available" if torch.cuda.is_available() else "not available"
    places = {
        name
        for name, declared in declared_options(type(config)).items()
        if rules_of(declared).place
    }
    for name, value in flat_dict(config).items():
        mine[f"--{name}"] = (
            ("not given" if value is None else "given") if name in places else str(value)
        )
    everyones, differences = comm.all_gather_object(mine), []
    for name, value in everyones[0].items():
        if others := [rank for rank, theirs in enumerate(everyones) if theirs[name] != value]:
            theirs = f"{everyones[others[0]][name]} on {name_ranks(comm, others)}"
            differences.append(f"{name} is {value} on rank 0 and {theirs}")
    if differences:
        raise ValueError(f"{'; '.join(differences)}: start all ranks alike.")
    if config.deepspeed.bf16:
        decide_alike(comm.all_gather_object(lengths_are_exact()))

    def check() -> None:
        config.validate(comm.world_size, **given)  # folders may differ, of which it sees some
        for condition in config.run.stop_conditions:
            check_metric(condition.metric, f"--stop_when {condition.text!r}")
        if comm.rank == 0:
            check_run_folder(Path(config.run.save_path), config.output_models)
            check_trackers(config.tracking)

    collective(comm, check)


def start_trackers(
    config: Any,
    strategy: DeepspeedStrategy,
    headline: Sequence[str],
    total_steps: int,
    resume_step: int | None = None,
    own: Sequence[Tracker] = (),
) -> Trackers:
    """Trackers of a command, and ``own``; its resolved options and its environment as files in ``<save_path>/logs``.

    Logs of a run that resumes after step ``resume_step`` are continued there; any other logs are set aside.
    """
    path = config.run.save_path
    options = flat_dict(config)
    found = environment(strategy.comm)

    def prepare(logs: Path) -> None:
        set_aside_logs(logs) if resume_step is None else cut_logs(logs, resume_step)
        save_run(logs, options, found)

    def failure(message: str) -> ValueError:
        return ValueError(
            f"--save_path {path}: cannot be written ({message}); choose another folder."
        )

    collective(
        strategy.comm,
        lambda: prepare(Path(path) / "logs") if strategy.is_main else None,
        OSError,
        raised=failure,
    )
    return make_trackers(
        path,
        config.tracking,
        options,
        comm=strategy.comm,
        headline=headline,
        total_steps=total_steps,
        resumed_after=resume_step,
        own=own,
    )


def rollout_trackers(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, resume_step: int | None
) -> list[Tracker]:
    """What writes ``--dump_rollouts``, on every rank, if it is given."""
    folder, comm = config.dump.dump_rollouts, strategy.comm
    if folder is None:
        return []

    def failure(message: str) -> ValueError:
        return ValueError(
            f"--dump_rollouts {folder}: cannot be written ({message}); choose another folder."
        )

    path = Path(folder)
    collective(
        comm,
        lambda: prepare_rollouts(path, resume_step) if strategy.is_main else None,
        OSError,
        raised=failure,
    )
    return [RolloutTracker(path, comm.rank, config.dump.dump_max_mib * 2**20)]


def tokenizing(comm: Comm) -> ShowRows:
    """For loaders of data: a bar on rank 0, and a sign of progress from all."""
    return lambda rows: progress_bar(rows, "tokenizing", enabled=comm.rank == 0)


def once_per_host(comm: Comm, options: RowsConfig, load: Callable[[], T]) -> T:
    """``load()`` on all ranks; with ``--dataset_num_proc`` on the first of each host first, whose cache others read."""
    made: T | None = None
    if options.dataset_num_proc > 0:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        made = collective(comm, lambda: load() if is_first else None)
    return collective(comm, lambda: load() if made is None else made)


def load_policy_tokenizer(
    pretrain: str, trust_remote_code: bool, options: RowsConfig
) -> PreTrainedTokenizerBase:
    """The tokenizer of ``--pretrain`` with the chat template of ``options`` and its arguments."""
    given = parse_template_kwargs(options.chat_template_kwargs), options.chat_template
    return load_tokenizer(pretrain, "--pretrain", None, trust_remote_code, *given)


def policy_vision(
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    options: RowsConfig,
) -> RowVision:
    """What reads images and videos for the model of ``--pretrain``."""
    load = partial(load_processor, model.pretrain, "--pretrain", model.trust_remote_code)
    return RowVision(
        load,
        [*placeholders(model_config)],
        tokenizer,
        options=options,
        named=f"--pretrain {model.pretrain}",
    )


def run_vision(
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
    options: RowsConfig,
    kinds: set[str],
    plays: bool,
) -> Vision | None:
    """What reads images of prompts, whose ``kinds`` are known, and those that agents may show, if the run ``plays``."""
    vision = policy_vision(model, tokenizer, model_config, options=options)
    if kinds:
        return vision
    return vision.for_agents(model_config, f"--pretrain {model.pretrain}") if plays else None


def blank_prompt(*of_run: Any) -> Prompt | None:
    """What stands in for prompts with images, of the arguments of ``run_vision``; None where there are none."""
    *_, kinds, plays = of_run
    vision = run_vision(*of_run)
    return None if vision is None else vision.blank(sorted(kinds | ({"image"} if plays else set())))


def check_context(
    model_config: PreTrainedConfig, model: str, longest_prompt: int, new_tokens: int
) -> None:
    """Raise ``ValueError`` if a prompt of so many tokens and its response do not fit ``model``: a flag and a name."""
    text = model_config.get_text_config()
    limits = [
        context_length(model_config),
        getattr(text, "keep_window_size", None),
    ]  # beyond that of Doge, and
    if getattr(text, "attn_temperature_tuning", False) and getattr(text, "floor_scale", None):
        limits.append(
            text.floor_scale - 1
        )  # that of Llama 4, log-probs depend on what else is in a batch
    context = min((limit for limit in limits if limit), default=None)
    if context is not None and longest_prompt + new_tokens > context:
        raise ValueError(
            f"The longest prompt has {longest_prompt} tokens; with --generate_max_len {new_tokens} that exceeds the "
            f"context of {context} tokens of {model}. Lower --generate_max_len or --prompt_max_len."
        )
