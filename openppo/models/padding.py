"""Padding of token ids to tensors, and packing of padded tensors to one row where that is exact."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from openppo import logger
from openppo.media import Media
from openppo.models.attention import BY_LENGTHS, finished_mask
from openppo.models.pretrained import context_length
from openppo.models.vision_models import placeholders

_ROW = [2, 0, 1, 3, 3]
"""Row whose outputs are compared in tiny forwards, beside different other rows."""
_LEAK = 1e-5
"""Largest change of its outputs that other rows may cause."""
NOISE = 0.05
"""Largest relative change of its outputs that its place may cause, in bfloat16 too."""


def pad_right(rows: Sequence[Sequence[int] | Tensor], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Sequences int64 (B, L) padded on the right, and the mask of real tokens, bool (B, L)."""
    lengths = torch.tensor([len(row) for row in rows])
    tensors = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    sequences = pad_sequence(tensors, batch_first=True, padding_value=pad_token_id)
    return sequences, torch.arange(sequences.shape[1]) < lengths[:, None]


def rounded_width(length: int) -> int:
    """Next multiple of 8, or of a larger power of 2 for long rows.

    It is at most a sixteenth, or 7, above ``length``.
    """
    step = max(8, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step


def pad_width(sequences: Tensor, model: Any) -> Tensor:
    """Move ``sequences`` int64 (B, L) to the model's device; on CPUs in bfloat16 pad them to ``rounded_width(L)``.

    oneDNN compiles a matrix product for each new shape, caches a thousand of them, and is faster with even shapes. Rows
    that would exceed the model's context are not padded.
    """
    device = device_of(model)
    if device.type != "cpu" or model.dtype is not torch.bfloat16:
        return on_device(sequences, device)

    width = rounded_width(sequences.shape[1])
    max_width = context_length(model.config)
    if max_width is not None and width > max_width:
        return sequences
    return pad_to(sequences, width)


def pad_to(tensor: Tensor, width: int) -> Tensor:
    """Append zeros to the last dimension of ``tensor``, up to ``width``."""
    return F.pad(tensor, (0, width - tensor.shape[-1]))


class WithMedia(Protocol):
    """Prompt or example, for its tokens and images."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def media(self) -> Media: ...


def with_stand_in(
    stand_in: WithMedia | None, media: Sequence[Media], *tensors: Tensor
) -> tuple[Sequence[Media], list[Tensor]]:
    """Add ``stand_in`` as last row to ``media`` and ``tensors`` (B, L) that lack a kind of its media.

    ``tensors`` are sequences, their attention mask and possibly an action mask; the new row has no actions. Every rank
    then runs the same modules, as ZeRO requires.
    """
    kinds = {item.kind for row_media in media for item in row_media}
    if stand_in is None or kinds.issuperset(item.kind for item in stand_in.media):
        return media, list(tensors)

    ids = torch.tensor([stand_in.token_ids])
    attention_mask = torch.ones_like(ids, dtype=torch.bool)
    action_mask = torch.zeros_like(attention_mask)
    n_rows, length = tensors[0].shape
    width = max(length, ids.shape[1])

    longer = []
    for tensor, row in zip(tensors, (ids, attention_mask, action_mask), strict=False):
        padded_row = pad_to(row.to(tensor), width)
        longer.append(torch.cat([pad_to(tensor, width), padded_row]))
    return [*(media or [()] * n_rows), stand_in.media], longer


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move ``tensor`` to ``device``; copies to a GPU use pinned memory, so that the host does not wait."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def inputs_on_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the ``inputs`` of a model with their tensors moved to ``device``."""
    moved = {}
    for name, value in inputs.items():
        moved[name] = on_device(value, device) if isinstance(value, Tensor) else value
    return moved


def base_of(model: Any) -> Any:
    """The transformers model inside a PEFT model, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def device_of(model: Any) -> torch.device:
    """The device that the weights of ``model`` are on."""
    return next(model.parameters()).device


def pack_rows(
    sequences: Tensor, attention_mask: Tensor, model: Any, position_ids: Tensor | None = None
) -> tuple[dict[str, Any], Tensor]:
    """Pack the real tokens of a batch into one row: its inputs, and the place of each token in it.

    ``sequences`` int64 (B, L) padded on the right, ``attention_mask`` bool (B, L); ``position_ids`` int64 (B, L), if
    rows hold several documents. The inputs are on ``model``'s device: T tokens int64 (1, T), positions from 0 in each
    document, and the int32 starts of documents, computed once for all layers. The places are int64 (B x L,); padding
    has the place of the last real token before it.
    """
    length = sequences.shape[1]
    if position_ids is None:
        position_ids = torch.arange(length, device=sequences.device).expand_as(sequences)
    is_real = attention_mask.bool().flatten()  # (B x L,)
    positions = position_ids.flatten()[is_real]  # (T,)
    first_tokens = (positions == 0).nonzero()[:, 0]
    n_tokens = len(positions)
    starts = F.pad(first_tokens, (0, 1), value=n_tokens).int()

    inputs: dict[str, Any] = {
        "input_ids": sequences.flatten()[is_real][None],
        "position_ids": positions[None],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": length,
        "max_length_k": length,
    }
    if model.config._attn_implementation == BY_LENGTHS:
        inputs["attention_mask"] = finished_mask(sequences.device)

    inputs = inputs_on_device(inputs, device_of(model))
    return inputs, (is_real.cumsum(0) - 1).clamp(min=0)


@torch.no_grad()
def packing_is_exact(model: Callable[..., Tensor], device: torch.device) -> bool:
    """True if tiny forwards show that ``model`` keeps documents of one row apart; else logs the reason.

    ``model`` is called like ``Actor.forward``, by all ranks together. transformers separates documents where position
    ids restart, but not for every architecture and attention.
    """

    def after(first: list[int]) -> Tensor:
        ids = torch.tensor([[*first, *_ROW]], device=device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        positions = [*range(len(first)), *range(len(_ROW))]
        position_ids = torch.tensor([positions], device=device)
        log_probs = model(ids, mask, position_ids=position_ids)
        return log_probs[0, len(first) + 1 :]

    return is_exact("documents are not packed", after)


@torch.no_grad()
def pack_where_exact(
    module: Any, forward: Callable[[Tensor, Tensor], Tensor], device: torch.device, name: str
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
        module.packs_rows = len(first) > 0
        sequences, mask = pad_right([first or [0], _ROW], 0)
        return forward(sequences.to(device), mask.to(device))[1]

    module.packs_rows = is_exact(f"samples of the {name} are padded", beside)


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
