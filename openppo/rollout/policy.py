"""The model of a command that samples without training."""

from collections.abc import Callable
from typing import Any

from openppo.config import ChatConfig, PromptsConfig, ServeAgentConfig, parse_template_kwargs
from openppo.models.actor import Actor
from openppo.models.loading import attention_implementation, model_error_context
from openppo.models.pretrained import (
    check_model,
    context_length,
    eos_token_ids,
    load_tokenizer,
    pad_token_id,
    sampled_ids,
)
from openppo.models.size import check_cache
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import decoder


class FrozenPolicy:
    """The model that ``flag`` names, with its tokenizer; ``load`` makes its engine."""

    def __init__(
        self, options: PromptsConfig | ServeAgentConfig | ChatConfig, flag: str = "--pretrain"
    ) -> None:
        """Check options and tokenizer, before weights are loaded; ``ValueError`` names the flag to change."""
        trust = options.trust_remote_code
        self.flag = flag
        self.pretrain = options.pretrain
        self.loading = {
            "bf16": options.bf16,
            "flash_attn": options.flash_attn,
            "trust_remote_code": trust,
        }

        self.config = check_model(self.pretrain, flag, trust)
        self.context = context_length(self.config)
        check_cache(self.config)
        attention_implementation(options.flash_attn, options.bf16)
        self.tokenizer = load_tokenizer(
            self.pretrain,
            flag,
            trust_remote_code=trust,
            template_kwargs=parse_template_kwargs(options.chat_template_kwargs),
            chat_template=options.chat_template,
        )

    def load(
        self, prepare: Callable[[Actor], object], max_batch_size: int | None = None, **engine: Any
    ) -> None:
        """Load the weights and make the engine, with further options ``engine``.

        ``prepare`` moves the weights to this rank's device.
        """
        with model_error_context(self.flag, self.pretrain):
            self.actor = Actor(self.pretrain, **self.loading)
        prepare(self.actor)

        model: Any = self.actor.model
        self.eos_token_ids = eos_token_ids(model, self.tokenizer)
        pad = pad_token_id(self.tokenizer)
        ids = sampled_ids(self.tokenizer, self.config)
        self.actor.normalize_over(ids)
        self.engine = HFEngine(
            model,
            self.eos_token_ids,
            pad,
            max_batch_size=max_batch_size,
            sampled_ids=ids,
            decode=decoder(self.tokenizer),
            **engine,
        )
