"""Vision models, by their configs and the names of their parts."""

from collections.abc import Sequence
from typing import Any

from openppo.media import KINDS, MediaItem

TOWERS = {"vision_tower", "visual", "vision_model"}
"""Names in transformers of the parts that read images."""
CONNECTORS = {"multi_modal_projector", "connector", "merger", "deepstack_merger_list"}
"""Names in transformers of the parts that map features of images to embeddings."""


def vision_part(name: str) -> str | None:
    """The part that a module or parameter ``name`` is in: "tower", "connector", or None."""
    parts = {*name.split(".")}
    if parts & CONNECTORS:
        return "connector"
    return "tower" if parts & TOWERS else None


def placeholders(config: Any) -> dict[int, str]:
    """Kind of media by placeholder token id; empty for models that only read text."""
    ids = {getattr(config, f"{kind}_token_id", None): kind for kind in KINDS}
    return {token_id: kind for token_id, kind in ids.items() if token_id is not None}


def n_patches(items: Sequence[MediaItem], config: Any) -> int:
    """Number of patches that a model's vision tower computes for ``items``."""
    vision = getattr(config, "vision_config", None)
    patch_size = getattr(vision, "patch_size", 1)
    patch_numbers = 3 * patch_size**2 * getattr(vision, "temporal_patch_size", 1)

    n = 0
    for item in items:
        for name, tensor in item.inputs.items():
            if name.startswith("pixel_values"):
                n += tensor.numel() // patch_numbers
    return n
