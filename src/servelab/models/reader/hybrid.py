"""Reading the families that mix attention with recurrent state, or have no attention at all.

Models: which layers are which, by a list, a period, a pattern of letters; each layer's state.

Assumes: a layer is attention or recurrent, but for Falcon-H1, where every layer is both.

Ignores: families whose layers share weights (Zamba); they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from servelab.models.attention import Attention
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import AnyAttention, Experts, LayerSpec, Mlp, RecurrentState
from servelab.models.reader import patterns, recurrent
from servelab.models.reader.family import Family, Mixture
from servelab.models.reader.keys import Keys, show
from servelab.models.reader.latent import read_latent_attention
from servelab.models.reader.ordinary import (
    LAYERS,
    Q_HEADS,
    Sizes,
    assemble,
    read_attention,
    read_blocks,
    read_dtype,
    read_sizes,
)
from servelab.models.reader.patterns import FULL, LAYER_TYPES, RECURRENT, Reach
from servelab.models.spec import ModelSpec

Reader = Callable[[Keys, str], ModelSpec]

_BASE = Family("", mlp_bias=False)
_WIDE = Mixture(width="intermediate_size")


def _family(model_type: str, **rules: object) -> Family:
    source = f"transformers modeling_{model_type}.py, configuration_{model_type}.py"
    return replace(_BASE, source=source, **rules)  # type: ignore[arg-type]


def mix(
    sizes: Sizes,
    name: str,
    kinds: Sequence[str],
    attention: Sequence[AnyAttention],
    state: RecurrentState,
    blocks: Sequence[Mlp | Experts | None],
) -> ModelSpec:
    """Return a model whose layers have attention or, where ``kinds`` says so, the state."""
    norms = sizes.family.norms * sizes.family.norm_params(sizes.hidden)
    return assemble(
        sizes,
        name,
        tuple(
            LayerSpec(None, block, norms, state)
            if kind == RECURRENT
            else LayerSpec(heads, block, norms)
            for kind, heads, block in zip(kinds, attention, blocks, strict=True)
        ),
    )


def _kinds(keys: Keys, layers: int, period: str | None = None, offset: str | None = None,
           indices: str | None = None) -> list[str]:  # fmt: skip
    """Return full or recurrent per layer, from a list, a period or the numbers of full layers."""
    claims: dict[str, list[str]] = {}
    types = keys.words("layer_types", layers, LAYER_TYPES)
    if types is not None:
        claims["layer_types"] = types
    full: list[bool] | None = None
    key = period or indices or ""
    if period is not None and keys.has(period):
        first = -1 if offset is None else keys.count(offset, minimum=0)
        full = patterns.every(keys.count(period), layers, first)
    if indices is not None and keys.has(indices):
        key, numbers = indices, patterns.numbers(keys, indices, layers)
        full = [i in numbers for i in range(layers)]
    if full is not None:
        claims[key] = [FULL if f else RECURRENT for f in full]
    found = patterns.agree(claims)
    if found is None:
        raise UnsupportedConfig("layer_types", "is missing: nothing says which layers are which")
    if set(found) - {FULL, RECURRENT}:
        raise UnsupportedConfig("layer_types", "windows beside recurrent layers are not modelled")
    return found


def _heads(sizes: Sizes) -> list[Attention]:
    """Return attention without a window for every layer."""
    return read_attention(sizes, [Reach()] * sizes.layers)


def _auto(keys: Keys, name: str, value: int) -> int:
    """Return a count whose file may say "auto" for the usual ``value``."""
    if keys.raw(name) == "auto":
        keys.state(name, f'{name} = "auto": {value}')
        return value
    return keys.count_or(value, name, rule=f"absent: {value}")


# --- Qwen3-Next, Qwen3.5; Kimi Linear -----------------------------------------------------------


def qwen_next(family: Family) -> Reader:
    """Return the reader of Qwen3-Next and Qwen3.5: three delta layers, then gated attention."""

    def read(keys: Keys, name: str) -> ModelSpec:
        sizes = read_sizes(keys, family)
        kinds = _kinds(keys, sizes.layers, period="full_attention_interval")
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
        heads = [replace(a, gate_width=a.num_q_heads * a.head_dim * gated) for a in _heads(sizes)]
        return mix(sizes, name, kinds, heads, state, read_blocks(sizes))

    return read


def kimi_linear(keys: Keys, name: str) -> ModelSpec:
    """Return Kimi Linear or the text decoder of Kimi K3: delta layers and latent attention."""
    family = _family("kimi_linear", mixture=Mixture(shared="counted", router_bias=True))
    sizes = read_sizes(keys, family)
    linear = keys.section("linear_attn_config")
    if linear is None:
        raise UnsupportedConfig("linear_attn_config", "is missing: it says which layers are which")
    full = patterns.numbers(linear, "full_attn_layers", sizes.layers, first=1)
    delta = patterns.numbers(linear, "kda_layers", sizes.layers, first=1)
    if full & delta or len(full | delta) != sizes.layers:
        raise UnsupportedConfig("linear_attn_config", "does not name every layer exactly once")
    keys.state("state_dtype", "fp32 always (vLLM kda_state_dtype)")
    state = recurrent.kimi_delta(
        sizes.hidden,
        linear.count("num_heads"),
        linear.count("head_dim"),
        linear.count("short_conv_kernel_size"),
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
    linear.refuse_unread("linear_attn_config.")
    keys.must_be("attention_bias", (False,), "biases")
    keys.skip("mla_use_nope")
    attention = [read_latent_attention(sizes)] * sizes.layers
    kinds = [FULL if i in full else RECURRENT for i in range(sizes.layers)]
    return mix(sizes, name, kinds, attention, state, read_blocks(sizes))


# --- Mamba hybrids ------------------------------------------------------------------------------


def jamba(keys: Keys, name: str) -> ModelSpec:
    """Return Jamba: one attention layer per period, Mamba elsewhere, experts in some layers."""
    family = _family("jamba", qkv_bias=False, out_bias=False, mixture=_WIDE)
    sizes = read_sizes(keys, family)
    kinds = _kinds(keys, sizes.layers, period="attn_layer_period", offset="attn_layer_offset")
    dtype = read_dtype(keys, family)
    state = recurrent.mamba(
        sizes.hidden,
        keys.count("mamba_expand") * sizes.hidden,
        keys.count("mamba_d_state"),
        keys.count("mamba_d_conv"),
        _auto(keys, "mamba_dt_rank", -(-sizes.hidden // 16)),
        (dtype, recurrent.state_dtype(keys, dtype)),
        keys.flag("mamba_conv_bias", True, "absent: true (JambaConfig)"),
        keys.flag("mamba_proj_bias", False, "absent: false (JambaConfig)"),
        norms=True,
    )
    keys.must_be("sliding_window", (), "a window")
    keys.must_be("mamba_inner_layernorms", (True,), "no inner norms")
    return mix(sizes, name, kinds, _heads(sizes), state, read_blocks(sizes))


def _mamba2_state(sizes: Sizes, inner: int | None = None, norm: bool = True) -> RecurrentState:
    """Return the Mamba-2 layer of Bamba, Granite 4 and Falcon-H1."""
    keys = sizes.keys
    heads = keys.count("mamba_n_heads")
    expanded = keys.count("mamba_expand") * sizes.hidden
    inner = inner or heads * _auto(keys, "mamba_d_head", max(1, expanded // heads))
    keys.skip("mamba_d_head")
    dtype = read_dtype(keys, sizes.family)
    return recurrent.mamba2(
        sizes.hidden,
        inner,
        heads,
        keys.count("mamba_n_groups"),
        keys.count("mamba_d_state"),
        keys.count("mamba_d_conv"),
        (dtype, recurrent.state_dtype(keys, dtype)),
        keys.flag("mamba_conv_bias", True, "absent: true"),
        keys.flag("mamba_proj_bias", False, "absent: false"),
        norm,
    )


def bamba(keys: Keys, name: str) -> ModelSpec:
    """Return Bamba: Mamba-2, with attention in the listed layers."""
    sizes = read_sizes(keys, _family("bamba", mlp_bias=("mlp_bias", False)))
    kinds = _kinds(keys, sizes.layers, indices="attn_layer_indices")
    state = _mamba2_state(sizes)
    return mix(sizes, name, kinds, _heads(sizes), state, read_blocks(sizes))


def granite_hybrid(keys: Keys, name: str) -> ModelSpec:
    """Return Granite 4: Mamba-2 and attention, each with a shared MLP and perhaps experts."""
    family = _family(
        "granitemoehybrid",
        mixture=replace(_WIDE, shared="width"),
        fixed=(("normalization_function", "rmsnorm"),),
    )
    if keys.raw("num_local_experts") == 0:
        family = replace(family, mixture=None)
        keys.skip("num_local_experts", "num_experts_per_tok")
        width = keys.count("shared_intermediate_size")
        keys.settle("intermediate_size", width, f"shared_intermediate_size = {width}: no experts")
    sizes = read_sizes(keys, family)
    kinds = _kinds(keys, sizes.layers)
    if RECURRENT not in kinds:
        raise UnsupportedConfig("layer_types", "has no recurrent layer")
    state = _mamba2_state(sizes)
    return mix(sizes, name, kinds, _heads(sizes), state, read_blocks(sizes))


def falcon_h1(keys: Keys, name: str) -> ModelSpec:
    """Return Falcon-H1: attention and Mamba-2 side by side in every layer."""
    family = _family("falcon_h1", mlp_bias=("mlp_bias", False))
    sizes = read_sizes(keys, family)
    norm = keys.flag("mamba_rms_norm", False, "absent: false (FalconH1Config)")
    state = _mamba2_state(sizes, keys.count("mamba_d_ssm"), norm)
    keys.must_be("projectors_bias", (False,), "biases")
    keys.must_be("mamba_use_mlp", (True,), "layers without an MLP")
    keys.skip("mamba_norm_before_gate", "mlp_expansion_factor")
    norms = 2 * sizes.hidden
    return assemble(
        sizes,
        name,
        tuple(
            LayerSpec(heads, block, norms, state)
            for heads, block in zip(_heads(sizes), read_blocks(sizes), strict=True)
        ),
    )


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_WORDS = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention",
    "full_attention": "attention", "mlp": "mlp", "moe": "moe",
}  # fmt: skip


def nemotron_h(keys: Keys, name: str) -> ModelSpec:
    """Return Nemotron-H: one part per layer, by a pattern of letters or a list of words."""
    family = _family(
        "nemotron_h",
        norms=1,
        gated=False,
        mlp_bias=("mlp_bias", False),
        mixture=Mixture(router_bias=True),
    )
    letters = keys.text("hybrid_override_pattern")
    words = keys.listing("layers_block_type")
    if letters is not None and words is None:
        if set(letters) - set(_NEMOTRON_LETTERS):
            raise UnsupportedConfig("hybrid_override_pattern", f"{show(letters)} is not M*-E")
        words = [_NEMOTRON_LETTERS[letter] for letter in letters]
    if words is None:
        raise UnsupportedConfig("hybrid_override_pattern", "is missing")
    if not all(isinstance(word, str) and word in _NEMOTRON_WORDS for word in words):
        raise UnsupportedConfig("layers_block_type", "has a word that is not understood")
    if not keys.has(*LAYERS):
        keys.settle("num_hidden_layers", len(words), "no key: one per entry of the pattern")
    sizes = read_sizes(keys, family)
    if len(words) != sizes.layers:
        raise UnsupportedConfig("num_hidden_layers", f"is {sizes.layers}, of {len(words)} layers")
    kinds = [_NEMOTRON_WORDS[word] for word in words]
    heads = _heads(sizes)[0] if "attention" in kinds else None
    state = _nemotron_state(sizes) if "mamba" in kinds else None
    mlp = _nemotron_mlp(sizes) if "mlp" in kinds else None
    experts = _nemotron_experts(sizes) if "moe" in kinds else None
    keys.skip("intermediate_size", "num_nextn_predict_layers", "mtp_hybrid_override_pattern",
              "mtp_layers_block_type", "expand", "moe_shared_expert_overlap", "time_step_rank",
              "use_bias")  # fmt: skip
    if keys.has("mtp_hybrid_override_pattern", "mtp_layers_block_type"):
        keys.state("params_other", "prediction layers are stated and not counted")
    of = {
        "attention": LayerSpec(heads, None, sizes.hidden),
        "mamba": LayerSpec(None, None, sizes.hidden, state),
        "mlp": LayerSpec(None, mlp, sizes.hidden),
        "moe": LayerSpec(None, experts, sizes.hidden),
    }
    keys.settle("num_nextn_predict_layers", 0, "not counted")
    return assemble(sizes, name, tuple(of[kind] for kind in kinds))


def _nemotron_mlp(sizes: Sizes) -> Mlp | None:
    return next((b for b in read_blocks(replace(sizes, family=replace(sizes.family, mixture=None)))
                 if isinstance(b, Mlp)), None)  # fmt: skip


def _nemotron_state(sizes: Sizes) -> RecurrentState:
    keys = sizes.keys
    heads = keys.count("mamba_num_heads")
    keys.must_be("use_bias", (False,), "biases")
    return recurrent.mamba2(
        sizes.hidden,
        heads * keys.count("mamba_head_dim"),
        heads,
        keys.count("n_groups"),
        keys.count("ssm_state_size"),
        keys.count("conv_kernel"),
        (read_dtype(keys, sizes.family), recurrent.state_dtype(keys, "bf16", "fp32")),
        keys.flag("use_conv_bias", True, "absent: true (NemotronHConfig)"),
        keys.flag("mamba_proj_bias", False, "absent: false (NemotronHConfig)"),
    )


def _nemotron_experts(sizes: Sizes) -> Experts:
    keys = sizes.keys
    count = keys.count("n_routed_experts")
    per_token = keys.count("num_experts_per_tok")
    shared = keys.count_or(0, "n_shared_experts", rule="absent: none", minimum=0)
    width = keys.count_or(0, "moe_shared_expert_intermediate_size", rule="absent", minimum=0)
    return Experts(
        count,
        per_token,
        Mlp(keys.count("moe_intermediate_size"), gated=False, bias=sizes.flag(("mlp_bias", False))),
        Mlp(shared * width, gated=False) if shared * width else None,
        latent_size=keys.count_or_none("moe_latent_size", rule="absent or null: the model's"),
        extra_params=count,
    )


# --- no attention at all ------------------------------------------------------------------------


def mamba(keys: Keys, name: str) -> ModelSpec:
    """Return Mamba or Falcon-Mamba: recurrent layers only, without MLPs."""
    family = _family("mamba", norms=1, tied=True)
    sizes = read_sizes(keys, family)
    expanded = keys.count_or(2, "expand", rule="absent: 2 (MambaConfig)") * sizes.hidden
    dtype = read_dtype(keys, family)
    state = recurrent.mamba(
        sizes.hidden,
        keys.count_or(
            expanded, "intermediate_size", "d_inner", rule="absent: expand x hidden_size"
        ),
        keys.count("state_size"),
        keys.count("conv_kernel"),
        _auto(keys, "time_step_rank", -(-sizes.hidden // 16)),
        (dtype, recurrent.state_dtype(keys, dtype)),
        keys.flag("use_conv_bias", True, "absent: true (MambaConfig)"),
        keys.flag("use_bias", False, "absent: false (MambaConfig)"),
    )
    return assemble(sizes, name, (LayerSpec(None, None, sizes.hidden, state),) * sizes.layers)


def mamba2(keys: Keys, name: str) -> ModelSpec:
    """Return Mamba-2: recurrent layers only, without MLPs."""
    family = _family("mamba2", norms=1)
    sizes = read_sizes(keys, family)
    heads = keys.count("num_heads")
    keys.skip("expand", "time_step_rank", "norm_before_gate")
    dtype = read_dtype(keys, family)
    state = recurrent.mamba2(
        sizes.hidden,
        heads * keys.count("head_dim"),
        heads,
        keys.count("n_groups"),
        keys.count("state_size"),
        keys.count("conv_kernel"),
        (dtype, recurrent.state_dtype(keys, dtype)),
        keys.flag("use_conv_bias", True, "absent: true (Mamba2Config)"),
        keys.flag("use_bias", False, "absent: false (Mamba2Config)"),
    )
    return assemble(sizes, name, (LayerSpec(None, None, sizes.hidden, state),) * sizes.layers)


# --- other mixtures of attention and state ------------------------------------------------------


def recurrent_gemma(keys: Keys, name: str) -> ModelSpec:
    """Return RecurrentGemma: two recurrent layers, then attention with a window."""
    family = _family("recurrent_gemma", tied=True, out_bias=True, mlp_bias=True)
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
    family = _family(
        "lfm2", tied=True, qk_norm="head", qkv_bias=False, out_bias=False,
        mixture=Mixture(router_bias=("use_expert_bias", True)),
    )  # fmt: skip
    sizes = read_sizes(keys, family)
    kinds = _kinds(keys, sizes.layers, indices="full_attn_idxs")
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
    return mix(sizes, name, kinds, _heads(sizes), state, read_blocks(sizes))


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
    family = _family("minimax", qkv_bias=False, out_bias=False, mixture=_WIDE)
    sizes = read_sizes(keys, family)
    listed = keys.counts("attn_type_list", length=sizes.layers, minimum=0)
    if listed is not None:
        words = ["full_attention" if entry else "linear_attention" for entry in listed]
        if not keys.has("layer_types"):
            keys.settle("layer_types", words, "attn_type_list: 1 is full, 0 recurrent")
    kinds = _kinds(keys, sizes.layers)
    heads = _heads(sizes)
    dtype = read_dtype(keys, family)
    state = recurrent.lightning(
        sizes.hidden, heads[0].num_q_heads, heads[0].head_dim, recurrent.state_dtype(keys, dtype)
    )
    keys.skip("block_size", "postnorm", "shared_moe_mode", "attention_type")
    keys.must_be("sliding_window", (), "a window")
    return mix(sizes, name, kinds, heads, state, read_blocks(sizes))


HYBRIDS: dict[str, Reader] = {
    "qwen3_next": qwen_next(_family("qwen3_next", qk_norm="head", mixture=Mixture(shared="gated"))),
    "qwen3_5": qwen_next(_family("qwen3_5", qk_norm="head")),
    "qwen3_5_moe": qwen_next(
        _family("qwen3_5_moe", qk_norm="head", mixture=Mixture(shared="gated"))
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
}
