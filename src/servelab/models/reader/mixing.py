"""The parts that the readers of hybrid models share: which layers are which, and the whole.

Models: a decoder whose layers have attention or a recurrent state.

Assumes: all recurrent layers of a model have the same state.

Ignores: what the state is; `servelab.models.reader.recurrent` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from servelab.models.attention import Attention
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import AnyAttention, Experts, LayerSpec, Mlp, RecurrentState
from servelab.models.reader import patterns
from servelab.models.reader.family import Family, Mixture
from servelab.models.reader.keys import Keys
from servelab.models.reader.ordinary import assemble, read_attention
from servelab.models.reader.patterns import FULL, LAYER_TYPES, RECURRENT, Reach
from servelab.models.reader.sizes import Sizes
from servelab.models.spec import ModelSpec

Reader = Callable[[Keys, str], ModelSpec]

_BASE = Family("", mlp_bias=False)
WIDE = Mixture(width="intermediate_size")


def family_of(model_type: str, **rules: object) -> Family:
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


def kinds_of(keys: Keys, layers: int, period: str | None = None, offset: str | None = None,
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


def unwindowed(sizes: Sizes) -> list[Attention]:
    """Return attention without a window for every layer; a window that is switched off is none."""
    keys = sizes.keys
    keys.must_be("use_sliding_window", (False,), "windows beside recurrent layers")
    if keys.has("use_sliding_window"):
        keys.skip("sliding_window", "max_window_layers")
    keys.must_be("sliding_window", (), "windows beside recurrent layers")
    return read_attention(sizes, [Reach()] * sizes.layers)


def count_or_auto(keys: Keys, name: str, value: int) -> int:
    """Return a count whose file may say "auto" for the usual ``value``."""
    if keys.raw(name) == "auto":
        keys.state(name, f'{name} = "auto": {value}')
        return value
    return keys.count_or(value, name, rule=f"absent: {value}")
