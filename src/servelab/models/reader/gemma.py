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
_GEMMA4 = replace(_GEMMA3N, source="transformers modeling_gemma4.py", norms=4, full_every=None)


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
    """Return the attention of every layer; full layers may differ in heads, width and values.

    Published files say so for all full layers at once, files saved by transformers 5 per layer.
    """
    keys = sizes.keys
    if not keys.mentions("global_head_dim", "per_layer_config"):
        raise UnsupportedConfig("global_head_dim", "is missing: full layers have their own heads")
    plain = read_attention(sizes, reach)
    same = keys.flag("attention_k_eq_v", False, "absent: false (Gemma4TextConfig)")
    width = keys.count_or_none("global_head_dim", rule="absent or null: head_dim")
    kv_heads = keys.count_or_none("num_global_key_value_heads", rule="absent or null: the others'")
    found = []
    for i, (r, a) in enumerate(zip(reach, plain, strict=True)):
        if r.window is None:
            a = replace(
                a,
                head_dim=width or a.head_dim,
                num_kv_heads=kv_heads if kv_heads and same else a.num_kv_heads,
                value_projection=not same,
            )
        found.append(_overridden(keys, i, a))
    return found


def _overridden(keys: Keys, layer: int, attention: Attention) -> Attention:
    """Return the attention of a layer with what ``per_layer_config`` says of it."""
    listed = keys.section("per_layer_config")
    numbers = {
        n: int(n) for n in (listed.names() if listed else ()) if n.isdecimal() and len(n) < 6
    }
    own = next((listed.section(n) for n, i in numbers.items() if listed and i == layer), None)
    if own is None:
        return attention
    changed = replace(
        attention,
        head_dim=own.count_or(attention.head_dim, "head_dim", rule="absent: as the others"),
        num_kv_heads=own.count_or(
            attention.num_kv_heads, "num_key_value_heads", rule="absent: as the others"
        ),
    )
    own.refuse_unread(f"per_layer_config.{layer:02d}.")
    return changed
