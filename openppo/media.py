"""Images of a prompt as its model reads them: the noun, and a batch of them beside token ids."""

import inspect
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import Tensor
from torch.nn import functional as F

KINDS = ("image", "video")
"""What a placeholder stands for; a config names the token of each, ``image_token_id`` and ``video_token_id``."""


_PROCESSOR_FILES = "processor_config.json preprocessor_config.json video_preprocessor_config.json chat_template.json"
TOWERS = {"vision_tower", "visual", "vision_model"}
CONNECTORS = {"multi_modal_projector", "connector", "merger", "deepstack_merger_list"}
"""Names in transformers of the parts that read images, and map their features to embeddings."""


def vision_part(name: str) -> str | None:
    """Which of these a module or parameter of that name is in: tower, connector, or neither."""
    parts = {*name.split(".")}
    return "connector" if parts & CONNECTORS else "tower" if parts & TOWERS else None


FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "idefics3")
"""Types of models whose sampling and training tests compare."""


@dataclass(frozen=True, eq=False)
class MediaItem:
    """An image or a video, processed: ``inputs`` by their names in the model's forward, on the CPU.

    Their first dimension counts what several items have one after the other: images, tiles or patches. ``n_tokens``
    tokens ``token_id`` of the prompt stand for it; ``text`` is what the processor writes of them and around them. Items
    of one ``key`` have equal inputs. ``thumbnail`` is a data URL of a small picture, for people.
    """

    inputs: dict[str, Tensor]
    token_id: int
    n_tokens: int
    key: int
    kind: str = "image"
    text: str = ""
    thumbnail: str = field(default="", repr=False)


Media = tuple[MediaItem, ...]
"""Those of one prompt, in the order of their places."""


def copy_processor(name: str, folder: Path) -> None:
    """Copy the files, if any, of what processes images for model ``name``, from its folder or the hub's cache.

    Of a PEFT folder they are those of its base model.
    """
    if name and (adapters := Path(name) / "adapter_config.json").is_file():
        name = (
            json.loads(adapters.read_text(encoding="utf-8")).get("base_model_name_or_path") or name
        )
    for file in _PROCESSOR_FILES.split() if name else ():
        found: Any = Path(name) / file
        if not Path(name).is_dir():
            with suppress(HFValidationError):  # no name of the hub
                found = try_to_load_from_cache(name, file)
        if isinstance(found, str | Path) and Path(found).is_file():
            shutil.copyfile(found, folder / file)


def placeholders(config: Any) -> dict[int, str]:
    """Kinds by the id of the token that stands for them; empty for models of text."""
    ids = {getattr(config, f"{kind}_token_id", None): kind for kind in KINDS}
    return {token_id: kind for token_id, kind in ids.items() if token_id is not None}


def n_patches(items: Sequence[MediaItem], config: Any) -> int:
    """Patches that the tower of a model computes for ``items``."""
    vision = getattr(config, "vision_config", None)
    size = 3 * getattr(vision, "patch_size", 1) ** 2 * getattr(vision, "temporal_patch_size", 1)
    return sum(
        x.numel() // size
        for item in items
        for name, x in item.inputs.items()
        if name.startswith("pixel_values")
    )


def check_images(config: Any, model: str) -> None:
    """``ValueError`` for a family whose numbers were not compared with images; ``model`` is a flag and a name."""
    if config.model_type not in FAMILIES:
        what = f"{model} is of type {config.model_type}, and with images only {', '.join(FAMILIES)} were compared"
        raise ValueError(f"{what} with transformers. Use one of them, or rows without images.")


def distinct_ids(token_ids: Sequence[int], media: Media = ()) -> list[int]:
    """``token_ids`` with numbers below 0 where they stand for media: equal ones where the items are equal.

    So rows that begin alike are those that begin with equal numbers.
    """
    made = list(token_ids)
    for item, places in item_places(token_ids, media):
        for t in places:
            made[t] = -1 - item.key
    return made


def item_places(token_ids: Sequence[int], media: Media) -> Iterator[tuple[MediaItem, list[int]]]:
    """Each item with the places of its tokens."""
    kinds = {item.token_id for item in media}
    free = {
        token_id: iter([t for t, i in enumerate(token_ids) if i == token_id]) for token_id in kinds
    }
    for item in media:
        yield item, list(islice(free[item.token_id], item.n_tokens))


def model_inputs(model: Any, input_ids: Tensor, media: Sequence[Media]) -> dict[str, Tensor]:
    """What ``model``'s forward gets beside ``input_ids`` (B, L) for the ``media`` of its rows, on the ids' device.

    Models that tell kinds of tokens get those, int64 (B, L): 0 text, 1 image, 2 video.
    """
    items = list(chain.from_iterable(media))
    made = {name: tensor.to(input_ids.device) for name, tensor in joined(items).items()}
    made = {
        name: x.to(model.dtype) if name.startswith("pixel_values") else x
        for name, x in made.items()
    }
    parts = model, *model.children()  # a classifier's own forward may not be the one that is called
    accepted = {name for part in parts for name in inspect.signature(type(part).forward).parameters}
    for name in {"token_type_ids", "mm_token_type_ids"} & accepted:
        made[name] = token_kinds(input_ids, model.config)
    return made


def token_kinds(input_ids: Tensor, config: Any) -> Tensor:
    """Int64 like ``input_ids``: 0 for text, 1 where tokens stand for images, 2 for videos."""
    kinds = torch.zeros_like(input_ids)
    for token_id, kind in placeholders(config).items():
        kinds[input_ids == token_id] = 1 + KINDS.index(kind)
    return kinds


def joined(items: Sequence[MediaItem]) -> dict[str, Tensor]:
    """Inputs of all items, one after the other; other dimensions are padded with zeros to the largest."""
    names = dict.fromkeys(name for item in items for name in item.inputs)
    made = {
        name: _joined([item.inputs[name] for item in items if name in item.inputs])
        for name in names
    }
    if (
        "pixel_attention_mask" in made
    ):  # Idefics 3 and SmolVLM: images of a batch's first row are enough
        made = {name: tensor[None] for name, tensor in made.items()}
    return made


def _joined(parts: list[Tensor]) -> Tensor:
    shapes = torch.tensor([part.shape[1:] for part in parts])
    largest = shapes.amax(0).tolist() if shapes.numel() else []
    return torch.cat([F.pad(part, _room(part, largest)) for part in parts])


def _room(part: Tensor, largest: Sequence[int]) -> list[int]:
    """Padding behind each dimension after the first, the last one first, as ``F.pad`` takes it."""
    return [
        n
        for size, most in zip(part.shape[:0:-1], largest[::-1], strict=True)
        for n in (0, most - size)
    ]


def rope_positions(model: Any, input_ids: Tensor, media: Sequence[Media]) -> Tensor | None:
    """Positions (3, B, L) of tokens in time, height and width, of rows padded on the right.

    None for models that count tokens, and without media: there all three are places.
    """
    index = next((m.get_rope_index for m in model.modules() if hasattr(m, "get_rope_index")), None)
    if index is None or not any(media):
        return None
    inputs: Mapping[str, Tensor] = joined(list(chain.from_iterable(media)))
    grids = {
        name: inputs.get(name)
        for name in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    }
    accepted = inspect.signature(index).parameters
    given = {name: value for name, value in grids.items() if name in accepted}
    positions, _ = index(input_ids, mm_token_type_ids=token_kinds(input_ids, model.config), **given)
    return positions


_SCHEME = "openppo:"
_MEDIA = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}


def media_kind(part: object) -> str | None:
    """Kind of a part of a message's content, in OpenAI's form or that of transformers; None for a text."""
    return _MEDIA.get(str(part.get("type"))) if isinstance(part, dict) else None


def media_part(kind: str, key: int) -> dict[str, Any]:
    """The part that stands for an item, in OpenAI's form: clients hand it on as it is."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": media_url(key)}}


def media_url(key: int) -> str:
    """What stands for an item in messages."""
    return f"{_SCHEME}{key}"


def media_key(part: Any) -> int | None:
    """Key of the item that a part stands for; None for an image of another form."""
    given = part.get("image_url") or part.get("video_url") if isinstance(part, dict) else None
    url = given.get("url") if isinstance(given, dict) else None
    return (
        int(url.removeprefix(_SCHEME))
        if isinstance(url, str) and re.fullmatch(rf"{_SCHEME}\d+", url)
        else None
    )


def media_parts(messages: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Parts of the messages' contents that are images or videos."""
    contents = (message.get("content") for message in messages)
    return (
        part
        for content in contents
        if isinstance(content, list)
        for part in content
        if media_kind(part)
    )
