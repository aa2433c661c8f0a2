"""Reading Gemma 3n and Gemma 4: windows, layers that share a cache, embeddings per layer.

Models: the last ``num_kv_shared_layers`` attend to the cache of an earlier layer of their kind and
store nothing; Gemma 4's full layers have heads of another width and number.

Assumes: the model code of transformers 5.24 (``modeling_gemma3n.py``, ``modeling_gemma4.py``).

Ignores: the towers of images and audio.
"""

from __future__ import annotations

from dataclasses import replace

from servelab.models.attention import Attention, Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import Experts, LayerSpec, Mlp
from servelab.models.reader import patterns
from servelab.models.reader.family import Family
from servelab.models.reader.feedforward import read_mlps
from servelab.models.reader.keys import Keys
from servelab.models.reader.ordinary import assemble, read_attention
from servelab.models.reader.sizes import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HEADS_STATED,
    MLP_WIDTH,
    Sizes,
    read_sizes,
)
from servelab.models.spec import ModelSpec

_GEMMA3N = Family(
    "transformers modeling_gemma3n.py",
    tied=True,
    norms=5,
    mlp_bias=False,
    qk_norm="head",
    full_every=5,
    stated=(*HEADS_STATED, "sliding_window"),
)
_GEMMA4 = replace(_GEMMA3N, source="transformers modeling_gemma4.py", norms=4, full_every=6)


def _shared_from(sizes: Sizes) -> int:
    """Return the first layer that reads an earlier layer's cache."""
    shared = sizes.keys.count_or(0, "num_kv_shared_layers", rule="absent: none", minimum=0)
    if shared >= sizes.layers:
        raise UnsupportedConfig("num_kv_shared_layers", f"is {shared}, of {sizes.layers} layers")
    return sizes.layers - shared


def _per_layer_embedding(sizes: Sizes, required: bool) -> tuple[int, tuple[Linear, ...], int]:
    """Return width, matrices per layer, and parameters outside layers, of per-layer embeddings."""
    keys, hidden = sizes.keys, sizes.hidden
    width = keys.count_or(0, "hidden_size_per_layer_input", rule="absent", minimum=0)
    rows = keys.count_or(0, "vocab_size_per_layer_input", rule="absent", minimum=0)
    if required and not (width and rows):
        keys.unknown.setdefault("hidden_size_per_layer_input", "is missing")
    if not width:
        return 0, (), 0
    matrices = (
        Linear("per_layer_input_gate", hidden, width),
        Linear("per_layer_projection", width, hidden),
    )
    return width, matrices, sizes.layers * width * (rows + hidden) + width


def gemma3n(keys: Keys, name: str) -> ModelSpec:
    """Return Gemma 3n's text decoder, with its per-layer embeddings, AltUp and LAuReL."""
    sizes = read_sizes(keys, _GEMMA3N)
    hidden, first_shared = sizes.hidden, _shared_from(sizes)
    reach = patterns.windows(keys, sizes.layers, _GEMMA3N)
    heads = read_attention(sizes, reach)
    blocks = read_mlps(sizes, MLP_WIDTH)
    _, per_layer, extra = _per_layer_embedding(sizes, required=True)
    inputs = keys.count_for_weights("altup_num_inputs") or 1
    rank = keys.count_for_weights("laurel_rank") or 1
    matrices = (
        *per_layer,
        Linear("laurel_left", hidden, rank),
        Linear("laurel_right", rank, hidden),
        Linear("altup_router", hidden, inputs),
    )
    altup = inputs**2 + inputs**3 + 2 * hidden  # corrections, predictions, output scale, a norm
    norms = _GEMMA3N.norms * hidden + hidden + altup  # and LAuReL's norm
    layers = tuple(
        LayerSpec(replace(a, shares_kv=i >= first_shared), block, norms, extra=matrices)
        for i, (a, block) in enumerate(zip(heads, blocks, strict=True))
    )
    return assemble(sizes, name, layers, extra + 2 * (inputs - 1) * hidden**2)


def gemma4(keys: Keys, name: str) -> ModelSpec:
    """Return Gemma 4's text decoder."""
    sizes = read_sizes(keys, _GEMMA4)
    hidden, first_shared = sizes.hidden, _shared_from(sizes)
    reach = patterns.windows(keys, sizes.layers, _GEMMA4)
    _, per_layer, extra = _per_layer_embedding(sizes, required=False)
    wide = keys.flag("use_double_wide_mlp", False, "absent: false (Gemma4TextConfig)")
    mixed = keys.flag("enable_moe_block", False, "absent: false (Gemma4TextConfig)")
    experts = _experts(sizes) if mixed else None
    keys.skip(*EXPERTS, *EXPERTS_PER_TOKEN, "moe_intermediate_size", "expert_intermediate_size")
    norms = (_GEMMA4.norms + bool(per_layer) + 3 * mixed) * hidden
    layers = []
    heads = _attention(sizes, reach)
    for i, (attention, block) in enumerate(zip(heads, read_mlps(sizes, MLP_WIDTH), strict=True)):
        mlp: Mlp | Experts | None = block
        if wide and i >= first_shared and block is not None:
            mlp = replace(block, width=2 * block.width)
        if experts is not None and isinstance(mlp, Mlp):
            mlp = replace(experts, shared=mlp)
        attention = replace(attention, shares_kv=i >= first_shared)
        layers.append(LayerSpec(attention, mlp, norms, extra=per_layer))
    return assemble(sizes, name, tuple(layers), extra)


def _experts(sizes: Sizes) -> Experts:
    """Return the mixture beside the dense MLP, which every token passes through as well."""
    keys = sizes.keys
    count = keys.count(*EXPERTS)
    return Experts(
        count,
        keys.count(*EXPERTS_PER_TOKEN),
        Mlp(keys.count("moe_intermediate_size", "expert_intermediate_size")),
        extra_params=count + sizes.hidden,  # a scale per expert, one per input
    )


def _attention(sizes: Sizes, reach: list[patterns.Reach]) -> list[Attention]:
    """Return the attention of every layer; full layers may differ in heads, width and values."""
    keys = sizes.keys
    sliding = read_attention(sizes, reach)
    plain = sliding[0]
    if keys.has("per_layer_config"):
        raise UnsupportedConfig("per_layer_config", "overrides per layer are not modelled here")
    width = keys.count_or(plain.head_dim, "global_head_dim", rule="absent or null: head_dim")
    same = keys.flag("attention_k_eq_v", False, "absent: false (Gemma4TextConfig)")
    kv_heads = keys.count_or(
        plain.num_kv_heads, "num_global_key_value_heads", rule="absent or null: as the others"
    )
    if plain.num_q_heads % kv_heads:
        raise UnsupportedConfig(
            "num_global_key_value_heads", f"{kv_heads} does not divide {plain.num_q_heads} heads"
        )
    full = replace(
        plain,
        window=None,
        head_dim=width,
        num_kv_heads=kv_heads if same else plain.num_kv_heads,
        value_projection=not same,
    )
    return [full if r.window is None else a for r, a in zip(reach, sliding, strict=True)]
