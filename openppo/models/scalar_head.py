"""Critic and reward models: a transformer with a scalar head, read at different places."""

from __future__ import annotations

import copy
import re
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS

from openppo import logger
from openppo.config import LoRAConfig
from openppo.model_inputs import ModelInputs
from openppo.models.adapters import add_adapters, lora_options, merge_adapters
from openppo.models.argument_order import check_inputs
from openppo.models.attention import use_fast_attention
from openppo.models.batch_model import BatchModel
from openppo.models.disabling import disable_extras
from openppo.models.loading import load_options, load_weights
from openppo.models.media_inputs import media_inputs
from openppo.models.padding import on_device, pad_width, with_stand_in
from openppo.models.prefixes import row_inputs
from openppo.models.pretrained import (
    adapter_config,
    base_model_of,
    forbid_remote_code,
    is_peft_folder,
    language_model_class,
    load_config,
)
from openppo.models.saved_adapters import HEAD_TASK, whole_weights

Role = Literal["critic", "reward"]
HEAD = "score"


class ScalarHeadModel(BatchModel):
    """A Hugging Face classifier ``.model``: a causal transformer with a linear head of one output.

    As ``critic`` the forward returns values (B, L), entry t the value of the state in which token t was chosen:
    the head's output at t - 1, and 0 at the first token. As ``reward`` it returns scores (B,), the head's output
    at the last real token of each row. Both float32. With a LoRA rank ``.model`` is a PEFT model.

    >>> critic = get_llm_for_sequence_regression(tiny, "critic")  # a ScalarHeadModel
    >>> values = critic(ModelInputs.of_ids([[5, 6, 7]], pad_token_id=0))
    >>> values.shape, values[0, 0].item()
    (torch.Size([1, 3]), 0.0)
    """

    def __init__(self, model: PreTrainedModel, role: Role, lora: LoRAConfig | None = None) -> None:
        super().__init__()
        disable_extras(model)
        self.model: Any = model
        self.role: Role = role
        if lora is not None and lora.lora_rank > 0:
            self.model = add_adapters(model, lora, "SEQ_CLS")

    @property
    def classifier(self) -> PreTrainedModel:
        """The Hugging Face classifier, with adapters in its layers if there are any."""
        if isinstance(self.model, PreTrainedModel):
            return self.model
        classifier: PreTrainedModel = self.model.get_base_model()
        return classifier

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Return values (B, L) or scores (B,), float32."""
        order = "(inputs), ModelInputs: values (B, L) are those of all tokens, so there is no num_actions"
        check_inputs(inputs, order)
        n_rows, length = inputs.sequences.shape
        inputs = with_stand_in(self.stand_in, inputs)
        outputs = self._token_outputs(inputs)

        if self.role == "critic":
            values = F.pad(outputs[:, :-1], (1, 0))
            return values[:n_rows, :length]
        mask = inputs.attention_mask.bool()
        places = torch.arange(mask.shape[1], device=mask.device)
        last = torch.where(mask, places, 0).amax(-1, keepdim=True)  # (B, 1)
        scores = outputs.gather(1, on_device(last, outputs.device))
        return scores[:n_rows, 0]

    def _token_outputs(self, inputs: ModelInputs) -> Tensor:
        """Outputs of the head (B, L); the rows go through the model as one row or padded."""
        if self.packs_rows or self.shares_prompts:
            one_row = row_inputs(self, inputs)
            if one_row is not None:
                arguments, in_row = one_row
                outputs = self._outputs(**arguments)[0]  # (T,)
                return outputs[on_device(in_row, outputs.device)].view(inputs.sequences.shape)

        # Without attention mask for the reason given in Actor.forward.
        padded = pad_width(inputs, self.model)
        arguments = {"input_ids": padded.sequences}
        arguments |= media_inputs(self.classifier.base_model, padded)
        return self._outputs(**arguments)[:, : inputs.sequences.shape[1]]

    def _outputs(self, **arguments: Any) -> Tensor:
        """Outputs of the head, float32, for each token of ``input_ids``."""
        hidden = self.classifier.base_model(**arguments, use_cache=False).last_hidden_state
        return self.classifier.get_submodule(HEAD)(hidden)[..., 0].float()


class HeadOnTransformer(PreTrainedModel):
    """Transformer of a causal language model with a linear head ``score``, like transformers' classifiers.

    When saved, it holds the transformer's weights under the names of the causal language model, and ``score.weight``.
    """

    causal: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        children = self.causal(config).named_children()
        self._transformer, transformer = next(
            (name, child) for name, child in children if isinstance(child, PreTrainedModel)
        )
        self.add_module(self._transformer, transformer)

        hidden_size: int = config.get_text_config().hidden_size
        self.score = nn.Linear(hidden_size, config.num_labels or 1, bias=False)
        self.post_init()

    @property
    def base_model(self) -> nn.Module:
        """The transformer, even if ``base_model_prefix`` is not its name (Llama 4)."""
        return self.get_submodule(self._transformer)


def classifier_of(config: PreTrainedConfig) -> tuple[Any, PreTrainedConfig]:
    """Return the classifier class for a config, and a copy of the config with one label.

    The class is transformers' own if there is one. For a model that also reads images it may be the classifier of the
    language model alone, with that part of the config.
    """
    config = copy.deepcopy(config)
    config.num_labels = 1

    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    if language_model_class(config) is AutoModelForImageTextToText:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if type(config) in CLASSIFIERS or type(config) not in mapping:
        return AutoModelForSequenceClassification, config

    causal: Any = mapping[type(config)]
    if not isinstance(config, causal.config_class):
        config = config.get_text_config()
        config.num_labels = 1
    return _on_transformer_of(causal), config


@cache
def _on_transformer_of(causal: type[PreTrainedModel]) -> type[HeadOnTransformer]:
    """Classifier class of ``causal``, named as transformers would name it."""
    bases = (base for base in causal.__mro__ if base.__name__.endswith("PreTrainedModel"))
    family = next(bases)
    name = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", causal.__name__)
    attributes = {
        "causal": causal,
        "base_model_prefix": causal.base_model_prefix,
        "__module__": causal.__module__,
    }
    return type(f"{name}ForSequenceClassification", (HeadOnTransformer, family), attributes)


class ProcessRewardModel(nn.Module):
    """A Hugging Face causal language model ``.model``; the forward returns its logits at chosen places."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: ModelInputs, places: Tensor) -> Tensor:
        """Return logits (N, V) at the N true ``places``, bool (B, L), row by row.

        The model runs even if no place is true, as partitioned weights require.
        """
        check_inputs(inputs, "(inputs, places), with inputs of ModelInputs")
        columns = places.any(0).nonzero()[:, 0]  # (K,)
        # Without attention mask for the reason given in Actor.forward.
        ids = pad_width(inputs, self.model).sequences
        outputs = self.model(input_ids=ids, logits_to_keep=columns, use_cache=False)
        logits: Tensor = outputs.logits  # (B, K, V)
        return logits[places[:, columns]]


def get_llm_for_sequence_regression(
    name: str,
    role: Role,
    *,
    bf16: bool = False,
    flash_attn: bool = False,
    value_head_prefix: str = HEAD,
    init_value_head: bool | None = None,
    trust_remote_code: bool = False,
    **lora: Any,
) -> ScalarHeadModel:
    """Load ``name`` (folder, PEFT folder or hub name) as critic or reward model.

    Reads causal language models and sequence-classification checkpoints with one label; ``value_head_prefix``
    is the head's name in the checkpoint. ``init_value_head`` allows a fresh head, normal(0, 1/sqrt(hidden + 1)), if
    the checkpoint has none; by default it is allowed for a critic but not for a reward model. ``lora`` are fields of
    ``LoRAConfig``, as for ``Actor``. ``ValueError`` for a model without such a head, and as in ``merge_adapters``.

    >>> critic = get_llm_for_sequence_regression(tiny, "critic", lora_rank=4)  # a folder, or a name on the hub
    >>> critic.role
    'critic'
    """
    options = lora_options(name, **lora)
    load = load_options(bf16, flash_attn, options.load_in_4bit, trust_remote_code=trust_remote_code)
    model, headless = load_classifier(name, value_head_prefix, **load)

    if init_value_head is None:
        init_value_head = role == "critic"
    if headless and options.lora_path is None:  # else the head is in that folder
        if not init_value_head:
            raise ValueError(
                f"{name} has no scalar head '{value_head_prefix}.weight', so as a reward model it would give random "
                "scores. Train one with openppo.cli.train_rm, or name its head with value_head_prefix."
            )
        hidden_size = model.config.get_text_config().hidden_size
        head = model.get_parameter(f"{HEAD}.weight")
        with whole_weights([head]):
            nn.init.normal_(head, mean=0.0, std=1 / (hidden_size + 1) ** 0.5)
        logger.info(
            "%s: fresh scalar head for the %s, normal(0, 1/sqrt(%d + 1))", name, role, hidden_size
        )
    return ScalarHeadModel(model, role, options)


def load_classifier(
    name: str, value_head_prefix: str = HEAD, base: str | None = None, **load: Any
) -> tuple[PreTrainedModel, bool]:
    """Load a classifier with one label; also return whether its head is random.

    The adapters of a PEFT folder are merged. ``base`` replaces the base model that the folder names; ``load`` are
    keywords for ``from_pretrained``.
    """
    trust = load["trust_remote_code"]
    classifier, config = classifier_of(load_config(name, base, trust_remote_code=trust))
    key_mapping = None
    if value_head_prefix != HEAD:
        key_mapping = {rf"^{re.escape(value_head_prefix)}\.": f"{HEAD}."}

    with forbid_remote_code(name):
        model, report = load_weights(
            classifier,
            partial(_check_head, name, value_head_prefix),
            base or base_model_of(name),
            config=config,
            ignore_mismatched_sizes=True,  # reported by _check_head, with a message that helps
            key_mapping=key_mapping,
            **load,
        )
    use_fast_attention(model)

    headless = f"{HEAD}.weight" in report["missing_keys"]
    if not is_peft_folder(name):
        return model, headless
    merged = merge_adapters(model, name)
    has_saved_head = adapter_config(name).get("task_type") == HEAD_TASK
    return merged, headless and not has_saved_head


def _check_head(
    name: str, value_head_prefix: str, model: PreTrainedModel, report: dict[str, Any]
) -> None:
    """``ValueError`` without a linear head of one output, or with weights that do not fit."""
    if not isinstance(getattr(model, HEAD, None), nn.Linear):
        raise ValueError(
            f"{name} ({type(model).__name__}) keeps no linear head named '{HEAD}' on a causal transformer; "
            "reward models and critics of this kind cannot be used."
        )

    mismatched = [key for key, *_ in report["mismatched_keys"]]
    if f"{HEAD}.weight" in mismatched:
        raise ValueError(
            f"{name}: its head '{value_head_prefix}' has several labels; exactly one is needed (num_labels=1). "
            "Train one with openppo.cli.train_rm."
        )

    missing = [key for key in report["missing_keys"] if not key.startswith(f"{HEAD}.")]
    broken = sorted(mismatched) + sorted(missing)
    if broken:
        raise ValueError(
            f"{name}: weights missing or of another shape than the config says: {broken[:5]}"
        )
