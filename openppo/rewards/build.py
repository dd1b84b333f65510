"""Options to the sources of rewards of a run. Cheap checks come first, models last."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import RewardConfig, RowsConfig
from openppo.datasets import StepEncoder, single_token_id
from openppo.datasets.process import STEP_SEPARATOR
from openppo.datasets.templates import text_of
from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.padding import MicroBatchSize, pack_where_exact
from openppo.models.pretrained import (
    UntrustedModelError,
    check_model,
    check_token_ids,
    context_length,
    load_tokenizer,
    pad_token_id,
)
from openppo.models.scalar_head import ProcessRewardModel, get_llm_for_sequence_regression
from openppo.rewards.function import FunctionScorer, RewardFunction
from openppo.rewards.http import RemoteScorer
from openppo.rewards.model import (
    ModelScorer,
    ProcessScorer,
    RewardModelText,
    last_tokens,
    policy_tokens,
    stored_normalization,
)
from openppo.rewards.scoring import CombinedScorer, Scorer, name_sample
from openppo.rewards.verifiable import VerifiableScorer, make_verify
from openppo.strategy.comm import check_same, collective
from openppo.types import Comm, Prompt, Trajectory
from openppo.user_code import load_callable

logger = logging.getLogger("openppo")


@dataclass(frozen=True)
class ScorerSetup:
    """What the sources of rewards need to know of their run.

    ``prepare_frozen`` brings a module that is only evaluated to the device, partitioned if need be. ``prompts`` are all
    that will be scored: their columns, labels and chats are checked. ``actor`` is ``--pretrain``, whose token ids the
    trajectories hold. ``size`` is that of a forward. ``loading`` holds ``bf16``, ``flash_attn`` and
    ``trust_remote_code`` for models. ``normalize`` uses the reward model's stored mean and std.
    """

    comm: Comm
    device: torch.device
    prepare_frozen: Callable[[nn.Module], Any]
    prompts: Sequence[Prompt]
    actor: str
    size: MicroBatchSize
    loading: Mapping[str, bool]
    value_head_prefix: str = "score"
    normalize: bool = False
    input_template: str | None = None

    def config(self, model: str, flag: str) -> PreTrainedConfig:
        """A model's config; ``ValueError`` naming ``flag`` on all ranks if one of them cannot read it."""
        return collective(self.comm, lambda: check_model(model, flag, self.loading["trust_remote_code"]))


def build_scorer(source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup) -> Scorer:
    """Scorer of all sources that are given; ``ValueError`` names the flag of whatever cannot work.

    ``tokenizer`` is the policy's. A single source without names of its own gives rewards named "reward"; of several
    they are named "reward_fn", "remote", like the verifier, "reward_model", "prm".
    """
    names = iter(source.names())
    scorers: list[Scorer] = []
    if source.reward_fn is not None:
        scorers.append(_function(source, tokenizer, setup, next(names), "reward_fn", "reward_fn"))
    if source.remote_is_file():
        scorers.append(_function(source, tokenizer, setup, next(names), "remote_rm_url", "reward_func"))
    elif source.remote_rm_url is not None:
        remote = RemoteScorer(source, tokenizer, next(names))
        remote.check()
        scorers.append(remote)
    for verifier in source.verifiable_reward:
        scorers.append(VerifiableScorer(make_verify(verifier, source, setup.prompts), tokenizer, next(names)))
    if source.reward_pretrain is not None:
        scorers.append(_reward_model(source.reward_pretrain, tokenizer, setup, next(names)))
    if source.prm_pretrain is not None:
        scorers.append(_process_reward_model(source, source.prm_pretrain, tokenizer, setup, next(names)))
    return scorers[0] if len(scorers) == 1 else CombinedScorer(scorers)


def check_sources(source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup) -> None:
    """``ValueError`` for what ``build_scorer`` would find wrong before it loads a model."""
    if source.reward_pretrain is not None:
        _reader(source.reward_pretrain, tokenizer, setup)
    if source.prm_pretrain is not None:
        setup.config(source.prm_pretrain, "--prm_pretrain")
    others = dataclasses.replace(source, reward_pretrain=None, prm_pretrain=None)
    if others.names():
        build_scorer(others, tokenizer, setup)


def _function(
    source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str, option: str, default: str
) -> Scorer:
    """The user's function at the location in ``option``, which is called ``default`` unless the location says more."""
    location, flag = getattr(source, option), f"--{option}"
    columns = {column for prompt in setup.prompts for column in prompt.row}
    where = f"{flag} {location}"
    function = collective(setup.comm, lambda: RewardFunction(load_callable(location, flag, default), where, columns))
    check_same(setup.comm, {flag: Path(location.rpartition(".py")[0] + ".py").expanduser().read_text()})
    options = source.reward_error_value, source.step_separator, source.weights().get(name, 1.0)
    return FunctionScorer(function, tokenizer, name, *options)


def _reward_model(model: str, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str) -> Scorer:
    """A frozen reward model. It reads the policy's token ids, or the text if its own ids are others."""
    flag = "--reward_pretrain"
    config, own, read = _reader(model, tokenizer, setup)
    ids = "the text, written again with its own tokenizer and chat template" if own else "the policy's tokens"
    logger.info("%s %s reads %s", flag, model, ids)
    normalization: tuple[float, ...] = ()
    if setup.normalize:
        normalization = stored_normalization(config, f"{flag} {model}")
    with model_error_context(flag, model, "reward model"):
        prefix = setup.value_head_prefix
        reward = get_llm_for_sequence_regression(model, "reward", value_head_prefix=prefix, **setup.loading)
    frozen = setup.prepare_frozen(reward)
    if setup.loading["flash_attn"]:
        pack_where_exact(reward, frozen, setup.device, "reward model")
    pad = pad_token_id(own or tokenizer)
    return ModelScorer(frozen, setup.size, pad, setup.comm, setup.device, name, read, *normalization)


def _reader(
    model: str, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase | None, Callable[[Trajectory], list[int]]]:
    """A reward model's config, its tokenizer unless it reads the policy's ids, and its ids of a sample."""
    flag, named = "--reward_pretrain", f"--reward_pretrain {model}"
    config = setup.config(model, flag)
    own = own_tokenizer(flag, model, setup.actor, tokenizer, setup.loading["trust_remote_code"])
    encode: Callable[[Trajectory], list[int]] = partial(policy_tokens, tokenizer)
    if own is not None:
        encode = text = RewardModelText(tokenizer, own, named)
        text.check(setup.prompts)
    check_token_ids(config, named, own or tokenizer, [] if own is None else [[own.eos_token_id]])  # and PAD

    def read(trajectory: Trajectory) -> list[int]:
        try:
            ids = encode(trajectory)
        except ValueError as error:
            raise ValueError(f"{named}: its chat template fails on {name_sample(trajectory)}: {error}") from error
        ids = last_tokens(ids, context_length(config), named, trajectory)
        check_token_ids(config, named, own or tokenizer, [ids])
        return ids

    return config, own, read


def _process_reward_model(
    source: RewardConfig, model: str, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str
) -> Scorer:
    """A frozen process reward model. It reads prompt and response as ``train_prm`` renders lists of steps."""
    flag, named = "--prm_pretrain", f"--prm_pretrain {model}"
    config = setup.config(model, flag)
    own = load_tokenizer(model, flag, trust_remote_code=setup.loading["trust_remote_code"])
    chat, placeholder = source.prm_apply_chat_template, source.prm_placeholder_token
    if chat and not own.chat_template:
        raise ValueError(f"--prm_apply_chat_template: the tokenizer of {named} has no chat template. Leave it out.")
    placeholder_id = single_token_id(own, placeholder, "--prm_placeholder_token", flag)
    good, bad = (single_token_id(own, token, "--prm_reward_tokens", flag) for token in source.prm_reward_tokens)
    whole = "{}" if setup.input_template is not None and not chat else None  # the prompt is in its template already
    options = RowsConfig(input_template=whole, apply_chat_template=chat)
    encode = StepEncoder(own, placeholder, placeholder_id, options)

    def render(prompt: Prompt, steps: list[str]) -> tuple[list[int], list[int]]:
        question: Any = prompt.messages or prompt.text
        if prompt.messages and not chat:
            question = STEP_SEPARATOR.join(text_of(message["content"]) for message in prompt.messages)
        ids, places = encode(question, steps)
        check_token_ids(config, named, own, [ids, [good, bad]])
        return ids, places

    for prompt in {tuple(m["role"] for m in p.messages or ()): p for p in setup.prompts}.values():
        try:
            render(prompt, ["a"])
        except ValueError as error:  # a chat template may refuse its roles
            raise ValueError(f"{named}: {error}") from error
    with model_error_context(flag, model, "process reward model"):
        judge = setup.prepare_frozen(ProcessRewardModel(Actor(model, **setup.loading).model))
    where, run = (named, context_length(config), pad_token_id(own)), (setup.size, setup.comm, setup.device)
    return ProcessScorer(judge, render, tokenizer, (good, bad), source, *where, *run, name)


def own_tokenizer(
    flag: str, model: str, actor: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Tokenizer of ``model``; None if it knows all of the policy's token ids by the same names.

    A model without tokenizer must have a vocabulary of the same size, else ``ValueError`` naming ``flag``.
    """

    names = ((model, flag), (actor, "--pretrain"))
    known, of_policy = (check_model(*name, trust_remote_code).get_text_config().vocab_size for name in names)
    try:
        own = load_tokenizer(model, flag, trust_remote_code=trust_remote_code)
    except UntrustedModelError:
        raise
    except ValueError as error:
        if known != of_policy:
            raise ValueError(
                f"{error}, and it cannot read the token ids of --pretrain {actor}: their vocabularies have {known} and "
                f"{of_policy} tokens. Add its tokenizer."
            ) from error
        logger.info("%s %s has no tokenizer, but a vocabulary of the policy's size", flag, model)
        return None
    vocabulary, ids = own.get_vocab(), tokenizer.get_vocab()  # the former may hold more, such as a [PAD] of its own
    if any(vocabulary.get(token) != token_id for token, token_id in ids.items()):
        return own
    sampled = min(max(ids.values()) + 1, of_policy)
    if known < sampled:
        raise ValueError(
            f"{flag} {model} has embeddings of {known} token ids, and --pretrain {actor} samples {sampled}. "
            "Give it as many with resize_token_embeddings."
        )
    return None
