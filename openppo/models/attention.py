"""Faster attention for transformers' models.

On CPUs it covers shared keys and causal bfloat16; on GPUs, rows of unequal lengths and shared keys.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from openppo.models.causal_blocks import causal_attention, n_weights
from openppo.models.lengths import lengths_are_exact, varlen_attn
from openppo.models.tree_attention import tree_attention
from openppo.models.vision_models import placeholders

ON_CPU = "openppo_cpu"
ON_GPU = "openppo_cuda"
ON_OLDER_GPU = "openppo_cuda_copies"
"""Name of attention that copies shared keys for each head.

It is for float32 and GPUs without FlashAttention, which have no fast kernel for shared keys.
"""
BY_LENGTHS = "openppo_lengths"
"""Name of attention without padding: for documents packed in one row, and for rows in decoding."""

_WIDEST = 192
"""Largest width of a head: on some GPUs FlashAttention has no backward pass for wider ones."""
_LONGEST = 1024
"""Most tokens of a row: for longer rows, the kept weights would be the largest activation of a layer."""
_LONGEST_WITH_AMX = 512
"""Most tokens of a row with AMX: for longer rows, SDPA in bfloat16 is as fast."""
HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16", False))
"""True if the processor multiplies bfloat16; a constant, since asking torch would break compiled graphs."""
_FOLDED = 3
"""Fewest heads with shared keys that are folded into one head in bfloat16.

Folding only two heads makes them up to 1.3 times as slow.
"""

PREFIX_TREE = "prefix_tree"
"""Keyword argument for the tree of a row's tokens.

On CPUs its value is the nodes; for attention by lengths, the places of the keys that each node sees.
"""


class LengthsError(ValueError):
    """Attention by lengths lacks something that a model needs."""


def finished_mask(device: torch.device) -> Tensor:
    """Return a mask to pass beside lengths.

    transformers takes a mask of four dimensions as finished, and builds none of its own.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def use_fast_attention(model: PreTrainedModel) -> None:
    """Replace SDPA in a model; on GPUs by the attention that dtype, GPU and torch allow."""
    if model.config._attn_implementation != "sdpa":
        return
    name = _fastest_for(model)
    if placeholders(model.config):
        # Set text attention alone: the vision tower would inherit it.
        model.set_attn_implementation({"": name, "text_config": name})
    else:
        model.set_attn_implementation(name)


def _fastest_for(model: PreTrainedModel) -> str:
    """Name of the fastest attention on this machine."""
    if not torch.cuda.is_available():
        return ON_CPU
    is_half = model.dtype in (torch.bfloat16, torch.float16)
    if not is_half or torch.cuda.get_device_capability() < (8, 0):
        return ON_OLDER_GPU
    # Models that support FlashAttention pass their sliding windows as arguments too, not only in the mask.
    if model._supports_flash_attn and lengths_are_exact():
        return BY_LENGTHS
    return ON_GPU


def _attend_on_cpu(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from heads (B, H, L, D) to outputs (B, L, H, D), as transformers calls it."""
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    is_plain = not _extras(options)
    is_causal = is_plain and _is_causal(module, options)

    nodes = options.get(PREFIX_TREE)
    if nodes is not None:
        has_equal_widths = query.shape[-1] == key.shape[-1] == value.shape[-1]
        if not is_causal or not has_equal_widths or options.get("sliding_window"):
            raise LengthsError(f"{type(module).__name__} asks for more than plain causal attention")
        output, _ = tree_attention(query, key, value, nodes=nodes, scale=scale)
        return output.transpose(1, 2), None

    is_decoding = query.shape[2] == 1
    if is_decoding and is_plain and _is_shared_by_heads(attention_mask):
        folds = query.dtype is torch.float32 or query.shape[1] >= _FOLDED * key.shape[1]
        return _attend_once(query, key, value, mask=attention_mask, scale=scale, folds=folds), None
    if is_decoding or query.dtype is not torch.bfloat16:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    longest = _LONGEST_WITH_AMX if HAS_AMX else _LONGEST
    fits = query.shape[2] == key.shape[2] <= longest and key.shape == value.shape
    if attention_mask is None and is_causal and fits:
        return _attend_in_blocks(query, key, value, scale=scale), None
    if HAS_AMX:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return _attend_in_float32(module, query, key, value=value, mask=attention_mask, **options), None


def _extras(options: dict[str, Any]) -> list[str]:
    """Names of the options that need more than a softmax."""
    names = ("position_bias", "softcap", "s_aux", "cache")
    extras = [name for name in names if options.get(name) is not None]
    if options.get("dropout"):
        extras.append("dropout")
    return extras


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """True if each token sees only itself and the tokens before it."""
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return bool(is_causal)


def _is_shared_by_heads(mask: Tensor | None) -> bool:
    """True without a mask, and for a boolean mask that all heads share."""
    return mask is None or (mask.dtype is torch.bool and mask.shape[1] == 1)


def _attend_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, folds: bool
) -> Tensor:
    """Attend with one query a row; shared keys are not copied for each head.

    ``query`` (B, H, 1, D), ``key`` and ``value`` (B, G, L, D) to (B, 1, H, D). transformers would copy the keys if
    there is a mask. With ``folds``, heads that share keys become queries of one head.
    """
    n_rows, heads, _, width = query.shape
    groups = key.shape[1]
    if folds:
        query = query.reshape(n_rows, groups, -1, width)
    mixed = nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=query.shape[1] > groups
    )
    return mixed.reshape(n_rows, 1, heads, -1)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend causally, and keep the weights if a backward pass will follow."""
    is_trained = query.requires_grad or key.requires_grad or value.requires_grad
    n_kept = n_weights(query) if torch.is_grad_enabled() and is_trained else 0
    output, _ = causal_attention(query, key, value, scale=scale, n_kept=n_kept)
    return output


def _attend_in_float32(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """Attend by SDPA in float32, which processors without AMX compute faster."""
    if mask is not None and mask.is_floating_point():
        mask = mask.float()  # the mask is added to scores
    output, _ = sdpa_attention_forward(
        module, query.float(), key.float(), value.float(), mask, **options
    )
    return output.bfloat16()


def _attend_on_gpu(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    copies_keys: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as on CPUs.

    With ``copies_keys`` and without a mask, shared keys are copied for every head, except for single queries.
    """
    groups = query.shape[1] // key.shape[1]
    is_decoding = query.shape[2] == 1
    if is_decoding and _is_shared_by_heads(attention_mask) and not _extras(options):
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        return _attend_once(query, key, value, mask=attention_mask, scale=scale, folds=True), None

    if groups > 1 and attention_mask is None and copies_keys:
        options["is_causal"] = _is_causal(module, options)
        module = None  # hides its groups from SDPA: the keys are copied already
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _attend_by_lengths(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as on CPUs; with ``cu_seq_lens_q``, within the documents that begin there.

    Documents are in one row or several, and the mask is ignored. With ``seqused_k`` (documents,) each document is one
    query after that many keys, which lie in buffers with other keys between them.
    """
    starts = options.get("cu_seq_lens_q")
    if starts is None:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            raise LengthsError(
                f"{type(module).__name__} gets no lengths: its model does not hand them on"
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    _check_lengths_fit(module, options, width=query.shape[-1], value_width=value.shape[-1])

    queries = query.transpose(1, 2).flatten(0, 1)  # (T, H, D)
    keys = key.transpose(1, 2).flatten(0, 1)  # (T, G, D)
    values = value.transpose(1, 2).flatten(0, 1)
    places = options.get(PREFIX_TREE)
    if places is not None:
        keys = keys[places]
        values = values[places]

    n_keys = options.get("seqused_k")
    n_earlier = (options.get("sliding_window") or 0) - 1
    window = (n_earlier, 0)
    if n_keys is not None and n_earlier < 0:
        # No key comes after its query. With a causal window FlashAttention would read shared keys once per head.
        window = (-1, -1)
    output = varlen_attn(
        queries,
        keys,
        values,
        starts,
        options["cu_seq_lens_k"],
        options["max_length_q"],
        options["max_length_k"],
        scale=options.get("scaling"),
        window_size=window,
        enable_gqa=keys.shape[1] != queries.shape[1],
        seqused_k=n_keys,
    )
    return output.unflatten(0, (len(query), -1)), None


def _check_lengths_fit(module: Any, options: dict[str, Any], width: int, value_width: int) -> None:
    """``LengthsError`` for attention that ``varlen_attn`` does not compute."""
    extras = _extras(options)
    has_fit_heads = value_width == width <= _WIDEST and width % 8 == 0
    if not extras and has_fit_heads and _is_causal(module, options):
        return
    needs = ", ".join([*extras, f"heads of {width} and {value_width}"])
    raise LengthsError(
        f"varlen_attn is for causal attention with heads of 8, 16 to {_WIDEST}, and here for {needs}"
    )


_KINDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    ON_CPU: _attend_on_cpu,
    ON_GPU: _attend_on_gpu,
    ON_OLDER_GPU: partial(_attend_on_gpu, copies_keys=True),
    BY_LENGTHS: _attend_by_lengths,
}
for _name, _attend in _KINDS.items():
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, sdpa_mask)
