"""Weight bytes of a quantised model, by its own keys: bits, groups, scales, modules left out.

Models: GPTQ, AWQ, compressed-tensors, fp8 (by block or tensor), MXFP4, ModelOpt (NVFP4, FP8,
mixed), bitsandbytes.

Assumes: only matrices inside layers are quantised, and lm_head where a list of targets includes it;
routers, shared gates, norms, biases and embeddings keep the model's dtype; a group that a row does
not fill is stored whole; projections that read one input count as one matrix.

Ignores: packing rows to whole words, shapes and scales of activations; a fraction of a per mille.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import translate
from typing import Any

from servelab.models.attention import Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.layers import Experts, LayerSpec
from servelab.models.reader.keys import Keys, as_count, show
from servelab.models.spec import ModelSpec
from servelab.units import size_bytes

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
_NEVER = frozenset({"router", "shared_gate", "index_weights_proj", "in_proj_ba"})
_ROOTS = re.compile(
    r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.|backbone\.)"
)


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


_NVFP4, _MXFP4 = Scheme(4, 16, 1, 8), Scheme(4, 32, 1, 8)
_FP8_TENSOR, _FP8_CHANNEL = Scheme(8, 0, 0, 32), Scheme(8, 0, 1, 32)
_ALGORITHMS = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "FP8": _FP8_TENSOR,
    "MXFP8": Scheme(8, 32, 1, 8),
    "MXFP4": _MXFP4,
    "W4A8_MXFP4_FP8": _MXFP4,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8_CHANNEL,
    "FP8_PB_WO": Scheme(8, 128, 128, 32),
}


class _Names:
    """A list of modules, as configurations write them: names, globs, ``re:`` expressions."""

    def __init__(self, key: str, patterns: list[Any]) -> None:
        self._exact: set[str] = set()
        prefixes, expressions = [], []
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise UnsupportedConfig(key, f"{show(pattern)} is no name of a module")
            bare = _ROOTS.sub("", pattern)
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
        return any(e.match(module) or e.match(f"model.{module}") for e in self._expressions)


@dataclass(frozen=True)
class _Plan:
    """Which modules are stored how: the first group that has a module, unless it is left out."""

    groups: tuple[tuple[_Names | None, Scheme], ...]  # None: every matrix
    ignored: _Names
    lm_head: bool

    def scheme(self, modules: list[str]) -> Scheme | None:
        """Return the scheme of a matrix under any of its names, or None: not quantised."""
        if any(self.ignored.match(module) for module in modules):
            return None
        for names, scheme in self.groups:
            if names is None or any(names.match(module) for module in modules):
                return scheme
        return None


def with_published_weights(spec: ModelSpec, outer: Keys, text: Keys) -> ModelSpec:
    """Return the spec with its weight bytes, where the configuration states a quantisation."""
    section = text.section("quantization_config") or outer.section("quantization_config")
    if section is None or spec.unknown:
        return spec
    plan = _plan(section)
    total = size_bytes(spec.params_total, spec.weight_dtype)
    element = size_bytes(1, spec.weight_dtype)
    beside = str(text.raw("model_type") or outer.raw("model_type")).startswith("gemma4")
    for index, layer in enumerate(spec.layers):
        for matrix, copies, modules in _matrices(layer, spec.hidden_size, index, beside):
            scheme = None if matrix.name in _NEVER else plan.scheme(modules)
            if scheme is not None:
                plain = matrix.d_in * matrix.d_out * element
                total += copies * (scheme.matrix_bytes(matrix.d_in, matrix.d_out) - plain)
    if plan.lm_head and not spec.tied_embeddings:
        scheme = plan.scheme(["lm_head"])
        if scheme is not None:
            head = spec.lm_head
            total += scheme.matrix_bytes(head.d_in, head.d_out) - head.d_in * head.d_out * element
    method = section.raw("quant_method") or section.raw("quant_algo")
    note = f"quantization_config ({show(method)}): {total} bytes of weights"
    return replace(
        spec,
        published_weight_bytes=total,
        provenance={**spec.provenance, "published_weight_bytes": note},
    )


def _matrices(
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


# --- the keys of each method --------------------------------------------------------------------


def _plan(config: Keys) -> _Plan:
    """Return the plan that a ``quantization_config`` states."""
    method = config.text("quant_method") or ("modelopt" if config.has("quant_algo") else None)
    ignored: list[Any] = []
    for key in ("modules_to_not_convert", "ignore", "exclude_modules", "llm_int8_skip_modules"):
        ignored += config.listing(key) or []
    left_out = _Names("quantization_config.ignore", ignored)
    if method in ("compressed-tensors", "modelopt"):
        return _Plan(_groups(config), left_out, lm_head=True)
    if method == "mxfp4":  # gpt-oss: the experts' matrices only
        return _Plan(((_Names("mxfp4", ["experts"]), _MXFP4),), left_out, lm_head=False)
    if method == "fp8":
        return _Plan(((None, _fp8(config)),), left_out, lm_head=False)
    if method == "fbgemm_fp8":
        return _Plan(((None, _FP8_CHANNEL),), left_out, lm_head=False)
    if method in ("gptq", "awq"):
        return _Plan(((None, _grouped(config, method)),), left_out, config.raw("lm_head") is True)
    if method == "bitsandbytes":
        return _Plan(((None, _bitsandbytes(config)),), left_out, lm_head=False)
    raise UnsupportedConfig(
        "quantization_config",
        f"quant_method {show(method)} is not understood; known: gptq, awq, compressed-tensors, "
        f"fp8, fbgemm_fp8, mxfp4, modelopt, bitsandbytes",
    )


def _fp8(config: Keys) -> Scheme:
    block = config.listing("weight_block_size")
    if block is None:
        return _FP8_TENSOR
    if len(block) != 2:
        raise UnsupportedConfig("weight_block_size", f"must be two numbers, got {show(block)}")
    columns, rows = (as_count("weight_block_size", side) for side in block)
    return Scheme(8, rows, columns, 32)


def _grouped(config: Keys, method: str) -> Scheme:
    """Return GPTQ's or AWQ's scheme: an fp16 scale and a zero point per group."""
    bits = config.count("bits", "w_bit", maximum=16)
    size = config.raw("group_size") if config.has("group_size") else config.raw("q_group_size")
    whole = size == -1
    group = 0 if whole else config.count("group_size", "q_group_size")
    index_bits = 32 if method == "gptq" else 0
    return Scheme(bits, group, 1, 16 + bits, index_bits)


def _bitsandbytes(config: Keys) -> Scheme:
    if config.raw("load_in_8bit") is True:
        return Scheme(8, 0, 1, 32)
    if config.raw("load_in_4bit") is not True:
        raise UnsupportedConfig("quantization_config", "loads in neither 4 nor 8 bits")
    double = config.raw("bnb_4bit_use_double_quant") is True
    return Scheme(4, 64, 1, 8 if double else 32)


def _groups(config: Keys) -> tuple[tuple[_Names | None, Scheme], ...]:
    """Return the groups of compressed-tensors and ModelOpt, each with its targets."""
    listed = config.section("quantized_layers")
    if listed is not None:
        by_scheme: dict[Scheme, list[Any]] = {}
        for module in listed.names():
            entry = listed.section(module)
            by_scheme.setdefault(_algorithm(entry), []).append(module)
        return tuple((_Names("quantized_layers", m), s) for s, m in by_scheme.items())
    groups = config.section("config_groups")
    if groups is None:
        return ((None, _algorithm(config)),)
    found: list[tuple[_Names | None, Scheme]] = []
    for name in groups.names():
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue  # activations only
        targets = group.listing("targets") or ["Linear"]
        names = None if "Linear" in targets else _Names("targets", targets)
        found.append((names, _weights(weights, str(config.raw("format") or group.raw("format")))))
    return tuple(found)


def _algorithm(config: Keys | None) -> Scheme:
    algorithm = None if config is None else config.raw("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise UnsupportedConfig("quant_algo", f"{show(algorithm)} is not understood")
    return _ALGORITHMS[algorithm]


def _weights(weights: Keys, layout: str) -> Scheme:
    """Return the scheme of a group's ``weights`` entry."""
    bits = weights.count("num_bits", maximum=16)
    if "mxfp4" in layout:
        return _MXFP4
    rows = weights.count_or_none("group_size", rule="absent: one scale for more")
    floating = weights.raw("type") == "float"
    if bits == 4 and floating:
        return replace(_NVFP4, rows=rows or 16)
    zero_bits = 0 if weights.raw("symmetric") is not False else bits
    block = weights.listing("block_structure")
    if block is not None and len(block) == 2:
        columns, block_rows = (as_count("block_structure", side) for side in block)
        return Scheme(bits, block_rows, columns, 32)
    if rows is not None:
        return Scheme(bits, rows, 1, 16 + zero_bits)
    if weights.raw("strategy") == "channel":
        return Scheme(bits, 0, 1, 16 + zero_bits)
    return Scheme(bits, 0, 0, 32)
