"""Sources of rewards from the options of a run: cheap checks first, models last."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import RewardConfig
from openppo.datasets import single_token_id
from openppo.datasets.image_families import check_images
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
from openppo.models.vision_models import placeholders
from openppo.rewards.function import FunctionScorer
from openppo.rewards.http import RemoteScorer
from openppo.rewards.model import (
    ModelScorer,
    RewardModelText,
    check_chats,
    policy_tokens,
    read_tokens,
)
from openppo.rewards.process import ProcessScorer, StepRenderer, make_step_encoder
from openppo.rewards.reward_function import RewardFunction
from openppo.rewards.scoring import CombinedScorer, Scorer
from openppo.rewards.verifiable import VerifiableScorer, make_verify
from openppo.strategy.comm import InferenceStrategy, check_same, collective
from openppo.types import Prompt, Sample
from openppo.user_code import find_callable

_FUNCTION_NAMES = "reward_fn", "compute_score"
"""Names to try if a function's location does not name it; the second is verl's."""


@dataclass(frozen=True)
class ScorerSetup:
    """Options of ``rewards``, and the parts of a run that its sources need.

    ``actor`` is ``--pretrain`` or its config; samples hold token ids of its ``tokenizer``. ``prompts`` are all
    prompts that will be scored: their columns, labels and chats are checked. ``size`` limits one forward. ``loading``
    holds ``bf16``, ``flash_attn`` and ``trust_remote_code`` for models. ``normalize`` uses the reward model's stored
    mean and std. With ``episodes`` whole conversations are scored. ``function_flag`` is the flag of the function in
    ``rewards``. ``function`` replaces the file of ``--reward_fn``. ``stand_in`` is as in ``Actor``.
    """

    rewards: RewardConfig
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
        """Build the scorer of all sources in ``rewards``; ``ValueError`` names the flag at fault.

        A single source without names of its own gives rewards named "reward". Several such sources give "reward_fn",
        "remote", the name of the verifier, "reward_model" and "prm".
        """
        rewards = self.rewards
        names = iter(rewards.names())
        self._refuse_images()
        if rewards.prm_pretrain is not None:
            # Checked before the weights of a reward model are loaded.
            self._config(rewards.prm_pretrain, "--prm_pretrain")

        scorers: list[Scorer] = []
        if rewards.reward_fn is not None:
            scorers.append(
                self._function(
                    rewards.reward_fn,
                    next(names),
                    flag=self.function_flag,
                    default_names=_FUNCTION_NAMES,
                )
            )
        if rewards.remote_rm_url is not None:
            scorers.append(self._remote(rewards.remote_rm_url, next(names)))
        for verifier, argument in rewards.verifiers().items():
            verify = make_verify(verifier, argument, self.prompts)
            scorers.append(VerifiableScorer(verify, self.tokenizer, next(names)))
        if rewards.reward_pretrain is not None:
            scorers.append(self._reward_model(rewards.reward_pretrain, next(names)))
        if rewards.prm_pretrain is not None:
            scorers.append(self._process_reward_model(rewards.prm_pretrain, next(names)))

        return scorers[0] if len(scorers) == 1 else CombinedScorer(scorers)

    def check(self) -> Scorer | None:
        """Raise the ``ValueError`` of ``build`` without loading a model; return the sources that need none."""
        self._refuse_images()
        if self.rewards.reward_pretrain is not None:
            self._reader(self.rewards.reward_pretrain)
        if self.rewards.prm_pretrain is not None:
            self._config(self.rewards.prm_pretrain, "--prm_pretrain")
        others = replace(self.rewards, reward_pretrain=None, prm_pretrain=None)
        return replace(self, rewards=others).build() if others.names() else None

    @property
    def has_images(self) -> bool:
        """True if any prompt has images."""
        return any(prompt.media for prompt in self.prompts)

    def _refuse_images(self) -> None:
        """Raise ``ValueError`` for a process reward model if prompts have images."""
        if self.rewards.prm_pretrain is not None and self.has_images:
            raise ValueError(
                "--prm_pretrain reads no images, and prompts have some: use --reward_fn."
            )

    def _config(self, model: str, flag: str) -> PreTrainedConfig:
        """Read a model's config; ``ValueError`` naming ``flag`` on all ranks if one of them cannot read it."""
        trust = self.loading["trust_remote_code"]
        return collective(self.strategy.comm, lambda: check_model(model, flag, trust))

    def _function(
        self, location: str, name: str, flag: str, default_names: Sequence[str]
    ) -> Scorer:
        """Scorer of the user's function, one of ``default_names`` unless ``location`` names it."""
        rewards = self.rewards
        weights = rewards.weights()
        return FunctionScorer(
            self._load_function(location, flag, default_names),
            self.tokenizer,
            name,
            error_value=rewards.reward_error_value,
            step_separator=rewards.step_separator,
            token_weight=weights.get(name, 1.0),
            weighted=None if flag == "--eval_reward_fn" else list(weights),
        )

    def _load_function(
        self, location: str, flag: str, default_names: Sequence[str]
    ) -> RewardFunction:
        """Load the user's function and check it on all ranks; start its processes if options ask for some."""
        comm = self.strategy.comm
        n_workers = self.rewards.reward_workers
        where = f"{flag} {location}"
        columns = {column for prompt in self.prompts for column in prompt.row}

        passed = self.function
        if flag == "--reward_fn" and passed is not None:
            function = collective(comm, lambda: RewardFunction(passed, where, columns))
            if n_workers > 0:
                logger.info(
                    "reward_fn stays in this process: --reward_workers are for functions in files"
                )
            return function

        loaded = collective(comm, lambda: find_callable(location, flag, default_names))
        function = collective(comm, lambda: RewardFunction(loaded.value, where, columns))
        check_same(comm, {flag: loaded.file.read_text()})
        if n_workers > 0:
            function.start_processes(
                loaded.file, loaded.name, n_workers, seconds=self.rewards.reward_timeout
            )
        return function

    def _remote(self, address: str, name: str) -> Scorer:
        """Scorer of ``--remote_rm_url``: reward servers that answer, or a function in a file."""
        if self.rewards.remote_is_file():
            return self._function(
                address, name, flag="--remote_rm_url", default_names=["reward_func"]
            )
        remote = RemoteScorer(self.rewards, self.tokenizer, name)
        remote.check()
        return remote

    def _reward_model(self, model: str, name: str) -> Scorer:
        """Load a frozen reward model, which reads the policy's token ids or, if its ids differ, the text."""
        flag = "--reward_pretrain"
        where = f"{flag} {model}"
        config, text_tokenizer, read = self._reader(model)
        inputs = "the policy's tokens"
        if text_tokenizer is not None:
            inputs = "the text, written again with its own tokenizer and chat template"
        logger.info("%s %s reads %s", flag, model, inputs)

        mean, std = stored_normalization(config, where) if self.normalize else (0.0, 1.0)
        with model_error_context(flag, model, "reward model"), self.strategy.loading():
            prefix = self.value_head_prefix
            reward = get_llm_for_sequence_regression(
                model, "reward", value_head_prefix=prefix, **self.loading
            )
        frozen = self.strategy.prepare_frozen(reward)
        pack_where_exact(reward, frozen, self.strategy.device, name="reward model")

        sees = text_tokenizer is None and bool(placeholders(config))
        # Set after the checks, whose rows may hold image tokens.
        reward.use_stand_in(self.stand_in if sees else None)
        return ModelScorer(
            frozen,
            self.size,
            pad_token_id(text_tokenizer or self.tokenizer),
            comm=self.strategy.comm,
            device=self.strategy.device,
            name=name,
            encode=read,
            sees=sees,
            mean=mean,
            std=std,
        )

    def _reader(
        self, model: str
    ) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase | None, Callable[[Sample], list[int]]]:
        """A reward model's config, its tokenizer unless it reads the policy's ids, and its ids of a sample."""
        flag = "--reward_pretrain"
        where = f"{flag} {model}"
        config = self._config(model, flag)
        text_tokenizer = own_tokenizer(
            flag,
            model,
            self.actor,
            tokenizer=self.tokenizer,
            trust_remote_code=self.loading["trust_remote_code"],
        )
        if self.has_images:
            actor = self.actor
            if isinstance(actor, str):
                actor = check_model(actor, "--pretrain", self.loading["trust_remote_code"])
            reads_ids = text_tokenizer is None
            _check_reads_images(config, actor, where, reads_ids=reads_ids)

        tokenizer = self.tokenizer
        encode: Callable[[Sample], list[int]] = partial(policy_tokens, tokenizer)
        rows: list[list[int]] = []
        if text_tokenizer is not None:
            tokenizer = text_tokenizer
            text = RewardModelText(self.tokenizer, tokenizer, where)
            text.check(self.prompts, self.episodes)
            encode = text
            rows = [[tokenizer.eos_token_id]]
        check_token_ids(config, where, tokenizer, rows=rows)  # checks PAD too

        read = partial(read_tokens, encode=encode, config=config, where=where, tokenizer=tokenizer)
        return config, text_tokenizer, read

    def _process_reward_model(self, model: str, name: str) -> Scorer:
        """Load a frozen process reward model, which reads prompt and steps as ``train_prm`` renders them."""
        flag = "--prm_pretrain"
        where = f"{flag} {model}"
        config = self._config(model, flag)
        trust = self.loading["trust_remote_code"]
        tokenizer = load_tokenizer(model, flag, trust_remote_code=trust)
        encode = make_step_encoder(self.rewards, tokenizer, where, template=self.input_template)
        good, bad = (
            single_token_id(tokenizer, token, "prm_reward_tokens", flag_of_model=flag)
            for token in self.rewards.prm_reward_tokens
        )

        render = StepRenderer(encode, config, where)
        check_token_ids(config, where, tokenizer, rows=[[good, bad]])
        if self.rewards.prm_apply_chat_template:
            check_chats(
                self.prompts,
                where,
                "prm_apply_chat_template",
                encode=lambda prompt: render(prompt, ["a"]),
            )

        with model_error_context(flag, model, "process reward model"), self.strategy.loading():
            module = ProcessRewardModel(Actor(model, **self.loading).model)
        return ProcessScorer(
            self.strategy.prepare_frozen(module),
            render,
            self.tokenizer,
            reward_ids=(good, bad),
            options=self.rewards,
            where=where,
            context=context_length(config),
            pad_token_id=pad_token_id(tokenizer),
            size=self.size,
            comm=self.strategy.comm,
            device=self.strategy.device,
            name=name,
        )


def _check_reads_images(
    config: PreTrainedConfig, actor: PreTrainedConfig, where: str, reads_ids: bool
) -> None:
    """Raise ``ValueError`` for a reward model that does not read images as the policy does."""
    if not reads_ids or placeholders(config) != placeholders(actor):
        raise ValueError(
            f"{where} does not read images as --pretrain does: "
            "use a model of its family, or --reward_fn."
        )
    check_images(config, where)


def stored_normalization(config: PreTrainedConfig, where: str) -> tuple[float, float]:
    """Mean and std of a reward model's scores, ``mean`` and ``std`` in its config.json as in OpenRLHF.

    ``ValueError`` naming ``--normalize_reward`` and ``where`` if there are none.
    """
    stored: Any = config.to_dict()
    mean = stored.get("mean")
    std = stored.get("std")
    are_numbers = isinstance(mean, int | float) and isinstance(std, int | float)
    if not (are_numbers and math.isfinite(mean) and 0 < std < math.inf):
        raise ValueError(
            f"--normalize_reward: {where} stores no mean and positive std of its scores in its config.json (found "
            f"{mean!r} and {std!r}). Train it with openppo.cli.train_rm, which stores them, or leave the flag out; in "
            "PPO --normalize_reward running needs none."
        )
    return mean, std


def own_tokenizer(
    flag: str,
    model: str,
    actor: str | PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase | None:
    """Tokenizer of ``model``; None if it gives all token ids of the policy the same names.

    ``actor`` is the policy's name or config. ``ValueError`` naming ``flag`` if ``model`` knows the ids and has too few
    embeddings.
    """
    other = load_tokenizer(model, flag, trust_remote_code=trust_remote_code)
    vocabulary = other.get_vocab()  # may hold more tokens, such as a [PAD] of its own
    policy_vocabulary = tokenizer.get_vocab()
    if any(vocabulary.get(token) != token_id for token, token_id in policy_vocabulary.items()):
        return other

    policy = actor
    if isinstance(policy, str):
        policy = check_model(policy, "--pretrain", trust_remote_code)
    largest = min(max(policy_vocabulary.values()), policy.get_text_config().vocab_size - 1)
    config = check_model(model, flag, trust_remote_code)
    check_token_ids(config, f"{flag} {model}", tokenizer, rows=[[largest]])
    return None
