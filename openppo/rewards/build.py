"""Options to the sources of rewards of a run. Cheap checks come first, models last."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import RewardConfig, RowsConfig
from openppo.datasets import StepEncoder, single_token_id
from openppo.datasets.process import STEP_SEPARATOR
from openppo.datasets.templates import text_of
from openppo.media import check_images, placeholders
from openppo.models.actor import Actor
from openppo.models.batching import MicroBatchSize
from openppo.models.loading import model_error_context
from openppo.models.padding import pack_where_exact
from openppo.models.pretrained import (
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
    RewardModelText,
    check_chats,
    policy_tokens,
    read_tokens,
)
from openppo.rewards.process import ProcessScorer
from openppo.rewards.scoring import CombinedScorer, Scorer
from openppo.rewards.verifiable import VerifiableScorer, make_verify
from openppo.strategy.comm import InferenceStrategy, check_same, collective
from openppo.types import Prompt, Trajectory
from openppo.user_code import find_callable

_FUNCTION_NAMES = "reward_fn", "compute_score"  # the latter is verl's


@dataclass(frozen=True)
class ScorerSetup:
    """Options of the sources of rewards, and what these need to know of their run.

    ``tokenizer`` is that of ``actor``, ``--pretrain`` or its config, whose token ids the trajectories hold.
    ``prompts`` are all that will be scored: their columns, labels and chats are checked. ``size`` is that of a forward.
    ``loading`` holds ``bf16``, ``flash_attn`` and ``trust_remote_code`` for models. ``normalize`` uses the reward
    model's stored mean and std. ``episodes``: whole conversations are scored. ``function_flag`` named the function of
    ``source``. ``function`` is in place of the file of ``--reward_fn``. ``stand_in`` is as of ``Actor``.
    """

    source: RewardConfig
    tokenizer: PreTrainedTokenizerBase
    strategy: InferenceStrategy
    prompts: Sequence[Prompt]
    actor: str | PreTrainedConfig
    size: MicroBatchSize
    loading: Mapping[str, bool]
    value_head_prefix: str = "score"
    normalize: bool = False
    input_template: str | None = None
    episodes: bool = False
    function_flag: str = "--reward_fn"
    function: Callable[..., Any] | None = None
    stand_in: Prompt | None = None

    def build(self) -> Scorer:
        """Scorer of all sources that are given; ``ValueError`` names the flag of whatever cannot work.

        A single source without names of its own gives rewards named "reward"; of several they are named "reward_fn",
        "remote", like the verifier, "reward_model", "prm".
        """
        source, names = self.source, iter(self.source.names())
        self._refuse_images()
        if source.prm_pretrain is not None:
            self._config(
                source.prm_pretrain, "--prm_pretrain"
            )  # before the weights of a reward model
        scorers: list[Scorer] = []
        if source.reward_fn is not None:
            scorers.append(
                self._function(
                    source.reward_fn, next(names), self.function_flag, default_names=_FUNCTION_NAMES
                )
            )
        if source.remote_rm_url is not None and source.remote_is_file():
            scorers.append(
                self._function(
                    source.remote_rm_url,
                    next(names),
                    "--remote_rm_url",
                    default_names=["reward_func"],
                )
            )
        elif source.remote_rm_url is not None:
            remote = RemoteScorer(source, self.tokenizer, next(names))
            remote.check()
            scorers.append(remote)
        for verifier in source.verifiable_reward:
            scorers.append(
                VerifiableScorer(
                    make_verify(verifier, source, self.prompts), self.tokenizer, next(names)
                )
            )
        if source.reward_pretrain is not None:
            scorers.append(self._reward_model(source.reward_pretrain, next(names)))
        if source.prm_pretrain is not None:
            scorers.append(self._process_reward_model(source.prm_pretrain, next(names)))
        return scorers[0] if len(scorers) == 1 else CombinedScorer(scorers)

    def check(self) -> Scorer | None:
        """``ValueError`` for what ``build`` would find wrong before it loads a model; the sources that need none."""
        self._refuse_images()
        if self.source.reward_pretrain is not None:
            self._reader(self.source.reward_pretrain)
        if self.source.prm_pretrain is not None:
            self._config(self.source.prm_pretrain, "--prm_pretrain")
        others = replace(self.source, reward_pretrain=None, prm_pretrain=None)
        return replace(self, source=others).build() if others.names() else None

    @property
    def has_images(self) -> bool:
        """Whether any prompt has images."""
        return any(prompt.media for prompt in self.prompts)

    def _refuse_images(self) -> None:
        """``ValueError`` for a process reward model where prompts have images."""
        if self.source.prm_pretrain is not None and self.has_images:
            raise ValueError(
                "--prm_pretrain reads no images, and prompts have some: use --reward_fn."
            )

    def _config(self, model: str, flag: str) -> PreTrainedConfig:
        """A model's config; ``ValueError`` naming ``flag`` on all ranks if one of them cannot read it."""
        return collective(
            self.strategy.comm, lambda: check_model(model, flag, self.loading["trust_remote_code"])
        )

    def _function(
        self, location: str, name: str, flag: str, default_names: Sequence[str]
    ) -> Scorer:
        """The user's function at ``location``, called as the first of ``default_names`` unless the location says."""
        columns, where = (
            {column for prompt in self.prompts for column in prompt.row},
            f"{flag} {location}",
        )
        comm, source = self.strategy.comm, self.source
        if flag == "--reward_fn" and (passed := self.function) is not None:
            function = collective(comm, lambda: RewardFunction(passed, where, columns))
            if source.reward_workers > 0:
                logger.info(
                    "reward_fn stays in this process: --reward_workers are for functions in files"
                )
        else:
            loaded = collective(comm, lambda: find_callable(location, flag, default_names))
            function = collective(comm, lambda: RewardFunction(loaded.value, where, columns))
            check_same(comm, {flag: loaded.file.read_text()})
            if source.reward_workers > 0:
                function.start_processes(
                    loaded.file, loaded.name, source.reward_workers, seconds=source.reward_timeout
                )

        weights = source.weights()
        return FunctionScorer(
            function,
            self.tokenizer,
            name,
            error_value=source.reward_error_value,
            step_separator=source.step_separator,
            token_weight=weights.get(name, 1.0),
            weighted=None if flag == "--eval_reward_fn" else list(weights),
        )

    def _reward_model(self, model: str, name: str) -> Scorer:
        """A frozen reward model. It reads the policy's token ids, or the text if its own ids are others."""
        flag = "--reward_pretrain"
        config, own, read = self._reader(model)
        ids = (
            "the text, written again with its own tokenizer and chat template"
            if own
            else "the policy's tokens"
        )
        logger.info("%s %s reads %s", flag, model, ids)
        normalization = stored_normalization(config, f"{flag} {model}") if self.normalize else ()
        with model_error_context(flag, model, "reward model"), self.strategy.loading():
            prefix = self.value_head_prefix
            reward = get_llm_for_sequence_regression(
                model, "reward", value_head_prefix=prefix, **self.loading
            )
        frozen = self.strategy.prepare_frozen(reward)
        pack_where_exact(reward, frozen, self.strategy.device, name="reward model")
        sees = own is None and bool(placeholders(config))
        reward.stand_in = (
            self.stand_in if sees else None
        )  # after checks, whose rows may hold tokens of images
        pad = pad_token_id(own or self.tokenizer)
        where = self.strategy.comm, self.strategy.device
        return ModelScorer(frozen, self.size, pad, *where, name, read, sees, *normalization)

    def _reader(
        self, model: str
    ) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase | None, Callable[[Trajectory], list[int]]]:
        """A reward model's config, its tokenizer unless it reads the policy's ids, and its ids of a sample."""
        flag, named = "--reward_pretrain", f"--reward_pretrain {model}"
        config = self._config(model, flag)
        trust = self.loading["trust_remote_code"]
        own = own_tokenizer(
            flag, model, self.actor, tokenizer=self.tokenizer, trust_remote_code=trust
        )
        if self.has_images:
            actor = (
                check_model(self.actor, "--pretrain", trust)
                if isinstance(self.actor, str)
                else self.actor
            )
            if own is not None or placeholders(config) != placeholders(actor):
                what = "does not read images as --pretrain does: use a model of its family, or --reward_fn."
                raise ValueError(f"{named} {what}")
            check_images(config, named)
        encode: Callable[[Trajectory], list[int]] = partial(policy_tokens, self.tokenizer)
        if own is not None:
            encode = text = RewardModelText(self.tokenizer, own, named)
            text.check(self.prompts, self.episodes)
        tokenizer = own or self.tokenizer
        check_token_ids(
            config, named, tokenizer, rows=[] if own is None else [[own.eos_token_id]]
        )  # and PAD
        return (
            config,
            own,
            partial(read_tokens, encode=encode, config=config, source=named, tokenizer=tokenizer),
        )

    def _process_reward_model(self, model: str, name: str) -> Scorer:
        """A frozen process reward model. It reads prompt and response as ``train_prm`` renders lists of steps."""
        flag = "--prm_pretrain"
        named = f"--prm_pretrain {model}"
        source = self.source
        config = self._config(model, flag)
        own = load_tokenizer(model, flag, trust_remote_code=self.loading["trust_remote_code"])
        chat, placeholder = source.prm_apply_chat_template, source.prm_placeholder_token
        if chat and not own.chat_template:
            raise ValueError(
                f"--prm_apply_chat_template: the tokenizer of {named} has no chat template. Leave it out."
            )
        placeholder_id = single_token_id(
            own, placeholder, "--prm_placeholder_token", flag_of_model=flag
        )
        good, bad = (
            single_token_id(own, token, "--prm_reward_tokens", flag_of_model=flag)
            for token in source.prm_reward_tokens
        )
        whole = (
            "{}" if self.input_template is not None and not chat else None
        )  # the prompt is in its template already
        options = RowsConfig(input_template=whole, apply_chat_template=chat)
        encode = StepEncoder(own, placeholder, placeholder_id, options=options)

        def render(prompt: Prompt, steps: list[str]) -> tuple[list[int], list[int]]:
            question: Any = prompt.messages or prompt.text
            if prompt.messages and not chat:
                question = STEP_SEPARATOR.join(
                    text_of(message["content"]) for message in prompt.messages
                )
            ids, places = encode(question, steps)
            check_token_ids(config, named, own, rows=[ids])
            return ids, places

        check_token_ids(config, named, own, rows=[[good, bad]])
        if chat:
            check_chats(
                self.prompts,
                named,
                "--prm_apply_chat_template",
                encode=lambda prompt: render(prompt, ["a"]),
            )
        with model_error_context(flag, model, "process reward model"), self.strategy.loading():
            module = ProcessRewardModel(Actor(model, **self.loading).model)
        judge = self.strategy.prepare_frozen(module)
        run = self.size, self.strategy.comm, self.strategy.device
        where = named, context_length(config), pad_token_id(own)
        return ProcessScorer(judge, render, self.tokenizer, (good, bad), source, *where, *run, name)


def stored_normalization(config: PreTrainedConfig, source: str) -> tuple[float, float]:
    """Mean and std of a reward model's scores, which its config.json holds as ``mean`` and ``std`` as in OpenRLHF.

    ``ValueError`` naming ``--normalize_reward`` and ``source`` if there are none.
    """
    stored: Any = config.to_dict()
    mean, std = stored.get("mean"), stored.get("std")
    numbers = isinstance(mean, int | float) and isinstance(std, int | float)
    if not (numbers and math.isfinite(mean) and 0 < std < math.inf):
        raise ValueError(
            f"--normalize_reward: {source} stores no mean and positive std of its scores in its config.json (found "
            f"{mean!r} and {std!r}). Train it with openppo.cli.train_rm, which stores them, or leave the flag out; in "
            "PPO --reward_normalizer running needs none."
        )
    return mean, std


def own_tokenizer(
    flag: str,
    model: str,
    actor: str | PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase | None:
    """Tokenizer of ``model``; None if it knows all token ids of the policy, its name or config, by the same names.

    ``ValueError`` naming ``flag`` if it knows them and ``model`` has too few embeddings.
    """
    own = load_tokenizer(model, flag, trust_remote_code=trust_remote_code)
    vocabulary, ids = (
        own.get_vocab(),
        tokenizer.get_vocab(),
    )  # the former may hold more, such as a [PAD] of its own
    if any(vocabulary.get(token) != token_id for token, token_id in ids.items()):
        return own
    policy = (
        check_model(actor, "--pretrain", trust_remote_code) if isinstance(actor, str) else actor
    )
    largest = min(max(ids.values()), policy.get_text_config().vocab_size - 1)
    check_token_ids(
        check_model(model, flag, trust_remote_code), f"{flag} {model}", tokenizer, rows=[[largest]]
    )
    return None
