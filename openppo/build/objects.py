"""Objects of a caller in place of names: models, tokenizer, prompts, reward function."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal, TypedDict

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from openppo import logger
from openppo.build.checks.objects import (
    FLAGS,
    HAS_OPTIMIZER,
    bare,
    problems_of_models,
    problems_of_objects,
)
from openppo.config import LoRAConfig, TrainPPOConfig
from openppo.config.data import PromptDataConfig
from openppo.config.fields import raise_first, require
from openppo.datasets import render_prompt
from openppo.datasets.examples import fitted_prompt
from openppo.datasets.template_checks import name_rendered
from openppo.models.actor import Actor
from openppo.models.attention import use_fast_attention
from openppo.models.pretrained import check_token_ids
from openppo.models.scalar_head import ScalarHeadModel
from openppo.strategy.comm import check_same, collective
from openppo.types import Comm, Prompt
from openppo.user_code import leaving_no_trace

GIVEN = "(given in Python)"
"""Name of an object in the config."""

Role = Literal["actor", "critic", "reference"]
Prompts = Iterable[str | Prompt]

_SAMPLED = 1024
"""Elements of a tensor, evenly spread, that stand for it in a fingerprint."""


@dataclass(frozen=True, eq=False)
class OwnObjects:
    """Objects of the caller; None means that options name it.

    A model is a Hugging Face model, or an ``Actor`` or ``ScalarHeadModel`` around one; actor and critic are trained in
    place. ``prompts`` yields prompts or texts, or returns them when it is called with the tokenizer.
    """

    actor: PreTrainedModel | Actor | None = None
    critic: PreTrainedModel | ScalarHeadModel | None = None
    reference: PreTrainedModel | Actor | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: Prompts | Callable[[PreTrainedTokenizerBase], Prompts] | None = None
    reward_fn: Callable[..., Any] | None = None

    @property
    def models(self) -> dict[str, Any]:
        """Models by role."""
        models = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        return {role: model for role, model in models.items() if model is not None}

    @property
    def configs(self) -> dict[str, PreTrainedConfig]:
        """Configs of the models by the flag that would name them."""
        configs = {}
        for role, model in self.models.items():
            flag = FLAGS.get(role, "pretrain")
            configs[f"--{flag}"] = bare(model).config
        return configs

    def named(
        self, config: TrainPPOConfig, comm: Comm, samples: bool, are_tasks: bool
    ) -> TrainPPOConfig:
        """Check the objects against ``config``; return it with ``GIVEN`` as the name of each object.

        The run ``samples`` responses, or a source of the caller gives them; prompts may be those of several tasks.
        Raises ``ValueError`` on all ranks.
        """
        objects = {name: value for name, value in vars(self).items() if value is not None}
        check_same(comm, {"what is given in Python": list(objects)})
        problems = chain(
            problems_of_objects(config, objects, samples, are_tasks=are_tasks),
            problems_of_models(config, self.models),
        )
        collective(comm, lambda: raise_first(problems))
        check_same(comm, self.fingerprints())
        if objects:
            logger.info("given in Python, not read by name: %s", ", ".join(objects))

        flags = [flag for name, flag in FLAGS.items() if name in objects]
        groups: dict[str, Any] = {
            "model": config.model,
            "data": config.data,
            "rewards": config.rewards,
        }
        for name, options in groups.items():
            names = {flag: GIVEN for flag in flags if flag in vars(options)}
            groups[name] = replace(options, **names)
        return replace(config, **groups)

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the models with their current weights, by role."""
        return {role: _fingerprint(bare(model)) for role, model in self.models.items()}

    def read_prompts(
        self, tokenizer: PreTrainedTokenizerBase, options: PromptDataConfig, empty: bool
    ) -> list[Prompt]:
        """Read at most ``--max_samples`` prompts; drop those longer than ``--prompt_max_len`` tokens.

        An agent's may be ``empty``. ``ValueError`` names the item that is no prompt.
        """
        with leaving_no_trace("prompts"):
            values: Any = self.prompts(tokenizer) if callable(self.prompts) else self.prompts
            items = list(islice(values, options.max_samples))
        if options.apply_chat_template:
            name_rendered(items, tokenizer, "prompts")

        kept = []
        for number, item in enumerate(items, start=1):
            try:
                prompt = _prompt_of(item, tokenizer, options, empty=empty)
            except ValueError as error:
                raise ValueError(f"prompts, item {number}: {error}") from error
            if len(prompt.token_ids) <= options.prompt_max_len:
                kept.append(prompt)

        n_dropped = len(items) - len(kept)
        if n_dropped > 0:
            logger.warning(
                "prompts: dropped %d of %d with more than --prompt_max_len tokens",
                n_dropped,
                len(items),
            )
        require(
            kept,
            f"prompts: {len(items)} are given, none of at most --prompt_max_len {options.prompt_max_len}.",
        )
        return kept

    def check_vocabularies(
        self, tokenizer: PreTrainedTokenizerBase, actor_config: PreTrainedConfig
    ) -> None:
        """Raise ``ValueError`` if a model lacks an embedding of a token that the actor may sample."""
        last_of_tokenizer = max(tokenizer.get_vocab().values())
        last_of_actor = actor_config.get_text_config().vocab_size - 1
        largest = min(last_of_tokenizer, last_of_actor)
        for role, model in self.models.items():
            check_token_ids(bare(model).config, f"{role} {GIVEN}", tokenizer, rows=[[largest]])

    def module(self, role: Role, temperature: float, lora: LoRAConfig) -> Any:
        """Return the model of ``role`` with adapters of ``lora``; None if it is read by name."""
        model = self.models.get(role)
        if model is None:
            return None
        use_fast_attention(bare(model))
        if role != "reference":
            HAS_OPTIMIZER.add(bare(model))
        if not isinstance(model, PreTrainedModel):
            return model
        if role == "critic":
            return ScalarHeadModel(model, "critic", lora)
        return Actor(model, temperature=temperature, **vars(lora))


class Given(TypedDict, total=False):
    """Keywords that fill ``OwnObjects``, for type checkers."""

    actor: PreTrainedModel | Actor
    critic: PreTrainedModel | ScalarHeadModel
    reference: PreTrainedModel | Actor
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts | Callable[[PreTrainedTokenizerBase], Prompts]
    reward_fn: Callable[..., Any]


NOTHING = OwnObjects()
"""No objects: all is read by name."""


def _prompt_of(
    item: Any, tokenizer: PreTrainedTokenizerBase, options: PromptDataConfig, empty: bool
) -> Prompt:
    """Make a prompt of an item, fitted to the options; ``ValueError`` if that is impossible."""
    prompt = item if isinstance(item, Prompt) else render_prompt(item, tokenizer, options)
    ids = prompt.token_ids
    are_ids = isinstance(ids, list) and {*map(type, ids)} <= {int} and min(ids, default=0) >= 0
    require(are_ids, "token_ids must be a list of ints, as tensor.tolist() gives.")
    require(
        ids or empty,
        "token_ids is empty, so there is nothing to respond to: leave it out.",
    )
    require(not prompt.task, "task is for runs with --tasks: leave it empty.")
    return fitted_prompt(prompt, tokenizer, options)


def _fingerprint(model: PreTrainedModel) -> str:
    """Digest of names, shapes and dtypes of all tensors, and of elements of each."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        stride = 1 + tensor.numel() // _SAMPLED
        sample = tensor.detach().flatten()[::stride].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
