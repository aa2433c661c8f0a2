"""Reading the families of Mamba: with attention beside it, with experts, or alone.

Models: Jamba, Bamba, Granite 4, Falcon-H1, Nemotron-H, Mamba, Falcon-Mamba, Mamba-2.

Assumes: a layer is attention or Mamba, but for Falcon-H1, where every layer is both.

Ignores: families whose layers share weights (Zamba); they are refused.
"""

from __future__ import annotations

from dataclasses import replace

from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import Experts, LayerSpec, Mlp, RecurrentState
from servelab.models.reader import recurrent
from servelab.models.reader.family import Mixture
from servelab.models.reader.feedforward import read_blocks
from servelab.models.reader.keys import Keys, show
from servelab.models.reader.mixing import (
    WIDE,
    count_or_auto,
    family_of,
    kinds_of,
    mix,
    unwindowed,
)
from servelab.models.reader.ordinary import assemble, read_dtype
from servelab.models.reader.sizes import HEADS_STATED, KV_STATED, LAYERS, Sizes, read_sizes
from servelab.models.spec import ModelSpec


def jamba(keys: Keys, name: str) -> ModelSpec:
    """Return Jamba: one attention layer per period, Mamba elsewhere, experts in some layers."""
    family = family_of("jamba", stated=KV_STATED, qkv_bias=False, out_bias=False, mixture=WIDE)
    sizes = read_sizes(keys, family)
    kinds = kinds_of(keys, sizes.layers, period="attn_layer_period", offset="attn_layer_offset")
    dtype = read_dtype(keys, family)
    state = recurrent.mamba(
        sizes.hidden,
        keys.count("mamba_expand") * sizes.hidden,
        keys.count("mamba_d_state"),
        keys.count("mamba_d_conv"),
        count_or_auto(keys, "mamba_dt_rank", -(-sizes.hidden // 16)),
        (dtype, recurrent.state_dtype(keys, dtype)),
        keys.flag("mamba_conv_bias", True, "absent: true (JambaConfig)"),
        keys.flag("mamba_proj_bias", False, "absent: false (JambaConfig)"),
        norms=True,
    )
    keys.must_be("mamba_inner_layernorms", (True,), "no inner norms")
    return mix(sizes, name, kinds, unwindowed(sizes), state, read_blocks(sizes))


def _mamba2_state(sizes: Sizes, inner: int | None = None, norm: bool = True) -> RecurrentState:
    """Return the Mamba-2 layer of Bamba, Granite 4 and Falcon-H1."""
    keys = sizes.keys
    heads = keys.count("mamba_n_heads")
    expanded = keys.count("mamba_expand") * sizes.hidden
    inner = inner or heads * count_or_auto(keys, "mamba_d_head", max(1, expanded // heads))
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
    sizes = read_sizes(keys, family_of("bamba", stated=KV_STATED, mlp_bias=("mlp_bias", False)))
    kinds = kinds_of(keys, sizes.layers, indices="attn_layer_indices")
    state = _mamba2_state(sizes)
    return mix(sizes, name, kinds, unwindowed(sizes), state, read_blocks(sizes))


def granite_hybrid(keys: Keys, name: str) -> ModelSpec:
    """Return Granite 4: Mamba-2 and attention, each with a shared MLP and perhaps experts."""
    family = family_of(
        "granitemoehybrid",
        mixture=replace(WIDE, shared="width"),
        fixed=(("normalization_function", "rmsnorm"),),
    )
    if keys.raw("num_local_experts") == 0:
        family = replace(family, mixture=None)
        keys.skip("num_local_experts", "num_experts_per_tok")
        width = keys.count("shared_intermediate_size")
        keys.settle("intermediate_size", width, f"shared_intermediate_size = {width}: no experts")
    sizes = read_sizes(keys, family)
    kinds = kinds_of(keys, sizes.layers)
    state = _mamba2_state(sizes)  # stated even where no layer has it
    return mix(sizes, name, kinds, unwindowed(sizes), state, read_blocks(sizes))


def falcon_h1(keys: Keys, name: str) -> ModelSpec:
    """Return Falcon-H1: attention and Mamba-2 side by side in every layer."""
    family = family_of("falcon_h1", stated=KV_STATED, mlp_bias=("mlp_bias", False))
    sizes = read_sizes(keys, family)
    norm = keys.flag("mamba_rms_norm", False, "absent: false (FalconH1Config)")
    state = _mamba2_state(sizes, keys.count("mamba_d_ssm"), norm)
    keys.must_be("projectors_bias", (False,), "biases")
    keys.must_be("mamba_use_mlp", (True,), "layers without an MLP")
    keys.words("layer_types", sizes.layers, {"hybrid": "both"})
    keys.skip("mamba_norm_before_gate", "mlp_expansion_factor")
    norms = 2 * sizes.hidden
    return assemble(
        sizes,
        name,
        tuple(
            LayerSpec(heads, block, norms, state)
            for heads, block in zip(unwindowed(sizes), read_blocks(sizes), strict=True)
        ),
    )


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_WORDS = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention",
    "full_attention": "attention", "mlp": "mlp", "moe": "moe",
}  # fmt: skip


def nemotron_h(keys: Keys, name: str) -> ModelSpec:
    """Return Nemotron-H: one part per layer, by a pattern of letters or a list of words."""
    family = family_of(
        "nemotron_h",
        stated=HEADS_STATED,
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
    heads = unwindowed(sizes)[0] if "attention" in kinds else None
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


def mamba(keys: Keys, name: str) -> ModelSpec:
    """Return Mamba or Falcon-Mamba: recurrent layers only, without MLPs."""
    family = family_of("mamba", norms=1, tied=True)
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
        count_or_auto(keys, "time_step_rank", -(-sizes.hidden // 16)),
        (dtype, recurrent.state_dtype(keys, dtype)),
        keys.flag("use_conv_bias", True, "absent: true (MambaConfig)"),
        keys.flag("use_bias", False, "absent: false (MambaConfig)"),
    )
    return assemble(sizes, name, (LayerSpec(None, None, sizes.hidden, state),) * sizes.layers)


def mamba2(keys: Keys, name: str) -> ModelSpec:
    """Return Mamba-2: recurrent layers only, without MLPs."""
    family = family_of("mamba2", norms=1)
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
