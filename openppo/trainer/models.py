"""Load and prepare the models of a PPO run: trained ones, and the reference."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from openppo.config import LoRAConfig, TrainPPOConfig
from openppo.models.adapters import AdapterOffReference
from openppo.models.loading import freeze_vision
from openppo.models.padding import pack_where_exact
from openppo.models.prefixes import share_where_exact
from openppo.models.sampled_ids import SampledIds
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.start_reference import StartReference
from openppo.strategy.trainable_model import TrainableModel
from openppo.trainer.batch_plan import BatchPlan
from openppo.trainer.objects import OwnObjects, Role
from openppo.trainer.roles import critic_lora, critic_start, load_actor, load_critic
from openppo.trainer.sharing import has_groups


class Models(NamedTuple):
    """Prepared models by role; those that the run does not have are None."""

    actor: Any
    critic: Any
    reference: Any


def load_models(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    objects: OwnObjects,
    plan: BatchPlan,
    ids_of: Callable[..., SampledIds],
) -> Models:
    """Load and prepare the models of a run, the critic first.

    ``ids_of`` returns the ids that the actor can sample, by the number of a model's logits.
    """
    prepared = partial(_prepared, config=config, strategy=strategy, objects=objects, ids_of=ids_of)

    critic = None
    if critic_start(config) is not None:
        critic = prepared("critic", plan.optimizer_steps())
    actor = prepared("actor", plan.optimizer_steps(without=config.ppo.frozen_actor_steps))
    return Models(actor, critic, _reference(config, actor, prepared))


def _prepared(
    role: Role,
    n_steps: int = 0,
    *,
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    objects: OwnObjects,
    ids_of: Callable[[int], SampledIds],
) -> Any:
    """Take or load the model of ``role``, and wrap it for training, or frozen as the reference.

    It is trained for ``n_steps`` optimizer steps. It packs rows, and shares their beginnings, if that is exact.
    ``ids_of`` returns the ids that the actor can sample, by the number of the model's logits.
    """
    module = objects.module(role, config.generation.temperature, _adapters(config, role))
    if module is None:
        with strategy.loading():
            module = _load(config, role)
    freeze_vision(module, config.model.freeze_vision_tower, config.model.freeze_connector)

    model: Any
    if role == "reference":
        model = strategy.prepare_frozen(module)
    elif role == "actor":
        rate = config.ppo.actor_learning_rate
        model = strategy.prepare(module, config.adam, rate, total_steps=n_steps)
    else:
        rate = config.ppo.critic_learning_rate
        model = strategy.prepare(module, config.adam, rate, total_steps=n_steps)

    with strategy.uncompiled():
        pack_where_exact(module, model, strategy.device, name=role)
        if has_groups(config):
            share_where_exact(module, model, strategy.device, name=role)

    if role != "critic":  # after the probes above, whose tiny rows may be of any ids
        module.sampled_ids = ids_of(module.model.config.get_text_config().vocab_size)
    return model


def _adapters(config: TrainPPOConfig, role: Role) -> LoRAConfig:
    """Adapters of the model of ``role``."""
    if role == "actor":
        return config.lora
    if role == "critic":
        return critic_lora(config)
    return LoRAConfig()


def _load(config: TrainPPOConfig, role: Role) -> Any:
    """Load the model of ``role`` by its name."""
    if role == "critic":
        return load_critic(config)
    return load_actor(config, reference=role == "reference")


def _reference(config: TrainPPOConfig, actor: TrainableModel, prepared: Callable[..., Any]) -> Any:
    """Reference of the KL penalty, None without it; with adapters the actor itself, as it began."""
    if config.kl.init_kl_coef == 0:
        return None
    if config.lora.lora_rank == 0 or config.model.ref_pretrain is not None:
        return prepared("reference")
    return AdapterOffReference(actor) if config.lora.lora_path is None else StartReference(actor)
