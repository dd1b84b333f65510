"""Tiny configs of transformers' causal language models: few and narrow layers, windows shorter than the prompts."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 64
LENGTH = 64
"""Tokens that each model reads at most, where its config has a limit."""
_WIDTH, _HEADS, _HEAD_WIDTH = 32, 4, 8

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    **{
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "is_decoder": True,
    },
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "embed_dim", "dim_model", "word_embed_proj_dim"),
        _WIDTH,
    ),
    **dict.fromkeys(("n_positions", "n_ctx", "max_position_embeddings", "max_seq_len"), LENGTH),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "dim_ff"), 48
    ),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), _HEADS),
    **dict.fromkeys(
        ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "dim_head"), _HEAD_WIDTH
    ),
    **dict.fromkeys(("d_kv", "rotary_dim"), _HEAD_WIDTH),
    "num_key_value_heads": 2,
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "shared_expert_intermediate_size"),
        16,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{
        "num_experts_per_tok": 2,
        "expert_hidden_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    **{"n_shared_experts": 1, "num_shared_experts": 1, "moe_layer_start_index": 0},
    **dict.fromkeys(("sliding_window", "attention_window", "window_size", "local_attention"), 6),
    **dict.fromkeys(
        ("initializer_range", "init_std"), 0.2
    ),  # so that every token and position matters
    **{"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_num_heads": 4, "mamba_head_dim": 16},
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
}

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_HIDDEN = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_ATTENTION = {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}
_FFN = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
_EXPERTS = {"moe_topk": 2, "expert_ffn_hidden_size": 16, "zero_expert_num": 2}
_OWN: dict[str, dict[str, Any]] = {
    **{key: {"logit_scale": 1.0} for key in ("cohere", "cohere2", "cohere2_moe")},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": _ATTENTION, "ffn_config": _FFN},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3n_text": {
        **{
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "laurel_rank": 4,
        },
        **_HIDDEN,
    },
    "gemma4_text": {"global_head_dim": _HEAD_WIDTH, **_HIDDEN},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{
        key: {"head_dim": _HEAD_WIDTH}
        for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {**_EXPERTS, "q_lora_rank": 16, "num_key_value_heads": 4, "head_dim": 8},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {
        **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
        **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    },
    "xlnet": {"d_head": _HEAD_WIDTH},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""What some need beside or instead."""

_OTHERS = """
    blt dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git got_ocr2
    llama4 mllama moss_transcribe_diarize musicgen musicgen_melody nemotron_h phi4_multimodal qwen3_5 qwen3_5_moe
    qwen4_exp reformer roc_bert zamba zamba2
""".split()
"""Model types of several parts, or that have no small form."""

NAMES = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(_OTHERS)))
"""Model types of causal language models that ``tiny_config`` can make small."""


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of the model type ``name`` with small sizes and ``changes``."""
    kind = CONFIG_MAPPING[name]
    defaults, names = kind().to_dict(), kind.attribute_map
    known = {
        k: v
        for k, v in _SIZES.items()
        if k.endswith("token_id") or defaults.get(names.get(k, k)) is not None
    }
    for alias, real in names.items():
        if real in known:
            known.pop(alias, None)
    if (
        "kv_lora_rank" in known
    ):  # latent attention: as many keys as queries, whose width has parts of its own
        known["num_key_value_heads"] = _HEADS
        known.pop("head_dim", None)
    computed = [k for k in known if isinstance(getattr(kind, k, None), property)]
    own = _OWN.get(name, {}) | changes
    return kind(**{**{k: v for k, v in known.items() if k not in computed}, **own})
