"""How matrices are stored and what they are called: schemes, lists of modules, published names.

Models: bits, groups and scales of one matrix; the lists in which configurations name modules; the
names that a layer's matrices have in published weights.

Assumes: projections that read one input count as one matrix, under the name of any of its parts.

Ignores: packing rows to whole words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from servelab.models.attention import Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import Experts, LayerSpec
from servelab.models.reader.keys import show

#: Module names, as published, of our matrices; the first part says where they stand in a layer.
_ATTENTION = ("self_attn", "linear_attn", "mixer", "mamba", "attention")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "mixer")
_SHARED = ("shared_experts", "shared_expert")
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "kv_a_proj": ("kv_a_proj_with_mqa",),
    "gate_up_proj": ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    "down_proj": ("down_proj", "w2"),
    "in_proj_qkvz": ("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_ba", "in_proj_b", "in_proj_a"),
    "index_q_proj": ("indexer.wq_b", "index_q_proj"),
    "index_k_proj": ("indexer.wk", "index_k_proj"),
    "index_weights_proj": ("indexer.weights_proj",),
}
NEVER = frozenset({"router", "shared_gate", "index_weights_proj", "in_proj_ba"})
#: What may stand before the name of a module, the longest first.
_ROOTS = ("model.language_model.", "language_model.model.", "language_model.", "model.",
          "backbone.")  # fmt: skip
_ROOT = re.compile("^(" + "|".join(map(re.escape, _ROOTS)) + ")")


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored.

    Parameters: ``bits`` per weight; ``rows``, ``columns`` of the block that shares a scale, along
    d_in and d_out (0: the whole length); ``side_bits`` per block: scale and zero point;
    ``row_bits`` per row of d_in besides (GPTQ's group index).
    """

    bits: int
    rows: int
    columns: int
    side_bits: int
    row_bits: int = 0

    def matrix_bytes(self, d_in: int, d_out: int) -> int:
        """Return the bytes of a matrix.

        >>> Scheme(4, 128, 1, 16 + 4).matrix_bytes(4096, 4096)  # AWQ
        8716288
        """
        blocks = -(-d_in // (self.rows or d_in)) * -(-d_out // (self.columns or d_out))
        bits = d_in * d_out * self.bits + blocks * self.side_bits + d_in * self.row_bits
        return -(-bits // 8)


NVFP4, MXFP4 = Scheme(4, 16, 1, 8), Scheme(4, 32, 1, 8)
FP8_TENSOR, FP8_CHANNEL = Scheme(8, 0, 0, 32), Scheme(8, 0, 1, 32)
ALGORITHMS = {
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "FP8": FP8_TENSOR,
    "MXFP8": Scheme(8, 32, 1, 8),
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "FP8_PB_WO": Scheme(8, 128, 128, 32),
}


class Names:
    """A list of modules, as configurations write them: names, globs, ``re:`` expressions."""

    def __init__(self, key: str, patterns: list[Any]) -> None:
        self._exact: set[str] = set()
        prefixes, expressions = [], []
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise UnsupportedConfig(key, f"{show(pattern)} is no name of a module")
            bare = _ROOT.sub("", pattern)
            if pattern.startswith("re:"):
                expressions.append(pattern[3:])
            elif bare.endswith("*") and not set(bare[:-1]) & set("*?["):
                prefixes.append(bare[:-1])
            elif set(bare) & set("*?["):
                expressions.append(translate(bare).removesuffix(r"\Z") + r"(\..*)?$")
            else:
                self._exact.add(bare)
        self._prefixes = tuple(prefixes)
        self._words = {name for name in self._exact if "." not in name}
        try:
            self._expressions = [re.compile(expression) for expression in expressions]
        except re.error as error:
            raise UnsupportedConfig(key, f"has a bad expression: {error}") from error

    def match(self, module: str) -> bool:
        """Return whether the list has a module, or one that it is part of."""
        if self._prefixes and module.startswith(self._prefixes):
            return True
        if self._words and not self._words.isdisjoint(module.split(".")):
            return True
        stem = module if self._exact else ""
        while stem:  # the module, then what it is part of
            if stem in self._exact:
                return True
            stem = stem.rpartition(".")[0]
        return any(e.match(root + module) for e in self._expressions for root in ("", *_ROOTS))


def matrices(
    layer: LayerSpec, hidden: int, index: int, beside: bool
) -> Iterator[tuple[Linear, int, list[str]]]:
    """Yield the matrices of a layer, how often each occurs, and the names it may have.

    ``beside``: the experts stand beside the MLP that every token passes through, as in Gemma 4,
    not inside the MLP with a shared expert.
    """

    def names(matrix: Linear, places: Iterable[str]) -> list[str]:
        bare = matrix.name.removeprefix("shared_")
        parts = _PARTS.get(bare, (bare,))
        return [f"layers.{index}.{place}.{part}" for place in places for part in parts]

    for part in (layer.attention, layer.state):
        for matrix in () if part is None else part.linears(hidden):
            yield matrix, 1, names(matrix, _ATTENTION)
    if layer.mlp is None:
        return
    shared = _MLP if beside else [f"{p}.{s}" for p in _MLP for s in _SHARED]
    for matrix in layer.mlp.linears(hidden):
        yield matrix, 1, names(matrix, shared if matrix.name.startswith("shared_") else _MLP)
    if isinstance(layer.mlp, Experts):
        routed = ["experts.0"] if beside else [f"{place}.experts.0" for place in _MLP]
        for matrix in layer.mlp.expert_linears(hidden):
            yield matrix, layer.mlp.num_experts, names(matrix, routed)
