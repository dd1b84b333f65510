"""What a caller of ``build_ppo_trainer`` gives as an object, where options would name it: models, prompts, a reward."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice
from typing import Any, Literal, TypedDict
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import LoRAConfig, TrainPPOConfig
from openppo.config.data import PromptDataConfig
from openppo.config.fields import given_options, raise_first, require
from openppo.datasets import render_prompt
from openppo.datasets.examples import fitted_prompt
from openppo.datasets.template_checks import name_rendered
from openppo.experience.estimators import ESTIMATORS
from openppo.models.actor import Actor
from openppo.models.attention import use_fast_attention
from openppo.models.pretrained import check_token_ids
from openppo.models.scalar_head import HEAD, ScalarHeadModel
from openppo.strategy.comm import check_same, collective
from openppo.types import Comm, Prompt
from openppo.user_code import leaving_no_trace

GIVEN = "(given in Python)"
"""Stands in the config for the name of an object."""

Role = Literal["actor", "critic", "reference"]
Prompts = Iterable[str | Prompt]
_FLAGS = {
    "critic": "critic_pretrain",
    "reference": "ref_pretrain",
    "prompts": "prompt_data",
    "reward_fn": "reward_fn",
}
_HAS_OPTIMIZER: WeakSet[nn.Module] = WeakSet()  # of an earlier trainer
_SAMPLED = 1024  # elements of a tensor, evenly spread, stand for it in a fingerprint


@dataclass(frozen=True, eq=False)
class OwnObjects:
    """Objects of the caller; what is None is read by the name that options give it.

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
        return {
            role: model
            for role in ("actor", "critic", "reference")
            if (model := vars(self)[role]) is not None
        }

    @property
    def configs(self) -> dict[str, PreTrainedConfig]:
        """Configs of the models by the flag that would name them."""
        return {
            f"--{_FLAGS.get(role, 'pretrain')}": _bare(model).config
            for role, model in self.models.items()
        }

    def named(
        self, config: TrainPPOConfig, comm: Comm, samples: bool, are_tasks: bool
    ) -> TrainPPOConfig:
        """``config`` with ``GIVEN`` as the name of each object; ``ValueError`` on all ranks for what cannot work.

        Whether the run ``samples`` responses, and whether to the prompts of several tasks.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_same(comm, {"what is given in Python": list(given)})
        problems = chain(
            _problems(config, given, samples, are_tasks=are_tasks),
            _problems_of_models(config, self.models),
        )
        collective(comm, lambda: raise_first(problems))
        check_same(comm, self.fingerprints())
        if given:
            logger.info("given in Python, not read by name: %s", ", ".join(given))
        names = {flag: GIVEN for name, flag in _FLAGS.items() if name in given}
        groups: dict[str, Any] = {
            "model": config.model,
            "data": config.data,
            "rewards": config.rewards,
        }
        for name, group in groups.items():
            groups[name] = replace(group, **{flag: GIVEN for flag in names if flag in vars(group)})
        return replace(config, **groups)

    def fingerprints(self) -> dict[str, str]:
        """Of the models as they are now, by role."""
        return {role: _fingerprint(_bare(model)) for role, model in self.models.items()}

    def read_prompts(
        self, tokenizer: PreTrainedTokenizerBase, options: PromptDataConfig, empty: bool
    ) -> list[Prompt]:
        """At most ``--max_samples`` prompts, without those longer than ``--prompt_max_len`` tokens.

        An agent's may be ``empty``. ``ValueError`` names what is no prompt.
        """
        with leaving_no_trace("prompts"):
            made: Any = self.prompts(tokenizer) if callable(self.prompts) else self.prompts
            given = list(islice(made, options.max_samples))
        if options.apply_chat_template:
            name_rendered(given, tokenizer, "prompts")
        kept = []
        for number, value in enumerate(given, start=1):
            try:
                prompt = (
                    value if isinstance(value, Prompt) else render_prompt(value, tokenizer, options)
                )
                ids = prompt.token_ids
                are_ids = (
                    isinstance(ids, list)
                    and {*map(type, ids)} <= {int}
                    and min(ids, default=0) >= 0
                )
                require(are_ids, "token_ids must be a list of ints, as tensor.tolist() gives.")
                require(
                    ids or empty,
                    "token_ids is empty, so there is nothing to respond to: leave it out.",
                )
                require(not prompt.task, "task is for runs with --tasks: leave it empty.")
                prompt = fitted_prompt(prompt, tokenizer, options)
            except ValueError as error:
                raise ValueError(f"prompts, item {number}: {error}") from error
            if len(prompt.token_ids) <= options.prompt_max_len:
                kept.append(prompt)
        if dropped := len(given) - len(kept):
            logger.warning(
                "prompts: dropped %d of %d with more than --prompt_max_len tokens",
                dropped,
                len(given),
            )
        require(
            kept,
            f"prompts: {len(given)} are given, none of at most --prompt_max_len {options.prompt_max_len}.",
        )
        return kept

    def check_vocabularies(
        self, tokenizer: PreTrainedTokenizerBase, actor_config: PreTrainedConfig
    ) -> None:
        """``ValueError`` for a critic or reference without an embedding of a token that the actor may sample."""
        largest = min(
            max(tokenizer.get_vocab().values()), actor_config.get_text_config().vocab_size - 1
        )
        for role, model in self.models.items():
            check_token_ids(_bare(model).config, f"{role} {GIVEN}", tokenizer, rows=[[largest]])

    def module(self, role: Role, temperature: float, lora: LoRAConfig) -> Any:
        """The model of ``role`` as it is trained or read, with adapters of ``lora``; None if it is not given."""
        if (model := self.models.get(role)) is None:
            return None
        use_fast_attention(_bare(model))
        if role != "reference":
            _HAS_OPTIMIZER.add(_bare(model))
        if not isinstance(model, PreTrainedModel):
            return model
        return (
            ScalarHeadModel(model, "critic", lora)
            if role == "critic"
            else Actor(model, temperature=temperature, **vars(lora))
        )


class Given(TypedDict, total=False):
    """Keywords that fill ``OwnObjects``, for type checkers."""

    actor: PreTrainedModel | Actor
    critic: PreTrainedModel | ScalarHeadModel
    reference: PreTrainedModel | Actor
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts | Callable[[PreTrainedTokenizerBase], Prompts]
    reward_fn: Callable[..., Any]


NOTHING = OwnObjects()


def _problems(
    config: TrainPPOConfig, given: Mapping[str, Any], samples: bool, are_tasks: bool
) -> Iterator[str]:
    """Messages about objects that contradict options or the source, each with a remedy."""
    options, estimator = given_options(config), config.advantage.advantage_estimator
    for name, flag in _FLAGS.items():
        if name in given and options[flag]:
            yield f"{name}: --{flag} names one too; leave one of them out."
    for name in ("prompts", "reward_fn"):
        if name in given and (are_tasks or not samples):
            yield f"{name}: {'--tasks names those of each task' if are_tasks else 'the source gives it'}; leave it out."
    if given and config.orchestrator.rollout_ranks > 0:
        ranks = "--rollout_ranks know nothing but options"
        yield f"{', '.join(given)}: {ranks}; leave --rollout_ranks out, or save the objects and name their files."
    if "actor" in given and samples and config.generation.rollout_engine == "vllm":
        yield "actor: vLLM loads --pretrain from its folder; use --rollout_engine hf, or save the actor there."
    if "critic" in given and estimator in ESTIMATORS and not ESTIMATORS[estimator].uses_critic:
        yield f"critic: --advantage_estimator {estimator} has none; leave it out, or use --advantage_estimator gae."
    if "reference" in given and config.kl.init_kl_coef == 0:
        yield "reference: --init_kl_coef 0 uses none; leave it out, or give a positive --init_kl_coef."
    if config.lora.load_in_4bit and ("actor" in given or "critic" in given):
        yield "--load_in_4bit: weights are quantized while they are loaded by name; leave it out, or actor and critic."
    for name in ("chat_template", "chat_template_kwargs"):
        if "tokenizer" in given and options[name] is not None:
            yield f"--{name} is for a tokenizer that is read by name; leave it out, or the tokenizer."
    if not isinstance(given.get("tokenizer", None), PreTrainedTokenizerBase | None):
        yield f"tokenizer: {type(given['tokenizer']).__name__} is none of transformers; give one of AutoTokenizer."
    if not callable(given.get("reward_fn", print)):
        yield "reward_fn: it cannot be called; give a function, or name a file with --reward_fn."
    prompts = given.get("prompts", ())
    if isinstance(prompts, str) or not (callable(prompts) or isinstance(prompts, Iterable)):
        yield "prompts: give a list or generator of Prompt or texts, or a function that returns one."


def _problems_of_models(config: TrainPPOConfig, models: Mapping[str, Any]) -> Iterator[str]:
    """Messages about models that the run cannot train or read, each with a remedy."""
    wanted = torch.bfloat16 if config.deepspeed.bf16 else torch.float32
    for role, model in models.items():
        bare, wrapper = _bare(model), ScalarHeadModel if role == "critic" else Actor
        if not isinstance(bare, PreTrainedModel) or not isinstance(
            model, PreTrainedModel | wrapper
        ):
            what = f"neither a model of transformers without adapters nor {wrapper.__name__} around one"
            yield f"{role}: {type(model).__name__} is {what}; give one of them, and --lora_rank for adapters."
            return
        head: Any = getattr(bare, HEAD, None) if role == "critic" else bare.get_output_embeddings()
        if (
            head is None
            or (role == "critic" and head.weight.shape[0] != 1)
            or getattr(model, "role", role) != role
        ):
            load = (
                'get_llm_for_sequence_regression(NAME, "critic")'
                if role == "critic"
                else "AutoModelForCausalLM"
            )
            yield f"{role}: {type(bare).__name__} lacks the head of that role; load it with {load}."
        if strange := {str(p.dtype) for p in bare.parameters()} - {"torch.float32", str(wanted)}:
            yield f"{role}: its weights are {', '.join(strange)}, and the run's {wanted}; load it so, or change --bf16."
        if any(hasattr(p, "ds_id") for p in bare.parameters()):
            yield f"{role}: DeepSpeed has partitioned its weights already; make it whole, --zero_stage 3 partitions it."
        if bare in _HAS_OPTIMIZER:
            yield f"{role}: an earlier trainer has it; make it anew, or save it and load it again."
        if role != "reference" and not any(p.requires_grad for p in bare.parameters()):
            yield f"{role}: none of its weights has requires_grad, so there is nothing to train; set it where it shall."
        if config.model.flash_attn and bare.config._attn_implementation != "flash_attention_2":
            load = "attn_implementation='flash_attention_2'"
            yield f"{role}: --flash_attn is for what is read by name; load it with {load}, or leave the flag out."
        if isinstance(model, PreTrainedModel):
            continue
        if (
            role != "reference"
            and max(config.lora.lora_rank, config.model.critic_lora_rank or 0) > 0
        ):
            yield f"{role}: --lora_rank puts adapters on a model of transformers; give {wrapper.__name__}'s .model."
        if isinstance(model, Actor) and model.temperature != config.generation.temperature:
            other = f"--temperature is {config.generation.temperature}"
            yield f"{role}: its temperature is {model.temperature}, and {other}; make them equal."
    places = {
        role: {p.data_ptr() for p in _bare(model).parameters() if p.numel()}
        for role, model in models.items()
    }
    for one, other in combinations(places, 2):
        if places[one] & places[other]:
            yield f"{one} and {other} share weights, so one would change with the other; give copy.deepcopy of one."


def _bare(model: Any) -> Any:
    """The model of transformers in ``model``."""
    return model.model if isinstance(model, Actor | ScalarHeadModel) else model


def _fingerprint(model: PreTrainedModel) -> str:
    """Of names, shapes and types of all tensors, and of elements of each."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        sample = tensor.detach().flatten()[:: 1 + tensor.numel() // _SAMPLED].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
