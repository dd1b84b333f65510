"""Classifiers with a linear head for causal language models."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any, ClassVar

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS

HEAD = "score"


class HeadOnTransformer(PreTrainedModel):
    """Transformer of a causal language model and a linear head ``score``, as transformers' own classifiers have it.

    Saved, it holds the transformer's weights under the names of the causal language model, and ``score.weight``.
    """

    causal: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        children = self.causal(config).named_children()
        self._transformer, transformer = next(pair for pair in children if isinstance(pair[1], PreTrainedModel))
        self.add_module(self._transformer, transformer)
        hidden_size: int = config.get_text_config().hidden_size
        self.score = nn.Linear(hidden_size, config.num_labels or 1, bias=False)
        self.post_init()

    @property
    def base_model(self) -> nn.Module:
        """The transformer, also where ``base_model_prefix`` is not its name (Llama 4)."""
        return self.get_submodule(self._transformer)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **_: Any) -> HeadOnTransformer:
        """With random weights."""
        return cls(config)


def classifier_of(config: PreTrainedConfig) -> tuple[Any, PreTrainedConfig]:
    """Classifier class with one label for a config, and its config.

    transformers' own where it has them; of a model of images and text the causal language model's part of the config.
    """
    config = copy.deepcopy(config)
    config.num_labels = 1
    if type(config) in CLASSIFIERS or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForSequenceClassification, config
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, causal.config_class):
        config = config.get_text_config()
        config.num_labels = 1
    return _on_transformer_of(causal), config


@cache
def _on_transformer_of(causal: type[PreTrainedModel]) -> type[HeadOnTransformer]:
    """Classifier class of ``causal``, named as transformers would name it."""
    family = next(parent for parent in causal.__mro__ if parent.__name__.endswith("PreTrainedModel"))
    name = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", causal.__name__)
    names = {"causal": causal, "base_model_prefix": causal.base_model_prefix, "__module__": causal.__module__}
    return type(f"{name}ForSequenceClassification", (HeadOnTransformer, family), names)
