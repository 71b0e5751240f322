"""A tiny configuration of every decoder class that Transformers has, and variants of them.

`cases()` walks `MODEL_FOR_CAUSAL_LM_MAPPING`, so a class that a later Transformers adds is walked
too. Sizes are found by their names; what a class needs beside them stands in `EXTRA`.
"""

import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
)

from model.load.architectures import auto_class

WINDOW = 7
CHUNK = 8
LOW = 4

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 320),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size", "lru_width", "dim_model", "emb_dim", "input_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "dff", "ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_inner", "dim_ff"), 64),
    **dict.fromkeys(("num_layers", "n_layer", "n_layers", "num_hidden_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("swa_num_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "dim_head"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    "model_max_length": 256,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    "swa_v_head_dim": 16,
    "linear_num_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_head_dim": 4,
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "index_n_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_conv"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_headdim", "mamba_d_head", "index_head_dim"), 32),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size",), WINDOW),
    "attention_chunk_size": CHUNK,
    "depth": 2,
    **dict.fromkeys(("moe_hidden_size", "out_hidden_size", "text_hidden_size"), 64),
    **dict.fromkeys(("projector_hidden_size", "vision_hidden_size"), 64),
    "moe_shared_expert_intermediate_size": 32,
    "hidden_size_per_layer_input": 16,
    "linear_num_key_heads": 2,
    "zero_expert_num": 1,
    "laurel_rank": 8,
    "image_size": 32,
    "patch_size": 16,
    "initializer_range": 0.3,  # wide, so that the most likely token is so by far
    "init_std": 0.3,
    "tie_word_embeddings": False,  # tied, a large embedding scale repeats its input
    **dict.fromkeys(("bos_token_id", "eos_token_id", "sep_token_id"), None),
    **dict.fromkeys(("decoder_start_token_id", "forced_eos_token_id"), None),
    "pad_token_id": None,
}
_LONG: dict[str, dict[str, Any]] = {  # RoPE of every kind; 40 positions are its first
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 6.4, "original_max_position_embeddings": 40},
    "longrope": {
        "factor": 6.4,
        "original_max_position_embeddings": 40,
        "short_factor": [1.0 + 0.1 * n for n in range(8)],
        "long_factor": [2.0 + 0.5 * n for n in range(8)],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
    "proportional": {},
}
_LONG["longrope"] |= {"short_mscale": 1.1, "long_mscale": 1.3}
_PHI = {"original_max_position_embeddings": 40}
_BERTS = (
    *("Bert", "BertGeneration", "Camembert", "Data2VecText", "Electra", "Ernie", "Roberta"),
    *("RobertaPreLayerNorm", "RoCBert", "XLMRoberta", "XLMRobertaXL", "Xmod", "BigBird"),
    *("MegatronBert", "RemBert", "RoFormer"),
)

# Name of a configuration -> variant -> what it says beside the sizes.
EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    f"{name}Config": {"": {}, "is_decoder": {"is_decoder": True}} for name in _BERTS
}


def rope(kind: str) -> dict[str, Any]:
    """Rope parameters of a kind."""
    return {"rope_type": kind, "rope_theta": 10_000.0, **_LONG[kind]}


_NO_SHARED = {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
_HYBRID = ["full_attention", "sliding_attention"]
_SHARED = {"num_kv_shared_layers": 2, "layer_types": 2 * _HYBRID, "num_hidden_layers": 4}
_LINEAR = ["linear_attention", "full_attention"]
_DOTS = {  # a class that has no sizes for all layers to read
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "shared_experts_intermediate_size": 32,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 24, "max_position_embeddings": 256, "initializer_range": 0.3,
    "index_topk": 5, "index_n_heads": 8, "index_head_dim": 32, "sliding_window": WINDOW,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 32, "swa_head_dim": 32, "swa_qk_nope_head_dim": 24, "swa_v_head_dim": 16,
}  # fmt: skip
_SMALL = {  # of what reads images and sound
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "moe_intermediate_size": 32, "num_local_experts": 2, "downsample_hidden_size": 16,
}  # fmt: skip
_QSA = {  # an index over blocks of 4 tokens
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "hc_lowrank": 8, "ngram_vocab_size_base": 64,
}  # fmt: skip


def _mrope(*sections: int, **others: Any) -> dict[str, Any]:
    """A text part whose rotary factors take time, height and width from sections of a head."""
    found = rope("default") | {"mrope_section": list(sections)} | others
    return {"": {"text_config": {"rope_parameters": found}}}


EXTRA |= {
    **dict.fromkeys(
        (
            *("Qwen2_5_VLConfig", "PaddleOCRVLConfig", "Glm4vConfig"),
            *("Glm46VConfig", "GlmOcrConfig", "GlmgaConfig"),
        ),
        _mrope(2, 3, 3),
    ),
    "Qwen2VLConfig": {"": _mrope(2, 3, 3)[""] | {"vision_config": {"embed_dim": 64}}},
    "Cosmos3EdgeConfig": _mrope(2, 3, 3),
    "Granite4VisionConfig": {"": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"}},
    "Molmo2Config": {"": {"adapter_config": {"vision_feature_layer": [1, 0]}}},
    "MuseSparkConfig": {
        "": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 32]}}
    },
    "NemotronH_Omni_Reasoning_V3_Config": {"": {"vision_config": {"video_temporal_patch_size": 2}}},
    "Qwen2_5OmniThinkerConfig": {
        "": _mrope(2, 3, 3)[""] | {"vision_start_token_id": 1, "audio_start_token_id": 2},
    },
    "Ernie4_5_VLMoeConfig": _mrope(3, 3, 2),
    "Glm4vMoeConfig": _mrope(1, 1, 2, partial_rotary_factor=0.5),
    "HunYuanVLConfig": _mrope(2, 2, 2, 2),
    "HYV4VLConfig": _mrope(2, 1, 1),
    "Apertus1p5Config": {
        "": {
            "text_config": {"rope_parameters": rope("llama3")},
            "vision_config": {
                "base_channels": 32,
                "embed_dim": 32,
                "latent_channels": 32,
                "codebook_size": 64,
                "num_res_blocks": 1,
            },
            "audio_config": {
                "model_type": "wavtokenizer_encoder",
                "codebook_size": 64,
                "codebook_dim": 64,
            },
            "image_token_id": 4,
            "audio_token_id": 5,
            "image_token_offset": 128,
            "audio_token_offset": 192,
        }
    },
    "ChameleonConfig": {"": {"vocabulary_map": {"<image>": 4}, "vq_config": {"base_channels": 32}}},
    "CohereCompassConfig": {
        "": {"text_config": {"rope_parameters": {"full_attention": rope("default")}}}
    },
    "Qwen3VLMoeConfig": {"": {"text_config": {"sliding_window": None}}},
    "Qwen3OmniMoeThinkerConfig": {
        "": {"text_config": {"sliding_window": None}, "vision_start_token_id": 1}
        | {"audio_start_token_id": 2}
    },
    "BailingHybridConfig": {"": {"head_dim": 4}},
    "BambaConfig": {"": {"attn_layer_indices": [1]}},
    "FalconH1Config": {"": {"mamba_d_ssm": 128}},
    "JambaConfig": {"": {"attn_layer_period": 2, "attn_layer_offset": 1}},
    "Mamba2Config": {"": {"num_heads": 4, "head_dim": 32, "n_groups": 1}},
    "NemotronHConfig": {"": {"n_groups": 1, "time_step_min": 1e-9}},
    "Zamba2Config": {
        "": {"n_mamba_heads": 4, "hybrid_layer_ids": [1], "time_step_min": 1e-9},
    },
    "CohereCompassTextConfig": {"": {"rope_parameters": {"full_attention": rope("default")}}},
    "DbrxConfig": {"": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}}},
    "Dots3NoteTextConfig": {"": _DOTS},
    "Dots3NoteConfig": {
        "": {
            "text_config": _DOTS,
            "vision_config": _SMALL
            | {"adapter_in_dim": 64, "adapter_out_dim": 64, "per_layer_config": {}},
            "audio_config": _SMALL | {"adapter_input_size": 64, "adapter_out_dim": 64},
        }
    },
    "Qwen4ExpTextConfig": {"": _QSA},
    "Qwen4ExpConfig": {"": {"text_config": _QSA}},
    "FalconConfig": {
        "": {},
        "alibi": {"alibi": True},
        "keys of every head": {"multi_query": False},
        "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "new, alibi": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True},
    },
    "GPTNeoConfig": {"": {"attention_types": [[["global", "local"], 1]]}},
    "GraniteMoeHybridConfig": {
        "": {"layer_types": _LINEAR},
        "attention": {"layer_types": ["full_attention"] * 2},
    },
    "Lfm2Config": {"": {"layer_types": ["conv", "full_attention"]}, "attention": {}},
    "Lfm2MoeConfig": {"": {"layer_types": ["conv", "full_attention"]}},
    "Gemma3nTextConfig": {
        "": _NO_SHARED | {"activation_sparsity_pattern": [0.0, 0.0]},
        "shared": _SHARED | {"activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0]},
    },
    "Gemma3nConfig": {"": {"text_config": _SHARED}},
    "Gemma4TextConfig": {
        "": _NO_SHARED,
        "shared": _SHARED,
        "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    },
    "Gemma4UnifiedConfig": {"": {"text_config": {"pad_token_id": 0}}},
    "Gemma4UnifiedTextConfig": {"": {}, "shared": _SHARED},
    "MinistralConfig": {"": {}, "mixed": {"layer_types": _HYBRID}},
    "LagunaConfig": {"": {}, "mixed": {"layer_types": _HYBRID}},
    "MellumConfig": {"": {}, "mixed": {"layer_types": _HYBRID}},
    "XmodConfig": {
        "": {"languages": ["en_XX"], "default_language": "en_XX"},
        "is_decoder": {
            "languages": ["en_XX"],
            "default_language": "en_XX",
            "is_decoder": True,
        },
    },
    "DeepseekV3Config": {
        "": {},
        "wide values": {"v_head_dim": 32},
        "a wrong head_dim": {"head_dim": 16},  # 8 are rotated
    },
    "DeepseekV4Config": {
        "": {
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 8,
            },
            "index_topk": 3,
            "num_hidden_layers": 3,
            "layer_types": [
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "sliding_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
        },
    },
    "Llama4Config": {"": {"text_config": {"no_rope_layers": [1, 0]}}},
    "Llama4TextConfig": {"": {"no_rope_layers": [1, 0]}},
    "LongcatFlashConfig": {"": {"head_dim": 8, "qk_rope_head_dim": 8}},
    "Gemma4Config": {
        "": {"text_config": {"pad_token_id": 0}},
        "shared": {"text_config": _SHARED | {"pad_token_id": 0}},
        "vision": {"text_config": {"pad_token_id": 0, "use_bidirectional_attention": "vision"}},
    },
    "Gemma4AssistantConfig": {
        "": {
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
            }
        },
    },
    "RoCBertConfig": {
        variant: {
            "enable_pronunciation": False,
            "enable_shape": False,
            "is_decoder": bool(variant),
        }
        for variant in ("", "is_decoder")
    },
    "ZayaConfig": {"": {"num_experts_per_tok": 1}},
    "LlamaConfig": {"": {}} | {kind: {"rope_parameters": rope(kind)} for kind in _LONG},
    "Phi3Config": {
        "": {},
        "longrope": {"rope_parameters": rope("longrope"), **_PHI, "sliding_window": None},
    },
    "PhimoeConfig": {"": {}, "longrope": {"rope_parameters": rope("longrope"), **_PHI}},
    "MistralConfig": {"": {}, "full": {"sliding_window": None}},
    "MixtralConfig": {"": {}, "full": {"sliding_window": None}},
    "Qwen2Config": {
        "": {},
        "windows": {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    },
    "Qwen3Config": {
        "": {},
        "windows": {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    },
    "Gemma2Config": {"": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}},
    "Gemma3TextConfig": {
        "": {"query_pre_attn_scalar": 24},
        "bidirectional": {"use_bidirectional_attention": True},
    },
}


def _tiny(config: PreTrainedConfig) -> dict[str, Any]:
    """Sizes for what a configuration has."""
    known, derived = config.to_dict(), _derived(config)
    found = {
        name: value
        for name, value in _SIZES.items()
        if (name in known or hasattr(config, name)) and name not in derived
    }
    if hasattr(config, "kv_lora_rank") and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
        found.pop("head_dim", None)  # of what is rotated
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if kinds and not {"layer_types", "layers_block_type"} & _derived(config):
        found["layer_types"] = kinds if len(kinds) > 1 else 2 * kinds
        found["num_hidden_layers"] = len(found["layer_types"])
    for name in getattr(config, "sub_configs", {}):
        sub = getattr(config, name, None)
        if isinstance(sub, PreTrainedConfig):
            found[name] = _tiny(sub) | {"model_type": sub.model_type}
    return found


def _derived(config: PreTrainedConfig) -> set[str]:
    """What a configuration works out of its other values."""
    kind = type(config)
    values = {name: getattr(kind, name, None) for name in dir(kind)}
    return {n for n, v in values.items() if isinstance(v, property) and v.fset is None}


@functools.cache
def config_classes() -> dict[str, type[PreTrainedConfig]]:
    """Every configuration that has a decoder, by name."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return {kind.__name__: kind for mapping in mappings for kind in mapping.keys()}  # noqa: SIM118


def cases() -> list[tuple[str, str]]:
    """Every name of a configuration, with every variant of it."""
    return [(name, variant) for name in config_classes() for variant in EXTRA.get(name, {"": {}})]


def make_config(name: str, variant: str) -> PreTrainedConfig:
    """The tiny configuration of a case; the class's own where sizes are not enough to make one.

    What a class does not let one say (no end of text, say) is left as it is there.
    """
    kind = config_classes()[name]
    extra = EXTRA.get(name, {}).get(variant, {})
    try:
        sizes = _tiny(kind())
    except Exception:  # noqa: BLE001  # a class that has no defaults
        sizes = {}
    while True:
        try:
            return kind(**_merged(sizes, extra))
        except Exception as error:  # noqa: BLE001
            named = re.search(r"field '(\w+)'", str(error))
            if named is None or not _without(sizes, named[1]):
                return kind(**extra)  # a class that is refused needs no sizes


def lowered(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The configuration with every threshold below the length of the prompts; None: it has none.

    Every integer that changes no weight's shape may be a threshold: of a scale, of rope's factors,
    of what a layer sees. Windows, chunks and positions have their sizes above.
    """
    fields = config.to_dict()
    shapes, kept = _shapes(fields, config), 0
    for holder, name in _integers(fields):
        before = holder[name]
        holder[name] = LOW
        if _shapes(fields, config) == shapes:
            kept += 1
        else:
            holder[name] = before
    return type(config).from_dict(fields) if kept else None


def _integers(fields: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where an integer stands that may be a threshold."""
    for name, value in fields.items():
        if not isinstance(name, str) or re.search("vision|image|audio|video|vq_|token", name):
            continue
        if isinstance(value, dict):
            yield from _integers(value)
        elif type(value) is int and value > LOW and name not in _SIZES:
            yield fields, name


def _shapes(fields: dict[str, Any], config: PreTrainedConfig) -> object:
    """The shapes of a network's weights; None: there is no such network."""
    try:
        with torch.device("meta"):
            network = auto_class(config).from_config(type(config).from_dict(copy.deepcopy(fields)))
    except Exception:  # noqa: BLE001  # whatever the class makes of it
        return None
    return {name: weight.shape for name, weight in network.state_dict().items()}


def _merged(sizes: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    parts = {
        name: sizes[name] | value
        for name, value in extra.items()
        if isinstance(value, dict) and isinstance(sizes.get(name), dict)
    }
    return sizes | extra | parts


def _without(sizes: dict[str, Any], name: str) -> bool:
    """Leave a name out, here or in a part; whether it was there."""
    parts = [value for value in sizes.values() if isinstance(value, dict)]
    if name in sizes and sizes[name] is None and name.endswith("_token_id"):
        sizes[name] = 1
        return True
    return sizes.pop(name, _without) is not _without or any(_without(p, name) for p in parts)
