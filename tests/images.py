"""Tiny models that read images, with random weights, and random images for them."""

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from openppo.media import MediaItem

IMAGE, VIDEO, OPEN, CLOSE = 60, 61, 62, 63
_WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
TEXT = {"vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
TEXT |= {**_WIDTH, **_NO_IDS}
_GRID = {"num_heads": 4, "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_GRID |= {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
_QWEN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": OPEN, "vision_end_token_id": CLOSE}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_SEEN = {**_WIDTH, "image_size": 16, "patch_size": 4, "initializer_range": 0.2}


def llava():
    vision = CLIPVisionConfig(**_SEEN | {"patch_size": 8})
    given = {"image_token_index": IMAGE, "vision_feature_layer": -1, **_NO_IDS}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), **given))


def qwen2_5_vl():
    vision = {**_GRID, "window_size": 16, "fullatt_block_indexes": [1]}
    text = {**TEXT, "rope_parameters": _ROPE}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_QWEN))


def qwen3_vl():
    vision = {**_GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, "head_dim": 8, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN))


def gemma3():
    text = {**TEXT, "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    given = {"image_token_index": IMAGE, "boi_token_index": OPEN, "eoi_token_index": CLOSE, **_NO_IDS}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=_SEEN, mm_tokens_per_image=4, **given)
    )


def smolvlm(config=SmolVLMConfig, model=SmolVLMForConditionalGeneration):
    text = {"model_type": "llama", **TEXT}
    return model(config(text_config=text, vision_config=_SEEN, image_token_id=IMAGE, scale_factor=2, **_NO_IDS))


def idefics3():
    return smolvlm(Idefics3Config, Idefics3ForConditionalGeneration)


FAMILIES = {f.__name__: f for f in (llava, qwen2_5_vl, qwen3_vl, gemma3, smolvlm, idefics3)}


def connected(model):
    """The model, whose connector of images is not 0, as that of Gemma 3 is at first."""
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def random_image(family, key):
    """An item of a family's own form; larger ones, where sizes differ, have odd keys."""
    generator = torch.Generator().manual_seed(key)
    if family.startswith("qwen"):
        grid = torch.tensor([[1, 4, 4 + 4 * (key % 2)]])
        n_patches = int(grid.prod())
        patches = torch.randn(n_patches, 3 * 2 * 4 * 4, generator=generator)
        return MediaItem({"pixel_values": patches, "image_grid_thw": grid}, IMAGE, n_patches // 4, key)
    n_tiles = 1 + key % 2 if family in ("smolvlm", "idefics3") else 1
    inputs = {"pixel_values": torch.randn(n_tiles, 3, 16, 16, generator=generator)}
    if family in ("smolvlm", "idefics3"):
        inputs["pixel_attention_mask"] = torch.ones(n_tiles, 16, 16, dtype=torch.long)
    return MediaItem(inputs, IMAGE, 4 * n_tiles, key)


def with_images(ids, items):
    """Token ids in which ``OPEN`` stands for the next image."""
    items, made = iter(items), []
    for token_id in ids:
        made += [OPEN, *[IMAGE] * next(items).n_tokens, CLOSE] if token_id == OPEN else [token_id]
    return made
