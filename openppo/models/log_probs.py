"""Log-probs and entropy of chosen tokens, without a float32 copy of all logits; ratios, KL estimates, masked means."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from openppo.models.argument_order import check_tensor
from openppo.models.sampled_ids import ALL_IDS, SampledIds

KLEstimator = Literal["k1", "k2", "k3"]
CHUNK_ELEMENTS = 1 << 24
"""Logits handled at a time, in elements: bounds the float32 copies to 64 MiB each."""
CHUNK_ELEMENTS_ON_CPU = 1 << 20
"""There they stay in the cache: a forward takes a third of the time."""
LOGITS_AT_ONCE = 1 << 27
"""Logits that ``linear_log_probs`` holds, in elements: 512 MiB in float32. A backward pass recomputes more."""
LOGITS_AT_ONCE_ON_CPU = 1 << 29
"""There recomputing them takes longer, and memory is plentiful."""
_LEAST = -1e4
"""For entropy: a token of probability 0 adds 0 to sums of p log p, where minus infinity would make them NaN."""


def logits_at_once(on_cpu: bool) -> int:
    """``LOGITS_AT_ONCE`` of a device."""
    return LOGITS_AT_ONCE_ON_CPU if on_cpu else LOGITS_AT_ONCE


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(
        1,
        (CHUNK_ELEMENTS_ON_CPU if logits.device.type == "cpu" else CHUNK_ELEMENTS)
        // logits.shape[-1],
    )
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def _select(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    ids: SampledIds = ALL_IDS,
) -> tuple[Tensor, Tensor]:
    """``logits`` (N, V), ``labels`` (N,); returns log-probs and entropy, float32 (N,), empty if not wanted."""
    n, dtype = logits.shape[0], torch.promote_types(logits.dtype, torch.float32)
    chosen = torch.empty(n, dtype=dtype, device=logits.device)
    entropy = torch.empty(n if with_entropy else 0, dtype=dtype, device=logits.device)
    for rows in _chunks(logits):
        log_probs = torch.log_softmax(_scaled(logits[rows], temperature, dtype, ids=ids), dim=-1)
        chosen[rows] = log_probs.gather(-1, labels[rows, None])[:, 0]
        if with_entropy:
            log_probs.clamp_(min=_LEAST)
            entropy[rows] = -torch.linalg.vecdot(log_probs.exp(), log_probs)
    return chosen, entropy


def _gradient(
    logits: Tensor,
    labels: Tensor,
    entropy: Tensor,
    grads: Sequence[Tensor],
    temperature: float,
    dtype: torch.dtype,
    ids: SampledIds = ALL_IDS,
) -> Tensor:
    """Of the logits, (N, V) in ``dtype``, from those of log-probs and entropy; the latter is empty if not wanted.

    d log p(label) / d logit = (1[label] - p) / temperature; d H / d logit = -p (log p + H) / temperature. So it is 0
    for ids that are left out, whose p is 0.
    """
    scale, entropy_scale = (gradient / temperature for gradient in grads)
    grad = torch.empty_like(logits, dtype=dtype)
    for rows in _chunks(logits):
        scaled = _scaled(
            logits[rows], temperature, torch.promote_types(logits.dtype, torch.float32), ids=ids
        )
        part = grad[rows] if dtype == scaled.dtype else torch.empty_like(scaled)
        if len(entropy) == 0:
            torch.softmax(scaled, dim=-1, out=part).mul_(-scale[rows, None])
        else:
            log_probs = torch.log_softmax(scaled, dim=-1).clamp_(min=_LEAST)
            torch.exp(log_probs, out=part)
            part.mul_(
                log_probs.add_(entropy[rows, None])
                .mul_(-entropy_scale[rows, None])
                .sub_(scale[rows, None])
            )
        part.scatter_add_(-1, labels[rows, None], scale[rows, None])
        if part.dtype != dtype:
            grad[rows] = part
    return grad


class _SelectedLogProbs(torch.autograd.Function):
    """Saves the logits in their own dtype and the entropy; recomputes the softmax going backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        ids: SampledIds,
    ) -> tuple[Tensor, Tensor]:
        chosen, entropy = _select(logits, labels, temperature, with_entropy=with_entropy, ids=ids)
        ctx.save_for_backward(logits, labels, entropy)
        ctx.temperature, ctx.ids = temperature, ids
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, entropy = ctx.saved_tensors
        grad = _gradient(
            logits,
            labels,
            entropy,
            grads=grad_outputs,
            temperature=ctx.temperature,
            dtype=logits.dtype,
            ids=ctx.ids,
        )
        return grad, None, None, None, None


class _LinearLogProbs(torch.autograd.Function):
    """Saves the hidden states, and logits that are one piece; going backward, others are computed again.

    Logits are its own, so ids that are left out are written there, without a copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ids: SampledIds,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        n_pieces = -(-len(labels) * len(weight) // logits_at_once(hidden.device.type == "cpu"))
        size = -(-len(labels) // n_pieces)
        ctx.ids, ctx.options = ids, options
        ctx.pieces = [slice(start, start + size) for start in range(0, len(labels), size)]
        found = []
        for rows in ctx.pieces:
            logits = ids.mask(linear_logits(hidden[rows], weight, bias))
            found.append(_select(logits, labels[rows], *options))
        chosen, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(
            hidden, weight, bias, labels, entropy, logits if len(found) == 1 else None
        )
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, kept = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = None
        of_bias = None
        for rows in ctx.pieces:
            logits = (
                ctx.ids.mask(linear_logits(hidden[rows], weight, bias)) if kept is None else kept
            )
            grads = [grad[rows] for grad in grad_outputs]
            grad = _gradient(
                logits,
                labels[rows],
                entropy[rows],
                grads=grads,
                temperature=ctx.options[0],
                dtype=weight.dtype,
            )
            torch.mm(grad, weight, out=of_hidden[rows])
            if ctx.needs_input_grad[1]:
                of_weight = (
                    grad.t() @ hidden
                    if kept is not None
                    else _add_product(of_weight, grad.t(), hidden[rows])
                )
            if ctx.needs_input_grad[2]:
                of_bias = grad.sum(0, dtype=entropy.dtype).add_(0 if of_bias is None else of_bias)
        of_weight, of_bias = (x if x is None else x.to(weight.dtype) for x in (of_weight, of_bias))
        return of_hidden, of_weight, of_bias, None, None, *(None for _ in ctx.options)


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, H) and (V, H) to (N, V), on GPUs float32: bfloat16 near 30 has steps of an eighth."""
    if not hidden.is_cuda or weight.element_size() > 2:
        return F.linear(hidden, weight, bias)
    logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """``total``, float32 at least, plus ``left`` times ``right``, in place."""
    if total is None:
        dtype = torch.promote_types(left.dtype, torch.float32)
        total = torch.zeros(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    if total.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    return total.add_(left @ right)


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype, ids: SampledIds) -> Tensor:
    """May be ``logits`` themselves where no id is left out: not to be written into."""
    scaled = logits.to(dtype) if temperature == 1 else logits.to(dtype) / temperature
    if not ids.left_out:
        return scaled
    return ids.mask(scaled.clone() if scaled is logits else scaled)


def log_probs_from_logits(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, sampled_ids: SampledIds = ALL_IDS
) -> Tensor:
    """log softmax(logits / temperature) at ``labels``: (..., V) and int64 (...) to float32 (...).

    Over ``sampled_ids``: minus infinity at others, whose logits get a gradient of 0.
    """
    flat, _ = _SelectedLogProbs.apply(
        logits.flatten(0, -2), labels.flatten(), temperature, False, sampled_ids
    )
    return flat.view(labels.shape)


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, sampled_ids: SampledIds = ALL_IDS
) -> tuple[Tensor, Tensor]:
    """As ``log_probs_from_logits``, and the entropy in nats of softmax(logits / temperature), float32 (...)."""
    flat = logits.flatten(0, -2), labels.flatten()
    log_probs, entropy = _SelectedLogProbs.apply(*flat, temperature, True, sampled_ids)
    return log_probs.view(labels.shape), entropy.view(labels.shape)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (..., V) to float32 (...). Differentiable."""
    return log_probs_and_entropy(
        logits, logits.new_zeros(logits.shape[:-1], dtype=torch.int64), temperature
    )[1]


def linear_log_probs(
    head: Any,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    hidden: Tensor,
    sampled_ids: SampledIds = ALL_IDS,
) -> Tensor:
    """Log-probs at ``labels``, and entropy beside them if wanted, of a linear ``head``'s logits: float32 (..., 1 or 2).

    ``hidden`` (..., H) are its inputs, and the softmax is over ``sampled_ids``. At most ``LOGITS_AT_ONCE`` logits
    exist at a time.
    """
    flat = hidden.flatten(0, -2), head.weight, head.bias, labels.flatten()
    chosen, entropy = _LinearLogProbs.apply(*flat, sampled_ids, temperature, with_entropy)
    return torch.stack((chosen, entropy) if with_entropy else (chosen,), -1).view(
        *hidden.shape[:-1], -1
    )


def masked_sum(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Sum of the elements where ``mask`` (same shape, bool or 0/1) is set; ``mask`` None counts all."""
    return (tensor if mask is None else torch.where(mask.bool(), tensor, 0.0)).sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Mean of the elements where ``mask`` (same shape, bool or 0/1) is set; 0 where nothing is set.

    With ``dim=-1`` on (B, L) the result is one mean per sequence, (B,).
    """
    if mask is None:
        return tensor.mean(dim)
    return masked_sum(tensor, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def log_ratio(
    log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None
) -> Tensor:
    """log_probs - old_log_probs clamped to +-20; 0 outside the mask. Shape (B, L)."""
    difference = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    return difference if action_mask is None else torch.where(action_mask.bool(), difference, 0.0)


def policy_ratio(
    log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None
) -> Tensor:
    """exp(log_probs - old_log_probs) with the difference clamped to +-20; 1 outside the mask. Shape (B, L)."""
    return log_ratio(log_probs, old_log_probs, action_mask).exp()


def compute_approx_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    action_mask: Tensor | None = None,
    kl_estimator: KLEstimator = "k1",
) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy, (B, L).

    With x = log_probs - ref_log_probs: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x
    (http://joschu.net/blog/kl-approx.html). k1 and k3 are unbiased; k1 may be negative, k2 and k3 never are.
    0 where ``action_mask`` is not set.
    """
    if action_mask is not None:
        check_tensor(
            action_mask,
            "action_mask",
            order="(log_probs, ref_log_probs, action_mask, kl_estimator)",
        )
    dtype = torch.promote_types(
        log_probs.dtype, torch.float32
    )  # bfloat16 differences would be noise
    x = log_probs.to(dtype) - ref_log_probs.to(dtype)
    if action_mask is not None:
        x = torch.where(action_mask.bool(), x, 0.0)
    if kl_estimator == "k1":
        return x
    if kl_estimator == "k2":
        return x.square() / 2
    if kl_estimator == "k3":
        return torch.expm1(-x) + x
    raise ValueError(f"kl_estimator must be k1, k2 or k3, got {kl_estimator!r}")
