"""The policy: a causal language model whose forward returns log-probs of its input tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from openppo import logger
from openppo.model_inputs import ModelInputs
from openppo.models.adapters import add_adapters, lora_options
from openppo.models.argument_order import check_inputs, check_masks
from openppo.models.batch_model import BatchModel
from openppo.models.disabling import disable_extras
from openppo.models.loading import load_causal_lm, load_options
from openppo.models.log_probs import (
    linear_log_probs,
    linear_logits,
    log_probs_and_entropy,
    log_probs_from_logits,
)
from openppo.models.media_inputs import media_inputs
from openppo.models.padding import (
    base_of,
    device_of,
    extended_mask,
    on_device,
    pad_width,
    with_stand_in,
)
from openppo.models.prefixes import row_inputs
from openppo.models.sampled_ids import ALL_IDS, SampledIds

_ORDER = "(inputs, action_mask), with inputs of ModelInputs(sequences, attention_mask) and action_mask bool (B, L)"


class Actor(BatchModel):
    """A causal language model as policy (or as reference).

    ``pretrain_or_model`` is a local folder (also a PEFT folder) or hub name, loaded with ``bf16`` and ``flash_attn``,
    or a loaded model; ``trust_remote_code`` lets it run code of its own. ``.model`` is the module (with LoRA the PEFT
    model). Its own dropout is switched off. ``temperature`` is the sampling temperature; log-probs and entropy are
    those of softmax(logits / temperature), in float32. ``lora`` are fields of ``LoRAConfig``: ``Actor(name,
    lora_rank=8)`` or ``Actor(name, **vars(config))``.

    >>> actor = Actor(tiny)  # a folder, or a model's name on the hub
    >>> log_probs = actor(ModelInputs.of_ids([[5, 6, 7]], pad_token_id=0))
    >>> log_probs.shape, log_probs[0, 0].item()  # the first token follows nothing
    (torch.Size([1, 3]), 0.0)
    """

    def __init__(
        self,
        pretrain_or_model: str | PreTrainedModel,
        *,
        bf16: bool = False,
        flash_attn: bool = False,
        temperature: float = 1.0,
        trust_remote_code: bool = False,
        **lora: Any,
    ) -> None:
        super().__init__()
        model = pretrain_or_model
        options = lora_options(model, **lora)
        if isinstance(model, str):
            loading = load_options(
                bf16,
                flash_attn,
                options.load_in_4bit,
                trust_remote_code=trust_remote_code,
            )
            model = load_causal_lm(model, **loading)
        disable_extras(model)
        self.model: nn.Module = model
        if options.lora_rank > 0:
            self.model = add_adapters(model, options, "CAUSAL_LM")

        self.temperature = temperature
        self.sampled_ids = ALL_IDS
        """Ids that the softmax covers (see ``normalize_over``)."""
        self.ends_in_head = ends_in_head(model)
        """True if log-probs are fused into the head, so that large logits never exist in full."""
        if not self.ends_in_head:
            logger.info(
                "%s: logits are held whole, as they are not simply a linear head's",
                type(model).__name__,
            )

    def normalize_over(self, ids: SampledIds) -> None:
        """Take log-probs and entropy over ``ids``, those that the engine can sample."""
        self.sampled_ids = ids

    def forward(
        self,
        inputs: ModelInputs,
        action_mask: Tensor | None = None,
        temperature: float | None = None,
        return_entropy: bool = False,
        whole_vocabulary: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probs of the tokens, token-aligned: entry t is log p(token t | tokens before t).

        ``action_mask`` bool (B, L). Returns float32 (B, L), 0 outside ``action_mask`` (default: the attention mask) and
        for the first token; with ``return_entropy`` also the entropy in nats of the distribution that token t was drawn
        from. Where rows hold several documents (see ``packing_is_exact``), the first token of each must not be in
        ``action_mask``. The softmax covers ``sampled_ids``, or the ``whole_vocabulary``, as losses on texts require.
        """
        check_inputs(inputs, _ORDER)
        if action_mask is None:
            action_mask = inputs.attention_mask
        check_masks(inputs.sequences, _ORDER, action_mask=action_mask)
        n_rows, length = inputs.sequences.shape
        if inputs.position_ids is None:  # packed documents have no images, on any rank
            inputs = with_stand_in(self.stand_in, inputs)
            action_mask = extended_mask(action_mask, inputs)
        sequences = inputs.sequences
        selected = F.pad(action_mask.bool()[:, 1:], (1, 0))  # (B, L)

        one_row = None
        if self.packs_rows or self.shares_prompts:
            one_row = row_inputs(self, inputs)
        if one_row is not None:
            arguments, in_row = one_row
            selection = _Selection.of_one_row(sequences, selected, arguments, in_row=in_row)
        else:
            # There is no attention mask: a causal model never looks at padding on the right, and SDPA keeps its fast
            # causal kernel.
            arguments = self._arguments(inputs)
            selection = _Selection.of_rows(sequences, selected, arguments)
        selection = selection.on_device(device_of(self.model))

        values = self._log_probs(
            selection,
            temperature=self.temperature if temperature is None else temperature,
            with_entropy=return_entropy,
            ids=ALL_IDS if whole_vocabulary else self.sampled_ids,
        )
        log_probs = selection.placed(values[..., 0])[:n_rows, :length]
        if not return_entropy:
            return log_probs
        return log_probs, selection.placed(values[..., 1])[:n_rows, :length]

    def _arguments(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """Arguments of the model's forward for a batch that does not become one row."""
        if inputs.position_ids is not None:
            device = device_of(self.model)
            return {
                "input_ids": on_device(inputs.sequences, device),
                "position_ids": on_device(inputs.position_ids, device),
            }
        padded = pad_width(inputs, self.model)
        return {"input_ids": padded.sequences} | media_inputs(base_of(self.model), padded)

    def _log_probs(
        self, selection: "_Selection", *, temperature: float, with_entropy: bool, ids: SampledIds
    ) -> Tensor:
        """Log-probs of the selected tokens, with entropy beside them: (..., 2), or (..., 1)."""
        labels = selection.labels
        model: Any = self.model
        head = model.get_output_embeddings()
        if self.ends_in_head and hasattr(head.weight, "ds_id"):
            self.ends_in_head = False
            logger.info("ZeRO-3: logits are held whole, as the head's weight is partitioned")

        if self.ends_in_head:

            def log_probs_of(hidden: Tensor) -> Tensor:
                return linear_log_probs(
                    head,
                    labels,
                    temperature,
                    with_entropy=with_entropy,
                    hidden=hidden,
                    sampled_ids=ids,
                )

            # Inside the model's forward, so that ZeRO-3 gathers the head's weight.
            with _forward_of(head, log_probs_of):
                output = model(**selection.arguments, use_cache=False)
            return output.logits.view(*labels.shape, -1)

        output = model(**selection.arguments, use_cache=False)
        logits = output.logits.view(*labels.shape, -1)
        if with_entropy:
            columns = log_probs_and_entropy(logits, labels, temperature, sampled_ids=ids)
            return torch.stack(columns, -1)
        return log_probs_from_logits(logits, labels, temperature, sampled_ids=ids)[..., None]


@dataclass(frozen=True)
class _Selection:
    """Arguments of a model, and the tokens whose log-probs are taken from its outputs."""

    arguments: dict[str, Tensor]
    """Arguments of the forward, with ``logits_to_keep``: the places of the states that predict these tokens."""
    labels: Tensor
    """Ids of the tokens: (K,) for one row, else (B, K)."""
    places: Tensor
    """Places of the tokens, (K,): indexes into the flat batch for one row, else columns."""
    selected: Tensor
    """Entries that get a value, bool (B, L)."""
    dim: int
    """Dimension that ``places`` indexes, once the batch is flattened from that dimension on."""

    @classmethod
    def of_one_row(
        cls, sequences: Tensor, selected: Tensor, arguments: dict[str, Tensor], in_row: Tensor
    ) -> "_Selection":
        """Select from a batch that goes through the model as one row, where token i lies at ``in_row[i]``."""
        places = selected.flatten().nonzero()[:, 0]
        if len(places) == 0:
            places = places.new_full((1,), selected.numel() - 1)
        arguments["logits_to_keep"] = in_row[places - 1]
        labels = sequences.flatten()[places]
        return cls(arguments, labels, places, selected=selected, dim=0)

    @classmethod
    def of_rows(
        cls, sequences: Tensor, selected: Tensor, arguments: dict[str, Tensor]
    ) -> "_Selection":
        """Select from rows of one width; columns in which some row has an action are kept."""
        kept = selected[:, 1:].any(0).nonzero()[:, 0]  # (K,): the state before token kept + 1
        if len(kept) == 0:
            kept = kept.new_zeros(1)  # a row without any action still takes part

        # A row of one token has no second token to predict.
        places = (kept + 1).clamp(max=sequences.shape[1] - 1)
        arguments["logits_to_keep"] = kept
        labels = sequences[:, places]
        return cls(arguments, labels, places, selected=selected, dim=1)

    def on_device(self, device: torch.device) -> "_Selection":
        """Move all tensors to ``device``, except arguments that are there already."""
        kept = on_device(self.arguments["logits_to_keep"], device)
        return replace(
            self,
            arguments=self.arguments | {"logits_to_keep": kept},
            labels=on_device(self.labels, device),
            places=on_device(self.places, device),
            selected=on_device(self.selected, device),
        )

    def placed(self, values: Tensor) -> Tensor:
        """Scatter ``values``, shaped like ``labels``, to their places in a (B, L) tensor that is 0 elsewhere."""
        flat_shape = self.selected.flatten(self.dim).shape
        zeros = torch.zeros(flat_shape, dtype=values.dtype, device=values.device)
        batch = zeros.index_copy(self.dim, self.places, values)
        return torch.where(self.selected, batch.view(self.selected.shape), 0.0)


@torch.no_grad()
def ends_in_head(model: Any) -> bool:
    """True if a model's logits are the output of its linear head, neither scaled nor capped nor cut afterwards.

    The model's own forward runs with stand-ins for the transformer and the head, so no weight is read.
    """
    head = model.get_output_embeddings()
    transformers = (child for child in model.children() if isinstance(child, PreTrainedModel))
    body = next(transformers, None)
    if type(head) is not nn.Linear or body is None:
        return False

    hidden = _Output(last_hidden_state=torch.zeros(1, 1, head.in_features))
    head_logits = torch.linspace(-99, 99, head.out_features)[None, None]
    ids = torch.zeros(1, 1, dtype=torch.int64)
    try:
        with _forward_of(body, lambda *_, **__: hidden), _forward_of(head, lambda _: head_logits):
            output = model(input_ids=ids, logits_to_keep=1, use_cache=False)
            return torch.equal(output.logits, head_logits)
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError):
        # The model's forward needs something that the stand-ins lack.
        return False


def float32_head(model: Any, device: torch.device) -> nn.Linear | None:
    """Head whose weight is not float32 but whose logits are, in training; None if there is none."""
    if device.type != "cuda" or model.dtype.itemsize > 2:
        return None

    model = base_of(model)
    head = model.get_output_embeddings()
    is_fused = ends_in_head(model) and not hasattr(head.weight, "ds_id")
    return head if is_fused else None


def next_logits(model: Any, head: nn.Linear | None, **inputs: Any) -> Tensor:
    """Logits (B, V) for the token after ``input_ids`` (B, L); float32 if ``head`` is a ``float32_head``."""
    if head is None:
        return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]

    def float32_logits(hidden: Tensor) -> Tensor:
        return linear_logits(hidden[:, -1], head.weight, head.bias)[:, None]

    with _forward_of(head, float32_logits):
        return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]


class _Output(BaseModelOutput):
    """Output of a transformer, with None for all other attributes."""

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of ``module`` inside the context; its hooks stay."""
    attributes = vars(module)
    previous = attributes.get("forward")  # set by libraries that move weights
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        if previous is not None:
            attributes["forward"] = previous
