"""Tiny models that read images, with random weights, their processors, and images for them.

Where torchvision is not installed, the processors of Qwen and SmolVLM cannot be made.
"""

import string

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from openppo.config.data import PromptDataConfig
from openppo.datasets import load_prompts
from openppo.datasets.media import RowVision
from openppo.datasets.sources import number_rows
from openppo.media import MediaItem
from openppo.models.sampled_ids import SampledIds

IMAGE, VIDEO, OPEN, CLOSE = 60, 61, 62, 63
SAMPLED = SampledIds((range(IMAGE, VIDEO + 1),))
_WIDTH = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
TEXT = {
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
TEXT |= {**_WIDTH, **_NO_IDS}
_GRID = {
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_GRID |= {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
_QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": OPEN,
    "vision_end_token_id": CLOSE,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_SEEN = {**_WIDTH, "image_size": 16, "patch_size": 4, "initializer_range": 0.2}


def llava():
    vision = CLIPVisionConfig(**_SEEN | {"patch_size": 8})
    given = {"image_token_index": IMAGE, "vision_feature_layer": -1, **_NO_IDS}
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT), **given)
    )


def qwen2_5_vl():
    vision = {**_GRID, "window_size": 16, "fullatt_block_indexes": [1]}
    text = {**TEXT, "rope_parameters": _ROPE}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_QWEN)
    )


def qwen3_vl():
    vision = {**_GRID, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, "head_dim": 8, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN)
    )


def gemma3():
    text = {
        **TEXT,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    given = {
        "image_token_index": IMAGE,
        "boi_token_index": OPEN,
        "eoi_token_index": CLOSE,
        **_NO_IDS,
    }
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=_SEEN, mm_tokens_per_image=4, **given)
    )


def smolvlm(config=SmolVLMConfig, model=SmolVLMForConditionalGeneration):
    text = {"model_type": "llama", **TEXT}
    return model(
        config(
            text_config=text, vision_config=_SEEN, image_token_id=IMAGE, scale_factor=2, **_NO_IDS
        )
    )


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
        return MediaItem(
            {"pixel_values": patches, "image_grid_thw": grid}, IMAGE, n_patches // 4, key
        )
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


PLAIN = "<pad> <eos> <unk>".split()
NAMES = {
    "llava": ("<image>", "<video>", "<open>", "<close>"),
    "qwen": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "gemma3": ("<image_soft_token>", "<video>", "<start_of_image>", "<end_of_image>"),
    "idefics": ("<image>", "<video>", "<global-img>", "<fake_token_around_image>"),
}
"""Texts of the tokens ``IMAGE``, ``VIDEO``, ``OPEN`` and ``CLOSE``."""
PLACES = dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>")
PLACES["gemma3"] = "<start_of_image>"
SMALL = {"shortest_edge": 8 * 8, "longest_edge": 16 * 16}


def tokenizer_of(family):
    """64 tokens: single characters, and at the end those of images."""
    kind = next((name for name in NAMES if family.startswith(name)), "idefics")
    image, video, opened, closed = NAMES[kind]
    letters = [*PLAIN, *"\n <>_.", *string.ascii_lowercase, *string.digits]
    places = {text: i for i, text in enumerate(letters)}
    places |= {f"<{i}>": i for i in range(len(letters), IMAGE)}
    core = Tokenizer(
        models.WordLevel(
            places | {image: IMAGE, video: VIDEO, opened: OPEN, closed: CLOSE}, "<unk>"
        )
    )
    core.add_special_tokens([*PLAIN, image, video, opened, closed])
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    more = {"image_token": image, "video_token": video}
    if kind == "gemma3":
        more |= {"boi_token": opened, "eoi_token": closed}
    if kind == "idefics":
        more = {"image_token": image, "fake_image_token": closed, "global_image_token": opened}
        more["end_of_utterance_token"] = "<eos>"
    return PreTrainedTokenizerFast(tokenizer_object=core, **names, extra_special_tokens=more)


def processor_of(family):
    tokenizer = tokenizer_of(family)
    if family == "llava":
        sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        given = {"image_token": "<image>", "num_additional_image_tokens": 1}
        return LlavaProcessor(CLIPImageProcessorPil(**sizes), tokenizer, 8, "default", **given)
    if family.startswith("qwen"):
        kind, video = {
            "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
            "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
        }[family]
        given = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        frames = video(
            **given, size={"shortest_edge": 64, "longest_edge": 4 * 256}, cap_pixels_per_frame=False
        )
        return kind(Qwen2VLImageProcessorPil(**given, size=SMALL), tokenizer, frames)
    if family == "gemma3":
        return Gemma3Processor(
            Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), tokenizer, None, 4
        )
    sizes = {
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
        "do_image_splitting": False,
    }
    if family == "idefics3":
        return Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, 4)
    frames = SmolVLMVideoProcessor(size={"longest_edge": 16}, max_image_size={"longest_edge": 16})
    return SmolVLMProcessor(SmolVLMImageProcessorPil(**sizes), tokenizer, frames, 4)


def pictures(n):
    dice = np.random.default_rng(n)
    return [Image.fromarray(dice.integers(0, 255, (16, 20, 3), dtype=np.uint8)) for _ in range(n)]


def load(processor, rows, **options):
    videos = "videos" if "videos" in rows[0] else None
    options = PromptDataConfig(prompt_data="-", image_key="images", video_key=videos, **options)
    vision = RowVision(lambda: processor, [IMAGE, VIDEO], processor.tokenizer, options)
    return load_prompts(
        number_rows(rows, flag="--prompt_data"), processor.tokenizer, options, vision=vision
    )
