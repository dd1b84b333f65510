"""Options to the sources of rewards of a run. Cheap checks come first, models last."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import RewardConfig
from openppo.datasets import StepEncoder, single_token_id
from openppo.datasets.process import STEP_SEPARATOR
from openppo.datasets.templates import text_of
from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.padding import MicroBatchSize
from openppo.models.pretrained import (
    UntrustedModelError,
    check_model,
    check_token_ids,
    context_length,
    load_tokenizer,
    pad_token_id,
)
from openppo.models.scalar_head import ProcessRewardModel, get_llm_for_sequence_regression
from openppo.rewards.function import FunctionScorer, load_reward_function
from openppo.rewards.http import RemoteScorer
from openppo.rewards.model import ModelScorer, Normalization, ProcessScorer, StepText, stored_normalization
from openppo.rewards.rendering import Encode, RewardModelText, policy_tokens, reader
from openppo.rewards.scoring import CombinedScorer, Scorer
from openppo.rewards.verifiable import VerifiableScorer, make_verify
from openppo.strategy.comm import check_same, collective
from openppo.types import Comm, Prompt

logger = logging.getLogger("openppo")


@dataclass(frozen=True)
class ScorerSetup:
    """What the sources of rewards need to know of their run.

    ``prepare_frozen`` brings a module that is only evaluated to the device, partitioned if need be. ``prompts`` are all
    that will be scored: their columns, labels and chats are checked. ``actor`` is ``--pretrain``, whose token ids the
    trajectories hold. ``size`` is that of a forward. ``normalize`` uses the reward model's stored mean and std.
    ``pack_where_exact`` lets a model (and its engine) drop padding.
    """

    comm: Comm
    device: torch.device
    prepare_frozen: Callable[[nn.Module], Any]
    prompts: Sequence[Prompt]
    actor: str
    size: MicroBatchSize
    bf16: bool = False
    flash_attn: bool = False
    value_head_prefix: str = "score"
    normalize: bool = False
    input_template: str | None = None
    trust_remote_code: bool = False
    pack_where_exact: Callable[[Any, Any, torch.device, str], None] | None = None

    @property
    def model_options(self) -> dict[str, Any]:
        """How models are loaded."""
        return {"bf16": self.bf16, "flash_attn": self.flash_attn, "trust_remote_code": self.trust_remote_code}


def build_scorer(source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup) -> Scorer:
    """Scorer of all sources that are given; ``ValueError`` names the flag of whatever cannot work.

    ``tokenizer`` is the policy's. A single source without names of its own gives rewards named "reward"; of several
    they are named "reward_fn", "remote", like the verifier, "reward_model", "prm".
    """
    names = iter(source.names())
    scorers: list[Scorer] = []
    if source.reward_fn is not None:
        where = (source.reward_fn, "--reward_fn", "reward_fn")
        scorers.append(_function(source, tokenizer, setup, next(names), *where))
    if source.remote_rm_url is not None and source.remote_is_file():
        where = (source.remote_rm_url, "--remote_rm_url", "reward_func")
        scorers.append(_function(source, tokenizer, setup, next(names), *where))
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
        check_model(source.prm_pretrain, "--prm_pretrain", setup.trust_remote_code)
    others = dataclasses.replace(source, reward_pretrain=None, prm_pretrain=None)
    if others.reward_fn or others.remote_rm_url or others.verifiable_reward:
        build_scorer(others, tokenizer, setup)


def _function(
    source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str, *where: str
) -> Scorer:
    """A user's function; ``where`` are its location, flag, and name unless the location has one."""
    location, flag, default_name = where
    columns = {column for prompt in setup.prompts for column in prompt.row}
    function = collective(setup.comm, lambda: load_reward_function(location, columns, flag, default_name))
    check_same(setup.comm, {flag: Path(location.rpartition(".py")[0] + ".py").expanduser().read_text()})
    logger.info("%s is called with %s", function.source, function.describe())
    options = source.reward_error_value, source.step_separator, source.weights().get(name, 1.0)
    return FunctionScorer(function, tokenizer, name, *options)


def _reward_model(model: str, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str) -> Scorer:
    """A frozen reward model. It reads the policy's token ids, or the text if its own ids are others."""
    flag = "--reward_pretrain"
    config, own, read = _reader(model, tokenizer, setup)
    ids = "the text, written again with its own tokenizer and chat template" if own else "the policy's tokens"
    logger.info("%s %s reads %s", flag, model, ids)
    normalization = Normalization()
    if setup.normalize:
        remedy = "Train it with openppo.cli.train_rm, which stores them, or use --reward_normalizer running."
        normalization = stored_normalization(config, f"{flag} {model}", remedy)
    with model_error_context(flag, model, "reward model"):
        prefix = setup.value_head_prefix
        reward = get_llm_for_sequence_regression(model, "reward", value_head_prefix=prefix, **setup.model_options)
    frozen = setup.prepare_frozen(reward)
    if setup.pack_where_exact is not None:
        setup.pack_where_exact(reward, frozen, setup.device, "reward model")
    pad = pad_token_id(own or tokenizer)
    return ModelScorer(frozen, setup.size, pad, setup.comm, setup.device, name, read, normalization)


def _reader(
    model: str, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase | None, Encode]:
    """A reward model's config, its tokenizer unless it reads the policy's ids, and its ids of a sample."""
    flag, trust, named = "--reward_pretrain", setup.trust_remote_code, f"--reward_pretrain {model}"
    config = collective(setup.comm, lambda: check_model(model, flag, trust))
    own = own_tokenizer(flag, model, setup.actor, tokenizer, trust)
    encode: Encode = partial(policy_tokens, tokenizer)
    if own is not None:
        encode = text = RewardModelText(tokenizer, own, named)
        text.check(setup.prompts)
        check_token_ids(config, named, own, [[own.eos_token_id]])
    check = partial(check_token_ids, config, named, own or tokenizer)
    check([])  # PAD
    return config, own, reader(encode, named, context_length(config), check)


def _process_reward_model(
    source: RewardConfig, model: str, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str
) -> Scorer:
    """A frozen process reward model. It reads prompt and response as ``train_prm`` renders lists of steps."""
    flag, named = "--prm_pretrain", f"--prm_pretrain {model}"
    config = collective(setup.comm, lambda: check_model(model, flag, setup.trust_remote_code))
    own = load_tokenizer(model, flag, trust_remote_code=setup.trust_remote_code)
    chat, placeholder = source.prm_apply_chat_template, source.prm_placeholder_token
    if chat and not own.chat_template:
        raise ValueError(f"--prm_apply_chat_template: the tokenizer of {named} has no chat template. Leave it out.")
    placeholder_id = single_token_id(own, placeholder, "--prm_placeholder_token", flag)
    good, bad = (single_token_id(own, token, "--prm_reward_tokens", flag) for token in source.prm_reward_tokens)
    whole = "{}" if setup.input_template is not None and not chat else None  # the prompt is in its template already
    encode = StepEncoder(own, placeholder, placeholder_id, whole, chat)

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
    text = StepText(tokenizer, own, render, source.step_separator, named, context_length(config))
    with model_error_context(flag, model, "process reward model"):
        judge = setup.prepare_frozen(ProcessRewardModel(Actor(model, **setup.model_options).model))
    return ProcessScorer(judge, text, (good, bad), source, setup.size, setup.comm, setup.device, name)


def own_tokenizer(
    flag: str, model: str, actor: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Tokenizer of ``model``; None if it knows all of the policy's token ids by the same names.

    A model without tokenizer must have a vocabulary of the same size, else ``ValueError`` naming ``flag``.
    """

    def n_embeddings(name: str, its_flag: str) -> int:
        return check_model(name, its_flag, trust_remote_code).get_text_config().vocab_size

    try:
        own = load_tokenizer(model, flag, trust_remote_code=trust_remote_code)
    except UntrustedModelError:
        raise
    except ValueError as error:
        sizes = n_embeddings(model, flag), n_embeddings(actor, "--pretrain")
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{error}, and it cannot read the token ids of "
                f"--pretrain {actor}: their vocabularies have {sizes[0]} and {sizes[1]} tokens. Add its tokenizer."
            ) from error
        logger.info("%s %s has no tokenizer, but a vocabulary of the policy's size", flag, model)
        return None
    vocabulary, ids = own.get_vocab(), tokenizer.get_vocab()  # the former may hold more, such as a [PAD] of its own
    if any(vocabulary.get(token) != token_id for token, token_id in ids.items()):
        return own
    known, sampled = n_embeddings(model, flag), min(max(ids.values()) + 1, n_embeddings(actor, "--pretrain"))
    if known < sampled:
        raise ValueError(
            f"{flag} {model} has embeddings of {known} token ids, and --pretrain {actor} samples {sampled}. "
            "Give it as many with resize_token_embeddings."
        )
    return None
