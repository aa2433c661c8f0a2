"""Reading feed-forward blocks: the MLP of every layer, or a mixture of experts.

Models: widths given once or per layer, shared experts under their various keys, routers' biases.

Assumes: the experts of a model are of one shape.

Ignores: which layers have them; `servelab.models.reader.patterns` knows.
"""

from __future__ import annotations

from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import Experts, Mlp
from servelab.models.reader import patterns
from servelab.models.reader.family import Mixture
from servelab.models.reader.sizes import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    MLP_WIDTH,
    SHARED_EXPERTS,
    Sizes,
)


def read_blocks(sizes: Sizes) -> list[Mlp | Experts | None]:
    """Return the feed-forward block of every layer; None where the file leaves its width out."""
    keys, family = sizes.keys, sizes.family
    if family.mixture is None or not keys.has(*EXPERTS):
        return [*read_mlps(sizes, MLP_WIDTH)]
    experts = read_experts(sizes, family.mixture)
    sparse = patterns.sparse_layers(keys, sizes.layers)
    if all(sparse):
        keys.skip(*MLP_WIDTH)
        return [experts] * sizes.layers
    dense = read_mlps(sizes, (family.mixture.dense_width,))
    return [experts if s else mlp for s, mlp in zip(sparse, dense, strict=True)]


def read_mlps(sizes: Sizes, names: tuple[str, ...]) -> list[Mlp | None]:
    """Return an MLP per layer."""
    keys, family = sizes.keys, sizes.family
    widths = keys.counts(*names, length=sizes.layers)
    bias = sizes.flag(family.mlp_bias)
    if widths is None and family.mlp_factor is not None:
        keys.state(names[0], f"absent: {family.mlp_factor} x hidden_size ({family.source})")
        widths = [family.mlp_factor * sizes.hidden] * sizes.layers
    if widths is None:
        keys.unknown.setdefault(names[0], "is missing")
        return [None] * sizes.layers
    extra = family.mlp_extra_params
    made = {width: Mlp(width, family.gated, bias, extra) for width in set(widths)}
    return [made[width] for width in widths]


def read_experts(sizes: Sizes, mixture: Mixture) -> Experts | None:
    """Return the mixture that the sparse layers have; None where the file leaves its width out."""
    keys, family = sizes.keys, sizes.family
    count = keys.count(*EXPERTS)
    per_token = keys.count_for_weights(*EXPERTS_PER_TOKEN)
    width = keys.count_for_weights(mixture.width)
    shared = read_shared_width(sizes, mixture, width)
    bias = sizes.flag(mixture.router_bias)
    if width is None or per_token is None:
        return None
    if per_token > count:
        raise UnsupportedConfig(EXPERTS_PER_TOKEN[0], f"is {per_token}, of {count} experts")
    return Experts(
        count,
        per_token,
        Mlp(width, family.gated, family.mlp_bias is True or sizes.flag(family.mlp_bias)),
        Mlp(shared, family.gated) if shared else None,
        shared_gate=mixture.shared == "gated" and bool(shared),
        extra_params=count if bias else 0,
    )


def read_shared_width(sizes: Sizes, mixture: Mixture, width: int | None) -> int:
    """Return the width of the shared experts together, 0 without any."""
    keys = sizes.keys
    if mixture.shared == "counted":
        return (width or 0) * keys.count_or(
            0, *SHARED_EXPERTS, rule="absent or null: none", minimum=0
        )
    if mixture.shared == "gated":
        return keys.count_or(
            0, "shared_expert_intermediate_size", rule="absent: no shared expert", minimum=0
        )
    if mixture.shared == "width":
        return keys.count_or(
            0, "shared_intermediate_size", rule="absent: no shared expert", minimum=0
        )
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size", *SHARED_EXPERTS):
        keys.must_be(name, (0,), "the family has no shared expert")
    return width or 0 if mixture.shared == "always" else 0
