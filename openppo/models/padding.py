"""Token ids to padded tensors, and padded tensors to packed rows where that is exact."""

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

_ROW = [2, 0, 1, 3, 3]  # what tiny forwards look at, beside others
_LEAK, NOISE = 1e-5, 0.05  # bounds of its changes by others, and by its place, in bfloat16 too


def pad_right(rows: Sequence[Sequence[int] | Tensor], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Sequences int64 (B, L) padded on the right, and the mask of real tokens, bool (B, L)."""
    lengths = torch.tensor([len(row) for row in rows])
    sequences = pad_sequence(
        [torch.as_tensor(row, dtype=torch.int64) for row in rows], True, pad_token_id
    )
    return sequences, torch.arange(sequences.shape[1]) < lengths[:, None]


def rounded_width(length: int) -> int:
    """Next multiple of 8, or of a larger power of 2 for long rows; at most a sixteenth, or 7, above ``length``."""
    step = max(8, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step


def pad_width(sequences: Tensor, model: Any) -> Tensor:
    """``sequences`` int64 (B, L) on the model's device; on CPUs in bfloat16 (B, ``rounded_width(L)``), if that fits it.

    oneDNN compiles matrix products for each new shape, keeps a thousand of them, and is faster with even ones.
    """
    length, device = sequences.shape[1], device_of(model)
    if device.type != "cpu" or model.dtype is not torch.bfloat16:
        return on_device(sequences, device)
    positions, width = context_length(model.config), rounded_width(length)
    return (
        sequences
        if positions is not None and width > positions
        else F.pad(sequences, (0, width - length))
    )


class WithMedia(Protocol):
    """A prompt, or an example."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def media(self) -> Media: ...


def with_stand_in(
    stand_in: WithMedia | None, media: Sequence[Media], *tensors: Tensor
) -> tuple[Sequence[Media], list[Tensor]]:
    """``media`` and ``tensors`` (B, L) of a batch, sequences and their mask first, with a row of ``stand_in`` behind.

    So all ranks run the same parts of a model, whose weights may be partitioned and gradients reduced together. Only
    for a batch without media of one of its kinds; no place of the row is an action.
    """
    kinds = {item.kind for of_row in media for item in of_row}
    if stand_in is None or kinds.issuperset(item.kind for item in stand_in.media):
        return media, list(tensors)
    row = torch.tensor([stand_in.token_ids])
    n_rows, length = tensors[0].shape
    width, real = max(length, row.shape[1]), torch.ones_like(row, dtype=torch.bool)

    def longer(tensor: Tensor, new: Tensor) -> Tensor:
        padded = (F.pad(x, (0, width - x.shape[1])) for x in (tensor, new.to(tensor)))
        return torch.cat([*padded])

    made = [longer(tensor, new) for tensor, new in zip(tensors, (row, real, ~real), strict=False)]
    return [*(media or [()] * n_rows), stand_in.media], made


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device``; to a GPU from pinned memory, as the host would wait for the GPU's work else."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def base_of(model: Any) -> Any:
    """The model of transformers in a PEFT model, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def device_of(model: Any) -> torch.device:
    """Where the weights of ``model`` are."""
    return next(model.parameters()).device


def pack_rows(
    sequences: Tensor, attention_mask: Tensor, model: Any, position_ids: Tensor | None = None
) -> tuple[dict[str, Any], Tensor]:
    """Real tokens of a batch in one row of T: inputs on ``model``'s device, and where in the row each token is.

    ``sequences`` int64 (B, L) padded on the right, ``attention_mask`` bool (B, L); ``position_ids`` int64 (B, L), if
    rows hold several documents. Inputs int64 (1, T), with positions from 0 in each document, and int32 where each
    begins, once for all layers; places int64 (B x L,), of padding that of the last real token before it.
    """
    real, length = attention_mask.bool().flatten(), sequences.shape[1]  # (B x L,)
    if position_ids is None:
        position_ids = torch.arange(length, device=sequences.device).expand_as(sequences)
    positions = position_ids.flatten()[real]  # (T,)
    starts = F.pad((positions == 0).nonzero()[:, 0], (0, 1), value=len(positions)).int()
    inputs: dict[str, Any] = {
        "input_ids": sequences.flatten()[real][None],
        "position_ids": positions[None],
    }
    inputs |= {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": length,
        "max_length_k": length,
    }
    if model.config._attn_implementation == BY_LENGTHS:
        inputs["attention_mask"] = finished_mask(sequences.device)
    device = device_of(model)
    inputs = {
        name: on_device(value, device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    return inputs, (real.cumsum(0) - 1).clamp(min=0)


@torch.no_grad()
def packing_is_exact(model: Callable[..., Tensor], device: torch.device) -> bool:
    """Whether ``model`` keeps documents of one row apart, by tiny forwards; logs why not.

    ``model`` is called like ``Actor.forward``, by all ranks together. transformers separates documents where position
    ids restart, but not for every architecture and attention.
    """

    def after(first: list[int]) -> Tensor:
        ids = torch.tensor([[*first, *_ROW]], device=device)
        positions = torch.tensor([[*range(len(first)), *range(len(_ROW))]], device=device)
        return model(ids, torch.ones_like(ids, dtype=torch.bool), position_ids=positions)[
            0, len(first) + 1 :
        ]

    return is_exact("documents are not packed", after)


@torch.no_grad()
def pack_where_exact(
    module: Any, forward: Callable[[Tensor, Tensor], Tensor], device: torch.device, name: str
) -> None:
    """Have ``module`` put a batch's samples into one unpadded row if they stay apart there, by tiny forwards.

    ``forward`` is the module or the engine around it, called by all ranks together. That is for attention by lengths,
    which computes no padding then; on a GPU without it a line says so.
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
    """Whether outputs of a row are the same ``beside`` two others, and without others up to rounding; logs if not."""
    try:
        alone = beside([])
        one = beside([0, 1, 2])
        another = beside([3, 1, 0])
    except (TypeError, ValueError) as error:
        logger.warning("%s: the model cannot read one row of them (%s)", otherwise, error)
        return False
    leak, shift = (
        float((one - another).abs().max()),
        float((one - alone).abs().max() / alone.abs().max().clamp(min=1)),
    )
    if leak <= _LEAK and shift <= noise:
        return True
    said = "%s: in one row they change each other's outputs by %.2g, and their own by their place by %.2g"
    logger.warning(said, otherwise, leak, shift)
    return False
