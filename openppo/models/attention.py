"""Attention where transformers' is slow: on CPUs shared keys, causal bfloat16; on GPUs unequal rows, shared keys."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from openppo.models.lengths import lengths_are_exact, varlen_attn
from openppo.models.tree_attention import tree_attention
from openppo.models.vision_models import placeholders

ON_CPU = "openppo_cpu"
ON_GPU = "openppo_cuda"
ON_OLDER_GPU = "openppo_cuda_copies"
"""Where heads that share keys have no fast kernel: in float32, and on GPUs without FlashAttention."""
BY_LENGTHS = "openppo_lengths"
"""Name of the attention that computes nothing of padding: of documents in one row, and of rows that are decoded."""
_WIDEST = 192
"""Of wider heads FlashAttention has no backward pass on some GPUs."""
_BLOCK = 64
"""Queries at a time; of the keys after them nothing is computed."""
_LONGEST = 1024
"""Tokens of a row: of longer ones, the weights that are kept would be what a layer keeps most of."""
_LONGEST_WITH_AMX = 512
"""There SDPA in bfloat16 is as fast for longer ones."""
HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16", False))
"""Whether the processor multiplies bfloat16; a constant, since the call breaks compiled graphs."""
_FOLDED = 3
"""Heads that share keys: in bfloat16 two take up to 1.3 times as long where they are queries of one head."""
_SCORES = 1 << 20
"""Scores at a time, about: 4 MiB in float32."""


PREFIX_TREE = "prefix_tree"
"""Keyword for the tree of a row's tokens: on CPUs its nodes, by lengths the places of keys that each node sees."""


class LengthsError(ValueError):
    """Attention by lengths cannot give what a model asks for."""


def finished_mask(device: torch.device) -> Tensor:
    """Stands beside lengths: transformers takes a mask of four dimensions for a finished one, and makes none."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def use_fast_attention(model: PreTrainedModel) -> None:
    """Replace SDPA in a model on CPUs, and on GPUs by what its dtype, the GPU and torch allow."""
    if model.config._attn_implementation != "sdpa":
        return
    name = ON_CPU
    if torch.cuda.is_available():
        is_half = model.dtype in (torch.bfloat16, torch.float16)
        name = ON_OLDER_GPU
        if is_half and torch.cuda.get_device_capability() >= (8, 0):
            # Models that support FlashAttention state their windows beside the mask.
            name = BY_LENGTHS if model._supports_flash_attn and lengths_are_exact() else ON_GPU
    # What is asked of attention to text would reach that of images, too.
    model.set_attn_implementation(
        {"": name, "text_config": name} if placeholders(model.config) else name
    )


def _attend_on_cpu(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Heads (B, H, L, D) to outputs (B, L, H, D), as transformers calls it."""
    decodes, scale = query.shape[2] == 1, options.get("scaling") or query.shape[-1] ** -0.5
    is_plain = not _extras(options)
    if (nodes := options.get(PREFIX_TREE)) is not None:
        plain_heads = query.shape[-1] == key.shape[-1] == value.shape[-1]
        if not (is_plain and plain_heads and _is_causal(module, options)) or options.get(
            "sliding_window"
        ):
            raise LengthsError(f"{type(module).__name__} asks for more than plain causal attention")
        return tree_attention(query, key, value, nodes=nodes, scale=scale)[0].transpose(1, 2), None
    of_columns = attention_mask is None or (
        attention_mask.dtype is torch.bool and attention_mask.shape[1] == 1
    )
    if decodes and is_plain and of_columns:
        folds = query.dtype is torch.float32 or query.shape[1] >= _FOLDED * key.shape[1]
        return _attend_once(query, key, value, mask=attention_mask, scale=scale, folds=folds), None
    if not decodes and query.dtype is torch.bfloat16:
        fits = query.shape[2] == key.shape[2] <= (_LONGEST_WITH_AMX if HAS_AMX else _LONGEST)
        if (
            attention_mask is None
            and is_plain
            and _is_causal(module, options)
            and fits
            and key.shape == value.shape
        ):
            learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
            return causal_attention(
                query, key, value, scale=scale, n_kept=n_weights(query) if learns else 0
            )[0], None
        if not HAS_AMX:
            inputs = query.float(), key.float(), value.float()
            if (
                attention_mask is not None and attention_mask.is_floating_point()
            ):  # added to scores, so of their dtype
                attention_mask = attention_mask.float()
            return sdpa_attention_forward(module, *inputs, attention_mask, **options)[
                0
            ].bfloat16(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _extras(options: dict[str, Any]) -> list[str]:
    """What is asked for besides a softmax."""
    extras = [
        name
        for name in ("position_bias", "softcap", "s_aux", "cache")
        if options.get(name) is not None
    ]
    return [*extras, "dropout"] if options.get("dropout") else extras


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether tokens see only themselves and those before them."""
    causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _attend_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, folds: bool
) -> Tensor:
    """``query`` (B, H, 1, D), ``key`` and ``value`` (B, G, L, D) to (B, 1, H, D); keys are not copied for each head.

    transformers copies them where there is a mask. With ``folds`` heads that share keys are queries of one head.
    """
    n_rows, heads, _, width = query.shape
    groups = key.shape[1]
    if folds:
        query = query.reshape(n_rows, groups, -1, width)
    mixed = nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=query.shape[1] > groups
    )
    return mixed.reshape(n_rows, 1, heads, -1)


@torch.library.custom_op("openppo::causal_attention", mutates_args=())
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, n_kept: int
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v over the tokens up to each one, softmax in float32.

    ``query`` (B, H, L, D); ``key`` and ``value`` (B, G, L, D) with H a multiple of G. Returns (B, L, H, D) in their
    dtype and, for the backward pass, ``n_kept`` weights block by block (see ``n_weights``). That is an argument since
    compiled graphs are cached on disk, for later releases too.
    """
    n_rows, heads, length, width = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    output, kept = query.new_empty(n_rows, length, heads, width), query.new_empty(n_kept)
    for rows, start, end, place in _pieces(query):
        queries = _queries(query, key, rows, start=start, end=end).to(dtype) * scale
        scores = torch.bmm(queries, _keys(key, rows, end).to(dtype).transpose(1, 2))
        later = torch.full((end - start, end - start), -torch.inf, dtype=dtype).triu_(
            1
        )  # keys after their query
        scores.view(-1, end - start, end)[..., start:].add_(later)
        if n_kept > 0:
            weights = kept[place].view(scores.shape)
            weights.copy_(torch.softmax(scores, -1))
        else:
            weights = torch.softmax(scores, -1).to(query.dtype)
        mixed = torch.bmm(weights, _keys(value, rows, end))
        output[rows, start:end] = mixed.view(-1, heads, end - start, width).transpose(1, 2)
    return output, kept


@torch.library.custom_op("openppo::causal_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    kept: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.shape[1]
    groups = key.shape[1]
    width = query.shape[-1]
    grads = [
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    ]
    grad = grad.transpose(1, 2)  # (B, H, L, D)
    products = grad.to(torch.promote_types(query.dtype, torch.float32)) * output.transpose(1, 2)
    mean = products.sum(-1, keepdim=True).to(
        query.dtype
    )  # gradient of a query's weights, (B, H, L, 1)
    for rows, start, end, place in _pieces(query):
        gradients = _queries(grad, key, rows, start=start, end=end)
        weights = kept[place].view(len(gradients), -1, end)
        of_scores = torch.bmm(gradients, _keys(value, rows, end).transpose(1, 2))
        of_scores.sub_(_queries(mean, key, rows, start=start, end=end)).mul_(weights)
        of_keys = torch.bmm(
            of_scores.transpose(1, 2), _queries(query, key, rows, start=start, end=end)
        )
        of_values = torch.bmm(weights.transpose(1, 2), gradients)
        grads[0][rows, :, start:end] = torch.bmm(of_scores, _keys(key, rows, end)).view(
            -1, heads, end - start, width
        )
        grads[1][rows, :, :end] += of_keys.view(-1, groups, end, width)
        grads[2][rows, :, :end] += of_values.view(-1, groups, end, width)
    return grads[0].mul_(scale), grads[1].mul_(scale), grads[2]


def n_weights(query: Tensor) -> int:
    """Weights of all blocks, at most."""
    n_blocks, block = _blocks(query.shape[2])
    return query.shape[0] * query.shape[1] * block * block * n_blocks * (n_blocks + 1) // 2


def _blocks(length: int) -> tuple[int, int]:
    """How many blocks of queries, and the size of all but the last."""
    n_blocks = (length + _BLOCK - 1) // _BLOCK
    return n_blocks, (length + n_blocks - 1) // n_blocks


def _pieces(query: Tensor) -> Iterator[tuple[slice, int, int, slice]]:
    """Rows of the batch, the first query and the end of a block, and the place of its weights."""
    n_rows, heads, length, _ = query.shape
    _, block = _blocks(length)
    at_once, done = max(1, _SCORES // (heads * block * length)), 0
    for row in range(0, n_rows, at_once):
        rows = slice(row, min(row + at_once, n_rows))
        for start in range(0, length, block):
            end = min(start + block, length)
            size = (rows.stop - row) * heads * (end - start) * end
            yield rows, start, end, slice(done, done + size)
            done += size


def _queries(tensor: Tensor, key: Tensor, rows: slice, start: int, end: int) -> Tensor:
    """(B, H, L, D) to those of a block, by the head of their keys: (rows * G, H / G * block, D)."""
    part = tensor[rows, :, start:end]
    return part.reshape(len(part) * key.shape[1], -1, tensor.shape[-1])


def _keys(tensor: Tensor, rows: slice, end: int) -> Tensor:
    """(B, G, L, D) to those that a block sees: (rows * G, end, D)."""
    return tensor[rows, :, :end].flatten(0, 1)


@causal_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, scale: float, n_kept: int
) -> tuple[Tensor, Tensor]:
    n_rows, heads, length, width = query.shape
    return query.new_empty(n_rows, length, heads, width), query.new_empty(n_kept)


@_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    kept: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, _ = inputs
    ctx.save_for_backward(query, key, value, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


causal_attention.register_autograd(_differentiate, setup_context=_keep)


def _attend_on_gpu(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    copies_keys: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """As on CPUs. With ``copies_keys`` every head gets its own where there is no mask, but for single queries."""
    groups = query.shape[1] // key.shape[1]
    of_columns = attention_mask is None or (
        attention_mask.dtype is torch.bool and attention_mask.shape[1] == 1
    )
    if query.shape[2] == 1 and of_columns and not _extras(options):
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        return _attend_once(query, key, value, mask=attention_mask, scale=scale, folds=True), None
    if groups > 1 and attention_mask is None and copies_keys:
        options["is_causal"] = _is_causal(module, options)
        module = None
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)  # its groups would reach SDPA
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def _attend_by_lengths(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As on CPUs. With ``cu_seq_lens_q`` queries, in a row or several, are in documents that begin there.

    The mask means nothing then. With ``seqused_k`` (documents,) each is one query behind so many keys, of buffers in
    which others lie between.
    """
    starts, n_keys = options.get("cu_seq_lens_q"), options.get("seqused_k")
    if starts is None:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            raise LengthsError(
                f"{type(module).__name__} gets no lengths: its model does not hand them on"
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    extras, width = _extras(options), query.shape[-1]
    if (
        extras
        or not _is_causal(module, options)
        or value.shape[-1] != width
        or width > _WIDEST
        or width % 8 > 0
    ):
        asked = ", ".join([*extras, f"heads of {width} and {value.shape[-1]}"])
        raise LengthsError(
            f"varlen_attn is for causal attention with heads of 8, 16 to {_WIDEST}, and here for {asked}"
        )
    window = (options.get("sliding_window") or 0) - 1  # keys before a query's own
    queries, keys, values = (
        x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)
    )  # (T, H, D), (T, G, D) twice
    if (places := options.get(PREFIX_TREE)) is not None:
        keys, values = keys[places], values[places]
    shared: dict[str, Any] = {
        "window_size": (window, 0),
        "enable_gqa": keys.shape[1] != queries.shape[1],
    }
    if (
        n_keys is not None
    ):  # no key is later; told that one may be, FlashAttention reads keys for each head that shares them
        shared |= {"seqused_k": n_keys} | ({"window_size": (-1, -1)} if window < 0 else {})
    limits = starts, options["cu_seq_lens_k"], options["max_length_q"], options["max_length_k"]
    output: Any = varlen_attn(
        queries, keys, values, *limits, scale=options.get("scaling"), **shared
    )
    return output.unflatten(0, (len(query), -1)), None


_KINDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    ON_CPU: _attend_on_cpu,
    ON_GPU: _attend_on_gpu,
    ON_OLDER_GPU: partial(_attend_on_gpu, copies_keys=True),
    BY_LENGTHS: _attend_by_lengths,
}
for _name, _attend in _KINDS.items():
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, sdpa_mask)
