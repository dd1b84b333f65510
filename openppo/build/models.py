"""Fourth phase: the models of a run, trained ones and the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openppo.build.check import Checked
from openppo.build.data import LoadedData
from openppo.build.objects import OwnObjects, Role
from openppo.build.rewards import Rewards
from openppo.build.roles import critic_lora, critic_start, load_actor, load_critic
from openppo.config import LoRAConfig, TrainPPOConfig
from openppo.config.resolved import Resolved
from openppo.models.adapters import AdapterOffReference
from openppo.models.loading import freeze_vision
from openppo.models.padding import pack_where_exact
from openppo.models.prefixes import share_where_exact
from openppo.models.pretrained import sampled_ids
from openppo.models.sampled_ids import SampledIds
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.start_reference import StartReference
from openppo.strategy.trainable_model import TrainableModel


@dataclass(frozen=True)
class Models:
    """Prepared models by role; those that the run does not have are None.

    ``sampled_ids`` are the ids that the actor can sample. ``resolved`` are the sizes of batches, and their layout,
    which all models must be able to read.
    """

    actor: Any
    critic: Any
    reference: Any
    sampled_ids: SampledIds
    resolved: Resolved

    @property
    def by_role(self) -> dict[str, Any]:
        """The models that the run has."""
        models = {"actor": self.actor, "critic": self.critic, "reference": self.reference}
        return {role: model for role, model in models.items() if model is not None}


def load_models(checked: Checked, data: LoadedData, rewards: Rewards) -> Models:
    """Load and prepare the models of a run, after those of ``rewards``, the critic first."""
    config = checked.config
    strategy = checked.strategy
    ids_of = partial(sampled_ids, checked.tokenizer, checked.actor_config)
    prepared = partial(
        _prepared, config=config, strategy=strategy, objects=checked.objects, ids_of=ids_of
    )

    critic = None
    if critic_start(config) is not None:
        critic = prepared("critic", data.plan.optimizer_steps())
    n_steps = data.plan.optimizer_steps(without=config.ppo.frozen_actor_steps)
    actor = prepared("actor", n_steps)
    reference = _reference(config, actor, prepared)

    shares_prompts = _all_share_prompts(config, strategy, [actor, critic, reference])
    return Models(
        actor=actor,
        critic=critic,
        reference=reference,
        sampled_ids=ids_of(),
        resolved=replace(data.resolved, shares_prompts=shares_prompts),
    )


def _all_share_prompts(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, models: Sequence[Any]
) -> bool:
    """True if all models on all ranks can read rows that share their beginning; batches have more padding without."""
    modules = [getattr(model, "module", model) for model in models if model is not None]
    some_cannot = strategy.any_rank(not all(module.shares_prompts for module in modules))
    return config.ppo.share_prompts == "auto" and not some_cannot


def has_groups(config: TrainPPOConfig) -> bool:
    """True if samples may begin alike, and ``--share_prompts`` allows to share that."""
    if config.ppo.share_prompts != "auto":
        return False
    has_several_samples = config.ppo.n_samples_per_prompt > 1
    return bool(has_several_samples or config.agents.form or config.orchestrator.tasks)


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
        module.normalize_over(ids_of(module.model.config.get_text_config().vocab_size))
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
