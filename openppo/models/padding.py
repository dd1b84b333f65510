"""Padding of token ids to tensors, and packing of padded tensors to one row where that is exact."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from openppo import logger
from openppo.media import Tokens
from openppo.model_inputs import ModelInputs
from openppo.models.attention import BY_LENGTHS, finished_mask
from openppo.models.pretrained import context_length
from openppo.models.vision_models import placeholders

_ROW = [2, 0, 1, 3, 3]
"""Row whose outputs are compared in tiny forwards, beside different other rows."""
_LEAK = 1e-5
"""Largest change of its outputs that other rows may cause."""
NOISE = 0.05
"""Largest relative change of its outputs that its place may cause, in bfloat16 too."""


def rounded_width(length: int) -> int:
    """Next multiple of 8, or of a larger power of 2 for long rows.

    It is at most a sixteenth, or 7, above ``length``.
    """
    step = max(8, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step


def pad_width(inputs: ModelInputs, model: Any) -> ModelInputs:
    """Move ``inputs`` to the model's device; on CPUs in bfloat16 pad them to ``rounded_width(L)``.

    oneDNN compiles a matrix product for each new shape, caches a thousand of them, and is faster with even shapes. Rows
    that would exceed the model's context are not padded.
    """
    device = device_of(model)
    if device.type != "cpu" or model.dtype is not torch.bfloat16:
        return inputs.to(device, on_device)

    width = rounded_width(inputs.sequences.shape[1])
    max_width = context_length(model.config)
    if max_width is not None and width > max_width:
        return inputs
    return inputs.widened(width)


def with_stand_in(stand_in: Tokens | None, inputs: ModelInputs) -> ModelInputs:
    """Add ``stand_in`` as last row to ``inputs`` that lack a kind of its media.

    Every rank then runs the same modules, as ZeRO requires.
    """
    if stand_in is None:
        return inputs
    kinds = {item.kind for row_media in inputs.media for item in row_media}
    if kinds.issuperset(item.kind for item in stand_in.media):
        return inputs

    blank = ModelInputs.of([stand_in], pad_token_id=0)
    return ModelInputs.join([inputs, blank.to(inputs.sequences.device)])


def extended_mask(mask: Tensor, inputs: ModelInputs) -> Tensor:
    """Extend ``mask`` with False to the rows and columns of ``inputs``."""
    n_rows, width = inputs.sequences.shape
    return F.pad(mask, (0, width - mask.shape[1], 0, n_rows - len(mask)))


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move ``tensor`` to ``device``; copies to a GPU use pinned memory, so that the host does not wait."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def arguments_on_device(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the ``arguments`` of a model's forward with their tensors moved to ``device``."""
    moved = {}
    for name, value in arguments.items():
        moved[name] = on_device(value, device) if isinstance(value, Tensor) else value
    return moved


def base_of(model: Any) -> Any:
    """The transformers model inside a PEFT model, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def device_of(model: Any) -> torch.device:
    """The device that the weights of ``model`` are on."""
    return next(model.parameters()).device


def pack_rows(inputs: ModelInputs, model: Any) -> tuple[dict[str, Any], Tensor]:
    """Pack the real tokens of a batch into one row: arguments of the forward, and the place of each token.

    The arguments are on ``model``'s device: T tokens int64 (1, T), positions from 0 in each document, and the int32
    starts of documents, computed once for all layers. The places are int64 (B x L,); padding has the place of the last
    real token before it.
    """
    sequences = inputs.sequences
    position_ids = inputs.position_ids
    length = sequences.shape[1]
    if position_ids is None:
        position_ids = torch.arange(length, device=sequences.device).expand_as(sequences)
    is_real = inputs.attention_mask.bool().flatten()  # (B x L,)
    positions = position_ids.flatten()[is_real]  # (T,)
    first_tokens = (positions == 0).nonzero()[:, 0]
    n_tokens = len(positions)
    starts = F.pad(first_tokens, (0, 1), value=n_tokens).int()

    arguments: dict[str, Any] = {
        "input_ids": sequences.flatten()[is_real][None],
        "position_ids": positions[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": length,
        "max_length_k": length,
    }
    if model.config._attn_implementation == BY_LENGTHS:
        arguments["attention_mask"] = finished_mask(sequences.device)

    arguments = arguments_on_device(arguments, device_of(model))
    return arguments, (is_real.cumsum(0) - 1).clamp(min=0)


@torch.no_grad()
def packing_is_exact(model: Callable[..., Tensor], device: torch.device) -> bool:
    """True if tiny forwards show that ``model`` keeps documents of one row apart; else logs the reason.

    ``model`` is called like ``Actor.forward``, by all ranks together. transformers separates documents where position
    ids restart, but not for every architecture and attention.
    """

    def after(first: list[int]) -> Tensor:
        inputs = ModelInputs.of_ids([[*first, *_ROW]], pad_token_id=0)
        positions = [*range(len(first)), *range(len(_ROW))]
        inputs = replace(inputs, position_ids=torch.tensor([positions]))
        log_probs = model(inputs.to(device))
        return log_probs[0, len(first) + 1 :]

    return is_exact("documents are not packed", after)


@torch.no_grad()
def pack_where_exact(
    module: Any, forward: Callable[[ModelInputs], Tensor], device: torch.device, name: str
) -> None:
    """Have ``module`` pack a batch into one row if tiny forwards show that its samples stay apart.

    ``forward`` is the module or the engine around it, called by all ranks together. Packing needs attention by lengths,
    so that no padding is computed; a GPU without such attention is logged.
    """
    attention = module.model.config._attn_implementation
    if placeholders(module.model.config):
        logger.info("samples of the %s are padded: it reads images", name)
        return

    if attention not in (BY_LENGTHS, "flash_attention_2"):
        if device.type == "cuda":
            logger.info(
                "samples of the %s are padded: its attention is %s. That by lengths needs bfloat16, compute capability "
                "8.0, a model that supports FlashAttention, and agreement with SDPA, of which a line above tells.",
                name,
                attention,
            )
        return

    def beside(first: list[int]) -> Tensor:
        module.use_packing(len(first) > 0)
        inputs = ModelInputs.of_ids([first or [0], _ROW], pad_token_id=0)
        return forward(inputs.to(device))[1]

    module.use_packing(is_exact(f"samples of the {name} are padded", beside))


def is_exact(otherwise: str, beside: Callable[[list[int]], Tensor], noise: float = NOISE) -> bool:
    """True if a row's outputs do not depend on rows ``beside`` it, up to rounding; else log a warning.

    ``beside`` returns the row's outputs beside the row that it is given, or alone for an empty list.
    """
    try:
        alone = beside([])
        outputs = beside([0, 1, 2])
        other_outputs = beside([3, 1, 0])
    except (TypeError, ValueError) as error:
        logger.warning("%s: the model cannot read one row of them (%s)", otherwise, error)
        return False

    leak = float((outputs - other_outputs).abs().max())
    scale = alone.abs().max().clamp(min=1)
    shift = float((outputs - alone).abs().max() / scale)
    if leak <= _LEAK and shift <= noise:
        return True
    logger.warning(
        "%s: in one row they change each other's outputs by %.2g, and their own by their place by %.2g",
        otherwise,
        leak,
        shift,
    )
    return False
