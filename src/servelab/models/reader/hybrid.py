"""Reading the other families that mix attention with recurrent state, and the table of them all.

Models: Qwen3-Next and Qwen3.5, Kimi Linear, RecurrentGemma, LFM2, MiniMax-Text-01.

Assumes: a layer is attention or recurrent.

Ignores: what `servelab.models.reader.refused` names.
"""

from __future__ import annotations

from dataclasses import replace

from servelab.models.errors import UnsupportedConfig
from servelab.models.reader import patterns, recurrent
from servelab.models.reader.family import Family, Mixture
from servelab.models.reader.feedforward import read_blocks
from servelab.models.reader.keys import Keys, show
from servelab.models.reader.latent import read_latent_attention
from servelab.models.reader.mamba import (
    bamba,
    falcon_h1,
    granite_hybrid,
    jamba,
    mamba,
    mamba2,
    nemotron_h,
)
from servelab.models.reader.mixing import (
    WIDE,
    Reader,
    family_of,
    kinds_of,
    mix,
    unwindowed,
)
from servelab.models.reader.ordinary import read_attention, read_dtype
from servelab.models.reader.patterns import FULL, RECURRENT, Reach
from servelab.models.reader.sizes import HEADS_STATED, KV_STATED, Q_HEADS, read_sizes
from servelab.models.spec import ModelSpec


def qwen_next(family: Family) -> Reader:
    """Return the reader of Qwen3-Next and Qwen3.5: three delta layers, then gated attention."""

    def read(keys: Keys, name: str) -> ModelSpec:
        sizes = read_sizes(keys, family)
        kinds = kinds_of(keys, sizes.layers, period="full_attention_interval")
        model_dtype = read_dtype(keys, family)
        state = recurrent.gated_delta(
            sizes.hidden,
            keys.count("linear_num_key_heads"),
            keys.count("linear_num_value_heads"),
            keys.count("linear_key_head_dim"),
            keys.count("linear_value_head_dim"),
            keys.count("linear_conv_kernel_dim"),
            (model_dtype, recurrent.state_dtype(keys, model_dtype)),
        )
        keys.must_be("mtp_use_dedicated_embeddings", (False,), "embeddings of their own")
        gated = keys.flag("attn_output_gate", True, f"absent: gated ({family.source})")
        heads = [
            replace(a, gate_width=a.num_q_heads * a.head_dim * gated) for a in unwindowed(sizes)
        ]
        return mix(sizes, name, kinds, heads, state, read_blocks(sizes))

    return read


def kimi_linear(keys: Keys, name: str) -> ModelSpec:
    """Return Kimi Linear or the text decoder of Kimi K3: delta layers and latent attention."""
    family = family_of("kimi_linear", mixture=Mixture(shared="counted", router_bias=True))
    sizes = read_sizes(keys, family)
    linear = keys.section("linear_attn_config")
    if linear is None:  # as transformers 5 saves it
        linear, prefix = keys, "linear_"
        kinds = kinds_of(keys, sizes.layers)
        kernel = keys.count("linear_conv_kernel_dim")
    else:
        prefix, kernel = "", linear.count("short_conv_kernel_size")
        full = patterns.numbers(linear, "full_attn_layers", sizes.layers, first=1)
        delta = patterns.numbers(linear, "kda_layers", sizes.layers, first=1)
        if full & delta or len(full | delta) != sizes.layers:
            raise UnsupportedConfig("linear_attn_config", "does not name every layer once")
        kinds = [FULL if i in full else RECURRENT for i in range(sizes.layers)]
    keys.state("state_dtype", "fp32 always (vLLM kda_state_dtype)")
    state = recurrent.kimi_delta(
        sizes.hidden,
        linear.count(f"{prefix}num_heads"),
        linear.count(f"{prefix}head_dim"),
        kernel,
        (read_dtype(keys, family), "fp32"),
    )
    # Kimi K3 adds matrices whose shapes its file does not give: its cache is known, no weights.
    for section, key in (
        (keys, "attn_res_block_size"),
        (keys, "routed_expert_hidden_size"),
        (keys, "mla_use_output_gate"),
        (keys, "latent_moe_use_norm"),
        (linear, "use_full_rank_gate"),
    ):
        if section.raw(key):
            keys.unknown.setdefault(key, "adds weights that are not modelled here")
    if linear is not keys:
        linear.refuse_unread("linear_attn_config.")
    keys.must_be("attention_bias", (False,), "biases")
    keys.skip("mla_use_nope")
    attention = [read_latent_attention(sizes)] * sizes.layers
    return mix(sizes, name, kinds, attention, state, read_blocks(sizes))


def recurrent_gemma(keys: Keys, name: str) -> ModelSpec:
    """Return RecurrentGemma: two recurrent layers, then attention with a window."""
    family = family_of("recurrent_gemma", tied=True, out_bias=True, mlp_bias=True)
    both = keys.count("intermediate_size")
    keys.settle("intermediate_size", both // 2, f"intermediate_size = {both}, for two matrices")
    sizes = read_sizes(keys, family)
    kinds = patterns.agree(
        {
            key: _cycle(key, keys.listing(key) or [], sizes.layers)
            for key in ("block_types", "_block_types")
            if keys.has(key)
        }
    )
    if kinds is None:
        raise UnsupportedConfig("block_types", "is missing")
    width = keys.count_or(sizes.hidden, "lru_width", rule="absent: hidden_size")
    blocks = keys.count(*Q_HEADS)
    if width % blocks:
        raise UnsupportedConfig("lru_width", f"{width} is not a multiple of {blocks} heads")
    state = recurrent.rg_lru(
        sizes.hidden, width, blocks, keys.count("conv1d_width"), read_dtype(keys, family)
    )
    keys.state("state_dtype", "no key: fp32 (transformers modeling_recurrent_gemma.py)")
    window = Reach(keys.count("attention_window_size"))
    heads = read_attention(sizes, [window] * sizes.layers)
    return mix(sizes, name, kinds, heads, state, read_blocks(sizes))


def _cycle(key: str, words: list[object], layers: int) -> list[str]:
    """Return a cycle of words, repeated over the layers."""
    known = {"recurrent": RECURRENT, "attention": FULL}
    if not words or any(not isinstance(word, str) or word not in known for word in words):
        raise UnsupportedConfig(key, "must be a cycle of recurrent and attention")
    return [known[str(words[i % len(words)])] for i in range(layers)]


def lfm2(keys: Keys, name: str) -> ModelSpec:
    """Return LFM2: gated short convolutions and attention."""
    family =  family_of(
        "lfm2",
        stated=KV_STATED, tied=True, qk_norm="head", qkv_bias=False, out_bias=False,
        mixture=Mixture(router_bias=("use_expert_bias", True)),
    )  # fmt: skip
    sizes = read_sizes(keys, family)
    kinds = kinds_of(keys, sizes.layers, indices="full_attn_idxs")
    state = recurrent.short_conv(
        sizes.hidden,
        keys.count("conv_L_cache"),
        keys.flag("conv_bias", False, "absent: false (Lfm2Config)"),
        read_dtype(keys, family),
    )
    _settle_lfm2_width(keys)
    keys.skip("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_norm_eps",
              "block_use_swiglu", "block_use_xavier_init", "block_mlp_init_scale",
              "block_out_init_scale")  # fmt: skip
    return mix(sizes, name, kinds, unwindowed(sizes), state, read_blocks(sizes))


def _settle_lfm2_width(keys: Keys) -> None:
    """Settle LFM2's MLP width: two thirds of the stated one, times a factor, rounded up."""
    width = keys.count_or_none("block_ff_dim", "intermediate_size", rule="absent")
    if width is None or keys.has("num_experts"):
        return
    if keys.flag("block_auto_adjust_ff_dim", True, "absent: true (Lfm2Config)"):
        factor = keys.raw("block_ffn_dim_multiplier")
        if factor is not None and (not isinstance(factor, (int, float)) or not 0 < factor < 1000):
            raise UnsupportedConfig("block_ffn_dim_multiplier", f"{show(factor)} is no factor")
        multiple = keys.count_or(256, "block_multiple_of", rule="absent: 256 (Lfm2Config)")
        width = int((factor or 1) * (2 * width // 3))
        width = multiple * -(-width // multiple)
    keys.skip("block_multiple_of", "block_ffn_dim_multiplier")
    keys.settle(
        "intermediate_size", width, "block_ff_dim, adjusted (transformers modeling_lfm2.py)"
    )


def minimax(keys: Keys, name: str) -> ModelSpec:
    """Return MiniMax-Text-01: lightning attention, and softmax attention in the listed layers."""
    family = family_of("minimax", stated=KV_STATED, qkv_bias=False, out_bias=False, mixture=WIDE)
    sizes = read_sizes(keys, family)
    listed = keys.counts("attn_type_list", length=sizes.layers, minimum=0)
    if listed is not None:
        words = ["full_attention" if entry else "linear_attention" for entry in listed]
        if not keys.has("layer_types"):
            keys.settle("layer_types", words, "attn_type_list: 1 is full, 0 recurrent")
    kinds = kinds_of(keys, sizes.layers)
    heads = unwindowed(sizes)
    dtype = read_dtype(keys, family)
    state = recurrent.lightning(
        sizes.hidden, heads[0].num_q_heads, heads[0].head_dim, recurrent.state_dtype(keys, dtype)
    )
    keys.skip("block_size", "postnorm", "shared_moe_mode", "attention_type")
    return mix(sizes, name, kinds, heads, state, read_blocks(sizes))


HYBRIDS: dict[str, Reader] = {
    "qwen3_next": qwen_next(
        family_of(
            "qwen3_next", stated=HEADS_STATED, qk_norm="head", mixture=Mixture(shared="gated")
        )
    ),
    "qwen3_5": qwen_next(family_of("qwen3_5", stated=HEADS_STATED, qk_norm="head")),
    "qwen3_5_moe": qwen_next(
        family_of(
            "qwen3_5_moe", stated=HEADS_STATED, qk_norm="head", mixture=Mixture(shared="gated")
        )
    ),
    "kimi_linear": kimi_linear,
    "jamba": jamba,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba2,
    "recurrent_gemma": recurrent_gemma,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    "minimax": minimax,
    "minimax_text_01": minimax,
    "minimax_m1": minimax,
}
