"""Well-known checkpoints, cut down to a tiny size, give generate's tokens, or are refused."""

import copy

import pytest
import transformers

from tests.model import published, walk

CHECKPOINTS = published.stored()
SLOW = {"Qwen/Qwen3.5-35B-A3B"}
CUT = {  # what may differ from the published config.json beside the ids of tokens
    *("vocab_size", "vocab_size_per_layer_input", "initializer_range", "init_std"),
    *("hidden_size", "hidden_size_per_layer_input", "n_embd", "n_embed", "word_embed_proj_dim"),
    *("intermediate_size", "intermediate_size_mlp", "ffn_dim", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("num_hidden_layers", "n_layer", "depth", "layer_types", "hybrid_override_pattern"),
    *("first_k_dense_replace", "num_kv_shared_layers", "max_window_layers", "num_hash_layers"),
    *("heavily_compressed_attention", "compressed_sparse_attention"),
    *("compress_ratios", "deepstack_visual_indexes", "fullatt_block_indexes"),
    *("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads", "n_head"),
    *("num_heads", "head_dim", "global_head_dim", "qk_head_dim", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank", "o_groups"),
    *("mrope_section", "max_position_embeddings", "original_max_position_embeddings"),
    *("n_positions", "n_ctx", "seq_length", "sliding_window", "attention_chunk_size"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    *("top_k_experts", "n_group", "topk_group", "index_head_dim", "index_n_heads", "index_topk"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "mamba_head_dim", "mamba_num_heads", "n_groups"),
    *("ssm_state_size", "chunk_size", "time_step_min", "weight_block_size"),
    *("image_size", "patch_size", "window_size", "num_position_embeddings"),
    *("position_embedding_size", "mm_tokens_per_image", "out_hidden_size"),
    *("vision_output_dim", "projector_input_dim", "projector_output_dim"),
}
SAME_VERSION = pytest.mark.skipif(
    transformers.__version__ != walk.stored_for(),
    reason=f"the outcomes are those of Transformers {walk.stored_for()}",
)


@SAME_VERSION
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CHECKPOINTS],
)
def test_a_published_checkpoint_does_what_the_page_says(tmp_path, name):
    one = CHECKPOINTS[name]
    assert published.outcome(one, tmp_path) == one["outcome"]


def test_most_run_and_the_rest_is_refused():
    outcomes = [one["outcome"] for one in CHECKPOINTS.values()]
    assert len(outcomes) >= 20
    assert outcomes.count("equal") >= 0.85 * len(outcomes)
    assert all(found == "equal" or found.startswith("refused: ") for found in outcomes)


def faults(one):
    """What a cut does beside changing sizes."""
    small = published.tiny(one)
    found = {name for name in _leaves(one["cut"]) if name not in CUT and "token" not in name}
    pairs = [(one["published"], small)]
    if "text_config" in small:
        pairs.append((one["published"]["text_config"], small["text_config"]))
    for big, cut in pairs:
        is_related = _relations(cut)
        found |= {what for what, value in _relations(big).items() if is_related[what] != value}
    for name, value in _values(small):
        is_scaled = (
            name != "original_max_position_embeddings" or small.get("rope_scaling", 0) is not None
        )
        if name in THRESHOLDS and value is not None and is_scaled:
            found |= {name} if value > max(map(len, walk.prompts())) else set()
    return found


THRESHOLDS = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")


def _leaves(fields):
    for name, value in fields.items():
        yield from _leaves(value) if isinstance(value, dict) else (name,)


def _values(fields):
    for name, value in fields.items():
        yield from _values(value) if isinstance(value, dict) else ((name, value),)


def _relations(fields):
    """How sizes of a published configuration stand to each other."""
    found = {}
    heads, pairs = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    width, dim = fields.get("hidden_size"), fields.get("head_dim")
    if heads and pairs:
        found["heads share keys"] = heads > pairs
    if heads and width and dim and "kv_lora_rank" not in fields:
        found["width of heads"] = (heads * dim > width) - (heads * dim < width)
    if isinstance(kinds := fields.get("layer_types"), list):
        found["kinds of layers"] = list(dict.fromkeys(kinds))
    if pattern := fields.get("hybrid_override_pattern"):
        found["kinds of layers"] = sorted({*pattern})
    return found


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_cut_changes_sizes_and_keeps_how_they_relate(name):
    assert faults(CHECKPOINTS[name]) == set()


PLANTED = {
    "tie_word_embeddings": {"tie_word_embeddings": False},
    "heads share keys": {"num_key_value_heads": 4},
    "width of heads": {"head_dim": 8},
    "sliding_window": {"sliding_window": 4096},
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_cut_that_does_more_is_seen(what):
    one = copy.deepcopy(CHECKPOINTS["Qwen/Qwen3-0.6B"])
    one["cut"] |= PLANTED[what]
    assert what in faults(one)


@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_is_read_wrongly_is_seen(tmp_path, monkeypatch):
    one = CHECKPOINTS["Qwen/Qwen3-0.6B"]
    monkeypatch.setattr(published, "tiny", lambda one: published._merged(one["published"], CUT_FP8))
    monkeypatch.setattr(published, "pack_fp8", _halved(published.pack_fp8))
    with pytest.raises(AssertionError, match="its numbers are off by"):
        published.outcome(one, tmp_path)


CUT_FP8 = CHECKPOINTS["Qwen/Qwen3-0.6B"]["cut"] | {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}
}


def _halved(pack):
    def halved(name, weight, size):
        found = pack(name, weight, size)
        return found | {f"{name}.weight_scale_inv": found[f"{name}.weight_scale_inv"] / 2}

    return halved
