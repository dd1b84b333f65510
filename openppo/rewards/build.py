"""Options to the sources of rewards of a run. Cheap checks come first, models last."""

from __future__ import annotations

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

from openppo.config import RewardConfig, Verifier
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
from openppo.rewards.model import ModelScorer, Normalization, stored_normalization
from openppo.rewards.process import ProcessScorer, StepText
from openppo.rewards.rendering import PolicyTokens, RewardModelText
from openppo.rewards.scoring import CombinedScorer, Scorer
from openppo.rewards.verifiable import VerifiableScorer, make_verify
from openppo.strategy.comm import check_same, collective
from openppo.types import Comm, Prompt, Trajectory

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


def build_scorer(source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup) -> Scorer:
    """Scorer of all sources that are given; ``ValueError`` names the flag of whatever cannot work.

    ``tokenizer`` is the policy's. A single source without names of its own gives rewards named "reward"; of several
    they are named "reward_fn", "remote", like the verifier, "reward_model", "prm".
    """
    makers: list[Callable[[RewardConfig, PreTrainedTokenizerBase, ScorerSetup, str], Scorer]] = []
    if source.reward_fn is not None:
        makers.append(partial(_function, source.reward_fn, "--reward_fn", "reward_fn"))
    if source.remote_rm_url is not None:
        makers.append(_remote)
    for verifier in source.verifiable_reward:
        makers.append(partial(_verifier, verifier))
    if source.reward_pretrain is not None:
        makers.append(partial(_reward_model, source.reward_pretrain))
    if source.prm_pretrain is not None:
        makers.append(partial(_process_reward_model, source.prm_pretrain))
    named = zip(makers, source.names(), strict=True)
    scorers = [make(source, tokenizer, setup, name) for make, name in named]
    return scorers[0] if len(scorers) == 1 else CombinedScorer(scorers)


def check_sources(source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup) -> None:
    """What ``build_scorer`` would find wrong before it loads a model; ``ValueError`` as there."""
    if source.reward_pretrain is not None:
        _reader(source.reward_pretrain, tokenizer, setup)
    if source.prm_pretrain is not None:
        check_model(source.prm_pretrain, "--prm_pretrain", setup.trust_remote_code)
    others = dataclasses.replace(source, reward_pretrain=None, prm_pretrain=None)
    if others.reward_fn or others.remote_rm_url or others.verifiable_reward:
        build_scorer(others, tokenizer, setup)


def _function(
    location: str,
    flag: str,
    default_name: str,
    source: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    setup: ScorerSetup,
    name: str,
) -> Scorer:
    columns = {column for prompt in setup.prompts for column in prompt.row}
    function = collective(setup.comm, lambda: load_reward_function(location, columns, flag, default_name))
    check_same(setup.comm, {flag: Path(location.rpartition(".py")[0] + ".py").expanduser().read_text()})
    logger.info("%s is called with %s", function.source, function.describe())
    return FunctionScorer(
        function,
        tokenizer,
        name,
        error_value=source.reward_error_value,
        step_separator=source.step_separator,
        token_weight=source.weights().get(name, 1.0),
    )


def _remote(source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str) -> Scorer:
    assert source.remote_rm_url is not None
    if source.remote_is_file():
        return _function(source.remote_rm_url, "--remote_rm_url", "reward_func", source, tokenizer, setup, name)
    scorer = RemoteScorer(source, tokenizer, name)
    scorer.check()
    return scorer


def _verifier(
    verifier: Verifier, source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str
) -> Scorer:
    return VerifiableScorer(make_verify(verifier, source, setup.prompts), tokenizer, name)


def _reward_model(
    model: str, source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str
) -> Scorer:
    """A frozen reward model, which reads the policy's token ids or, if those are not its own, the text again."""
    flag = "--reward_pretrain"
    config, own, read = _reader(model, tokenizer, setup)
    source_of_ids = "the text, written again with its own tokenizer and chat template" if own else "the policy's tokens"
    logger.info("%s %s reads %s", flag, model, source_of_ids)
    normalization = Normalization()
    if setup.normalize:
        remedy = "Train it with openppo.cli.train_rm, which stores them, or use --reward_normalizer running."
        normalization = stored_normalization(config, f"{flag} {model}", remedy)
    with model_error_context(flag, model, "reward model"):
        reward = get_llm_for_sequence_regression(
            model,
            "reward",
            bf16=setup.bf16,
            flash_attn=setup.flash_attn,
            value_head_prefix=setup.value_head_prefix,
            trust_remote_code=setup.trust_remote_code,
        )
    frozen = setup.prepare_frozen(reward)
    if setup.pack_where_exact is not None:
        setup.pack_where_exact(reward, frozen, setup.device, "reward model")
    pad = pad_token_id(own or tokenizer)
    return ModelScorer(frozen, setup.size, pad, setup.comm, setup.device, name, read, normalization)


def _reader(
    model: str, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup
) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase | None, Callable[[Trajectory], list[int]]]:
    """A reward model's config, its tokenizer if it does not read the policy's ids, and what it reads of a sample."""
    flag, named = "--reward_pretrain", f"--reward_pretrain {model}"
    config = collective(setup.comm, lambda: check_model(model, flag, setup.trust_remote_code))
    own, context = own_tokenizer(flag, model, setup.actor, tokenizer, setup.trust_remote_code), context_length(config)
    text: Callable[[Trajectory], list[int]] = PolicyTokens(tokenizer, named, context)
    if own is not None:
        text = RewardModelText(tokenizer, own, named, context)
        text.check(setup.prompts)
        check_token_ids(config, named, own, [[own.eos_token_id]])

    def read(trajectory: Trajectory) -> list[int]:
        ids = text(trajectory)
        check_token_ids(config, named, own or tokenizer, [ids])
        return ids

    return config, own, read


def _process_reward_model(
    model: str, source: RewardConfig, tokenizer: PreTrainedTokenizerBase, setup: ScorerSetup, name: str
) -> Scorer:
    """A frozen process reward model, which reads prompt and response as ``train_prm`` renders lists of steps."""
    flag, trust = "--prm_pretrain", setup.trust_remote_code
    config = collective(setup.comm, lambda: check_model(model, flag, trust))
    context = context_length(config)
    own = load_tokenizer(model, flag, trust_remote_code=trust)
    chat, placeholder = source.prm_apply_chat_template, source.prm_placeholder_token
    if chat and not own.chat_template:
        raise ValueError(
            f"--prm_apply_chat_template: the tokenizer of {flag} {model} has no chat template. Leave it out."
        )
    placeholder_id = single_token_id(own, placeholder, "--prm_placeholder_token", flag)
    good, bad = (single_token_id(own, token, "--prm_reward_tokens", flag) for token in source.prm_reward_tokens)
    whole = "{}" if setup.input_template is not None and not chat else None  # the prompt is in its template already
    encode = StepEncoder(own, placeholder, placeholder_id, whole, chat)

    def render(prompt: Prompt, steps: list[str]) -> tuple[list[int], list[int]]:
        question: Any = prompt.messages or prompt.text
        if prompt.messages and not chat:
            question = STEP_SEPARATOR.join(text_of(message["content"]) for message in prompt.messages)
        ids, places = encode(question, steps)
        check_token_ids(config, f"{flag} {model}", own, [ids, [good, bad]])
        return ids, places

    for prompt in {tuple(m["role"] for m in p.messages or ()): p for p in setup.prompts}.values():
        try:
            render(prompt, ["a"])
        except ValueError as error:  # a chat template may refuse its roles
            raise ValueError(f"{flag} {model}: {error}") from error
    text = StepText(tokenizer, own, render, source.step_separator, f"{flag} {model}", context)
    with model_error_context(flag, model, "process reward model"):
        policy = Actor(model, bf16=setup.bf16, flash_attn=setup.flash_attn, trust_remote_code=trust)
        judge = ProcessRewardModel(policy.model)
    frozen = setup.prepare_frozen(judge)
    return ProcessScorer(frozen, text, (good, bad), source, setup.size, setup.comm, setup.device, name)


def own_tokenizer(
    flag: str, model: str, actor: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of ``model``; None if it reads the policy's token ids, that is knows all of them by the same names.

    A model without tokenizer must have a vocabulary of the same size, else ``ValueError`` naming ``flag``.
    """
    try:
        own = load_tokenizer(model, flag, trust_remote_code=trust_remote_code)
    except UntrustedModelError:
        raise
    except ValueError as error:
        sizes = _embeddings(model, flag, trust_remote_code), _embeddings(actor, "--pretrain", trust_remote_code)
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{error}, and it cannot read the token ids of "
                f"--pretrain {actor}: their vocabularies have {sizes[0]} and {sizes[1]} tokens. Add its tokenizer."
            ) from error
        logger.info("%s %s has no tokenizer, but a vocabulary of the policy's size", flag, model)
        return None
    vocabulary, ids = own.get_vocab(), tokenizer.get_vocab()  # the former may hold more, such as a [PAD] of its own
    if all(vocabulary.get(token) == token_id for token, token_id in ids.items()):
        sizes = _embeddings(model, flag, trust_remote_code), _embeddings(actor, "--pretrain", trust_remote_code)
        sampled = min(max(ids.values()) + 1, sizes[1])
        if sizes[0] < sampled:
            raise ValueError(
                f"{flag} {model} has embeddings of {sizes[0]} token ids, and --pretrain {actor} samples {sampled}. "
                "Give it as many with resize_token_embeddings."
            )
        return None
    return own


def _embeddings(model: str, flag: str, trust_remote_code: bool) -> int:
    """Number of embeddings by the config."""
    size: int = check_model(model, flag, trust_remote_code).get_text_config().vocab_size
    return size
