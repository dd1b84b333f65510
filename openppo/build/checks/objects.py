"""Problems of a caller's objects, each with a remedy."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.config.fields import given_options, names_file
from openppo.experience.estimators import ESTIMATORS
from openppo.experience.own_estimator import estimator_of
from openppo.models.actor import Actor
from openppo.models.scalar_head import HEAD, ScalarHeadModel

FLAGS = {
    "critic": "critic_pretrain",
    "reference": "ref_pretrain",
    "prompts": "prompt_data",
    "reward_fn": "reward_fn",
}
"""Options that name such an object, without dashes."""

HAS_OPTIMIZER: WeakSet[nn.Module] = WeakSet()
"""Models that a trainer of this process trains or has trained."""


def bare(model: Any) -> Any:
    """Return the model of transformers in ``model``."""
    return model.model if isinstance(model, Actor | ScalarHeadModel) else model


def problems_of_objects(
    config: TrainPPOConfig, objects: Mapping[str, Any], samples: bool, are_tasks: bool
) -> Iterator[str]:
    """Messages about objects that contradict options or the source, each with a remedy."""
    options = given_options(config)
    estimator = config.advantage.advantage_estimator
    for name, flag in FLAGS.items():
        if name in objects and options[flag]:
            yield f"{name}: --{flag} names one too; leave one of them out."

    for name in ("prompts", "reward_fn"):
        if name in objects and are_tasks:
            yield f"{name}: --tasks names those of each task; leave it out."
        elif name in objects and not samples:
            yield f"{name}: the source gives it; leave it out."

    if objects and config.orchestrator.rollout_ranks > 0:
        ranks = "--rollout_ranks know nothing but options"
        yield f"{', '.join(objects)}: {ranks}; leave --rollout_ranks out, or save the objects and name their files."
    if "actor" in objects and samples and config.generation.rollout_engine == "vllm":
        yield "actor: vLLM loads --pretrain from its folder; use --rollout_engine hf, or save the actor there."
    is_known = estimator in ESTIMATORS or names_file(estimator)
    if "critic" in objects and is_known and not estimator_of(config.advantage).uses_critic:
        yield f"critic: --advantage_estimator {estimator} has none; leave it out, or use --advantage_estimator gae."
    if "reference" in objects and config.kl.init_kl_coef == 0:
        yield "reference: --init_kl_coef 0 uses none; leave it out, or give a positive --init_kl_coef."
    if config.lora.load_in_4bit and ("actor" in objects or "critic" in objects):
        yield "--load_in_4bit: weights are quantized while they are loaded by name; leave it out, or actor and critic."

    for name in ("chat_template", "chat_template_kwargs"):
        if "tokenizer" in objects and options[name] is not None:
            yield f"--{name} is for a tokenizer that is read by name; leave it out, or the tokenizer."
    tokenizer = objects.get("tokenizer")
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        yield f"tokenizer: {type(tokenizer).__name__} is none of transformers; give one of AutoTokenizer."
    if "reward_fn" in objects and not callable(objects["reward_fn"]):
        yield "reward_fn: it cannot be called; give a function, or name a file with --reward_fn."
    prompts = objects.get("prompts", ())
    if isinstance(prompts, str) or not (callable(prompts) or isinstance(prompts, Iterable)):
        yield "prompts: give a list or generator of Prompt or texts, or a function that returns one."


def problems_of_models(config: TrainPPOConfig, models: Mapping[str, Any]) -> Iterator[str]:
    """Messages about models that the run cannot train or read, each with a remedy."""
    for role, model in models.items():
        wrapper: type = ScalarHeadModel if role == "critic" else Actor
        is_transformers = isinstance(bare(model), PreTrainedModel)
        if not is_transformers or not isinstance(model, PreTrainedModel | wrapper):
            kinds = f"neither a model of transformers without adapters nor {wrapper.__name__} around one"
            yield f"{role}: {type(model).__name__} is {kinds}; give one of them, and --lora_rank for adapters."
            return
        yield from _problems_of_weights(config, role, model)
        if isinstance(model, wrapper):
            yield from _problems_of_wrapper(config, role, model)

    addresses = {}
    for role, model in models.items():
        addresses[role] = {p.data_ptr() for p in bare(model).parameters() if p.numel()}
    for role, other_role in combinations(addresses, 2):
        if addresses[role] & addresses[other_role]:
            yield (
                f"{role} and {other_role} share weights, so one would change with the other; "
                "give copy.deepcopy of one."
            )


def _problems_of_weights(config: TrainPPOConfig, role: str, model: Any) -> Iterator[str]:
    """Messages about head, weights and attention of the model of transformers in ``model``."""
    bare_model = bare(model)
    parameters = list(bare_model.parameters())
    dtype = torch.bfloat16 if config.deepspeed.bf16 else torch.float32

    if not _has_head(role, model):
        load = "AutoModelForCausalLM"
        if role == "critic":
            load = 'get_llm_for_sequence_regression(NAME, "critic")'
        yield f"{role}: {type(bare_model).__name__} lacks the head of that role; load it with {load}."

    other_dtypes = {str(p.dtype) for p in parameters} - {"torch.float32", str(dtype)}
    if other_dtypes:
        names = ", ".join(other_dtypes)
        yield f"{role}: its weights are {names}, and the run's {dtype}; load it so, or change --bf16."
    if any(hasattr(p, "ds_id") for p in parameters):
        yield f"{role}: DeepSpeed has partitioned its weights already; make it whole, --zero_stage 3 partitions it."
    if bare_model in HAS_OPTIMIZER:
        yield f"{role}: an earlier trainer has it; make it anew, or save it and load it again."
    if role != "reference" and not any(p.requires_grad for p in parameters):
        yield f"{role}: none of its weights has requires_grad, so there is nothing to train; set it where it shall."

    if config.model.flash_attn and bare_model.config._attn_implementation != "flash_attention_2":
        load = "attn_implementation='flash_attention_2'"
        yield f"{role}: --flash_attn is for what is read by name; load it with {load}, or leave the flag out."


def _has_head(role: str, model: Any) -> bool:
    """True if ``model`` has the head of ``role``: values or logits."""
    bare_model = bare(model)
    if role == "critic":
        head = getattr(bare_model, HEAD, None)
        if head is None or head.weight.shape[0] != 1:
            return False
    elif bare_model.get_output_embeddings() is None:
        return False
    return bool(getattr(model, "role", role) == role)


def _problems_of_wrapper(config: TrainPPOConfig, role: str, model: Any) -> Iterator[str]:
    """Messages about an ``Actor`` or ``ScalarHeadModel`` whose settings contradict options."""
    rank = max(config.lora.lora_rank, config.model.critic_lora_rank or 0)
    if role != "reference" and rank > 0:
        wrapper = ScalarHeadModel if role == "critic" else Actor
        yield f"{role}: --lora_rank puts adapters on a model of transformers; give {wrapper.__name__}'s .model."
    if isinstance(model, Actor) and model.temperature != config.generation.temperature:
        option = f"--temperature is {config.generation.temperature}"
        yield f"{role}: its temperature is {model.temperature}, and {option}; make them equal."
