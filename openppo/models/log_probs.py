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
"""Logits handled at a time, in elements: limits each float32 copy to 64 MiB."""
CHUNK_ELEMENTS_ON_CPU = 1 << 20
"""The same on CPUs, small enough to stay in the cache: a forward takes a third of the time."""
LOGITS_AT_ONCE = 1 << 27
"""Logits that ``linear_log_probs`` keeps, in elements: 512 MiB in float32. If there are more, all are recomputed."""
LOGITS_AT_ONCE_ON_CPU = 1 << 29
"""The same on CPUs, where recomputing takes longer and memory is plentiful."""
_LEAST = -1e4
"""Lowest log-prob in entropies.

A token of probability 0 then adds 0 to a sum of p log p; minus infinity would make it NaN.
"""


def logits_at_once(on_cpu: bool) -> int:
    """``LOGITS_AT_ONCE`` of a device."""
    return LOGITS_AT_ONCE_ON_CPU if on_cpu else LOGITS_AT_ONCE


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of rows that are handled at a time."""
    n_elements = CHUNK_ELEMENTS_ON_CPU if logits.device.type == "cpu" else CHUNK_ELEMENTS
    size = max(1, n_elements // logits.shape[-1])
    return _slices(logits.shape[0], size)


def _slices(n_rows: int, size: int) -> list[slice]:
    """Slices of at most ``size`` rows."""
    return [slice(start, start + size) for start in range(0, n_rows, size)]


def _select(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    ids: SampledIds = ALL_IDS,
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``labels`` (N,) and entropy for ``logits`` (N, V), float32 (N,); unwanted entropy is (0,)."""
    n_rows = logits.shape[0]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    chosen = torch.empty(n_rows, dtype=dtype, device=logits.device)
    entropy = torch.empty(n_rows if with_entropy else 0, dtype=dtype, device=logits.device)

    for rows in _chunks(logits):
        scaled = _scaled(logits[rows], temperature, dtype, ids=ids)
        log_probs = torch.log_softmax(scaled, dim=-1)
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
    """Gradient of the logits, (N, V) in ``dtype``, from the gradients ``grads`` of log-probs and entropy.

    d log p(label) / d logit = (1[label] - p) / temperature; d H / d logit = -p (log p + H) / temperature. Both are 0
    for ids that are left out, whose p is 0. ``entropy`` is (0,) where it has no gradient.
    """
    scale, entropy_scale = (grad / temperature for grad in grads)
    scaled_dtype = torch.promote_types(logits.dtype, torch.float32)
    grad = torch.empty_like(logits, dtype=dtype)
    for rows in _chunks(logits):
        scaled = _scaled(logits[rows], temperature, scaled_dtype, ids=ids)
        part = grad[rows] if dtype == scaled.dtype else torch.empty_like(scaled)
        if len(entropy) == 0:
            torch.softmax(scaled, dim=-1, out=part)
            part.mul_(-scale[rows, None])
        else:
            log_probs = torch.log_softmax(scaled, dim=-1).clamp_(min=_LEAST)
            torch.exp(log_probs, out=part)
            factor = log_probs.add_(entropy[rows, None])
            factor.mul_(-entropy_scale[rows, None]).sub_(scale[rows, None])
            part.mul_(factor)
        part.scatter_add_(-1, labels[rows, None], scale[rows, None])
        if part.dtype != dtype:
            grad[rows] = part
    return grad


class _SelectedLogProbs(torch.autograd.Function):
    """Log-probs and entropy from logits, saved in their own dtype; the backward pass recomputes the softmax."""

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
        ctx.temperature = temperature
        ctx.ids = ids
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
    """Log-probs and entropy from hidden states, a piece of the logits at a time.

    Logits in a single piece are saved; the backward pass recomputes logits in several pieces. No other code holds them,
    so minus infinity is written into them at ids that are left out, without a copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ids: SampledIds,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        n_logits = len(labels) * len(weight)
        n_pieces = -(-n_logits // logits_at_once(hidden.device.type == "cpu"))
        size = -(-len(labels) // n_pieces)
        ctx.pieces = _slices(len(labels), size)
        ctx.ids = ids
        ctx.temperature = temperature

        chosen_pieces = []
        entropy_pieces = []
        for rows in ctx.pieces:
            logits = ids.mask(linear_logits(hidden[rows], weight, bias))
            chosen, entropy = _select(logits, labels[rows], temperature, with_entropy=with_entropy)
            chosen_pieces.append(chosen)
            entropy_pieces.append(entropy)

        chosen = torch.cat(chosen_pieces)
        entropy = torch.cat(entropy_pieces)
        saved_logits = logits if len(ctx.pieces) == 1 else None
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, saved_logits)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, entropy, saved_logits = ctx.saved_tensors
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None

        for rows in ctx.pieces:
            logits = saved_logits
            if logits is None:
                logits = ctx.ids.mask(linear_logits(hidden[rows], weight, bias))
            grad = _gradient(
                logits,
                labels[rows],
                entropy[rows],
                grads=[grad_output[rows] for grad_output in grad_outputs],
                temperature=ctx.temperature,
                dtype=weight.dtype,
            )

            torch.mm(grad, weight, out=grad_hidden[rows])
            if needs_weight and saved_logits is not None:
                grad_weight = grad.t() @ hidden
            elif needs_weight:
                grad_weight = _add_product(grad_weight, grad.t(), hidden[rows])
            if needs_bias:
                grad_sum = grad.sum(0, dtype=entropy.dtype)
                grad_bias = grad_sum if grad_bias is None else grad_sum.add_(grad_bias)

        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits (N, V) of ``hidden`` (N, H) and ``weight`` (V, H), in float32 on GPUs.

    Neighbouring bfloat16 numbers near 30 are an eighth apart.
    """
    if not hidden.is_cuda or weight.element_size() > 2:
        return F.linear(hidden, weight, bias)
    logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Add ``left`` times ``right`` to ``total`` in place, in float32 at least; a ``total`` of None is 0."""
    if total is None:
        dtype = torch.promote_types(left.dtype, torch.float32)
        shape = (left.shape[0], right.shape[1])
        total = torch.zeros(shape, dtype=dtype, device=left.device)

    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    if total.is_cuda:
        return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    return total.add_(left @ right)


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype, ids: SampledIds) -> Tensor:
    """Logits divided by temperature, with minus infinity at ids that are left out.

    The result may be ``logits`` itself if no id is left out, so do not write into it.
    """
    scaled = logits.to(dtype) if temperature == 1 else logits.to(dtype) / temperature
    if not ids.left_out:
        return scaled
    return ids.mask(scaled.clone() if scaled is logits else scaled)


def log_probs_from_logits(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, sampled_ids: SampledIds = ALL_IDS
) -> Tensor:
    """log softmax(logits / temperature) at ``labels``: (..., V) and int64 (...) to float32 (...).

    The softmax covers ``sampled_ids``; the result is minus infinity at other ids, whose logits get a gradient of 0.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, torch.log(torch.tensor(3.0))]])
    >>> log_probs_from_logits(logits, torch.tensor([0, 1])).exp()
    tensor([0.5000, 0.7500])
    """
    flat_logits = logits.flatten(0, -2)
    flat_labels = labels.flatten()
    with_entropy = False
    log_probs, _ = _SelectedLogProbs.apply(
        flat_logits, flat_labels, temperature, with_entropy, sampled_ids
    )
    return log_probs.view(labels.shape)


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, sampled_ids: SampledIds = ALL_IDS
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``log_probs_from_logits``, and entropy in nats of softmax(logits / temperature), float32 (...)."""
    flat_logits = logits.flatten(0, -2)
    flat_labels = labels.flatten()
    with_entropy = True
    log_probs, entropy = _SelectedLogProbs.apply(
        flat_logits, flat_labels, temperature, with_entropy, sampled_ids
    )
    return log_probs.view(labels.shape), entropy.view(labels.shape)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (..., V) to float32 (...). Differentiable."""
    any_labels = logits.new_zeros(logits.shape[:-1], dtype=torch.int64)
    _, entropy = log_probs_and_entropy(logits, any_labels, temperature)
    return entropy


def linear_log_probs(
    head: Any,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    hidden: Tensor,
    sampled_ids: SampledIds = ALL_IDS,
) -> Tensor:
    """Log-probs at ``labels`` of a linear ``head``'s logits, with entropy beside them: float32 (..., 2), or (..., 1).

    ``hidden`` (..., H) are the inputs of the head, and the softmax covers ``sampled_ids``. At most ``LOGITS_AT_ONCE``
    logits exist at a time.
    """
    chosen, entropy = _LinearLogProbs.apply(
        hidden.flatten(0, -2),
        head.weight,
        head.bias,
        labels.flatten(),
        sampled_ids,
        temperature,
        with_entropy,
    )
    columns = [chosen, entropy] if with_entropy else [chosen]
    return torch.stack(columns, -1).unflatten(0, hidden.shape[:-1])


def masked_sum(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Sum of the elements where ``mask`` (same shape, bool or 0/1) is set; ``mask`` None counts all."""
    if mask is not None:
        tensor = torch.where(mask.bool(), tensor, 0.0)
    return tensor.sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Mean of the elements where ``mask`` (same shape, bool or 0/1) is set; 0 if none is.

    With ``dim=-1`` on (B, L) the result is one mean per sequence, (B,).

    >>> masked_mean(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]))
    tensor(1.5000)
    """
    if mask is None:
        return tensor.mean(dim)
    n_set = mask.bool().sum(dim).clamp(min=1)
    return masked_sum(tensor, mask, dim) / n_set


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

    >>> compute_approx_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]))
    tensor([[ 0.5000, -1.0000]])
    """
    if action_mask is not None:
        check_tensor(
            action_mask,
            "action_mask",
            order="(log_probs, ref_log_probs, action_mask, kl_estimator)",
        )

    dtype = torch.promote_types(log_probs.dtype, torch.float32)  # bfloat16 differences are noise
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
