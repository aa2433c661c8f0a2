"""Weight bytes of a quantised model, by its own keys: bits, groups, scales, modules left out.

Models: GPTQ, AWQ, compressed-tensors, fp8 (by block or tensor), MXFP4, ModelOpt (NVFP4, FP8,
mixed), bitsandbytes, MLX.

Assumes: only matrices inside layers are quantised, and lm_head where a list of targets includes it;
routers, shared gates, norms, biases and embeddings keep the model's dtype; a group that a row does
not fill is stored whole; projections that read one input count as one matrix.

Ignores: packing rows to whole words, shapes and scales of activations; a fraction of a per mille.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from servelab.models.attention import Linear
from servelab.models.errors import UnsupportedConfig
from servelab.models.reader.keys import Keys, as_count, show
from servelab.models.reader.stored import (
    ALGORITHMS,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    NEVER,
    NVFP4,
    Names,
    Scheme,
    matrices,
)
from servelab.models.spec import ModelSpec
from servelab.units import size_bytes

#: Where a configuration lists the modules that keep the model's dtype.
_LISTS_OF_MODULES = (
    "modules_to_not_convert", "ignore", "exclude_modules", "llm_int8_skip_modules",
    "ignored_layers",
)  # fmt: skip


@dataclass(frozen=True)
class _Plan:
    """Which modules are stored how: the first group that has a module, unless it is left out."""

    groups: tuple[tuple[Names | None, Scheme], ...]  # None: every matrix
    ignored: Names
    lm_head: bool
    embedding: Scheme | None = None

    def scheme(self, modules: list[str]) -> Scheme | None:
        """Return the scheme of a matrix under any of its names, or None: not quantised."""
        if any(self.ignored.match(module) for module in modules):
            return None
        for names, scheme in self.groups:
            if names is None or any(names.match(module) for module in modules):
                return scheme
        return None


@dataclass
class _Stored:
    """Matrices as they add up: their bytes, their weights and biases."""

    element_bytes: int
    size_bytes: int = 0
    params: int = 0

    def add(self, matrix: Linear, scheme: Scheme | None, copies: int = 1) -> None:
        """Add copies of a matrix, stored by a scheme or in the model's dtype; its bias is plain."""
        weights = matrix.d_in * matrix.d_out
        stored = (
            scheme.matrix_bytes(matrix.d_in, matrix.d_out)
            if scheme
            else (weights * self.element_bytes)
        )
        self.size_bytes += copies * (stored + (matrix.params - weights) * self.element_bytes)
        self.params += copies * matrix.params

    @property
    def bits(self) -> float | None:
        """Return the average bits per weight, None without any."""
        return 8 * self.size_bytes / self.params if self.params else None


def with_published_weights(spec: ModelSpec, outer: Keys, text: Keys) -> ModelSpec:
    """Return the spec with its weight bytes, where the configuration states a quantisation."""
    section = (
        text.section("quantization_config")
        or outer.section("quantization_config")
        or outer.section("quantization")  # MLX
    )
    if section is None or spec.unknown:
        return spec
    plan = _plan(section)
    element = size_bytes(1, spec.weight_dtype)
    always, routed = _Stored(element), _Stored(element)  # what each step reads, and experts
    beside = str(text.raw("model_type") or outer.raw("model_type")).startswith("gemma4")
    for index, layer in enumerate(spec.layers):
        for matrix, copies, modules in matrices(layer, spec.hidden_size, index, beside):
            scheme = None if matrix.name in NEVER else plan.scheme(modules)
            part = routed if any(".experts.0." in module for module in modules) else always
            part.add(matrix, scheme, copies)
    table = Linear("embedding", spec.hidden_size, spec.vocab_size)
    tables = _Stored(element)
    tables.add(table, plan.embedding)
    own = plan.scheme(["lm_head"]) if plan.lm_head else None
    always.add(spec.lm_head, plan.embedding if spec.tied_embeddings else own)
    parts = (always, routed) if spec.tied_embeddings else (always, routed, tables)
    rest = spec.params_total - sum(part.params for part in parts)
    total = rest * element + sum(part.size_bytes for part in parts)
    method = section.raw("quant_method") or section.raw("quant_algo") or "MLX"
    cache = section.raw("kv_cache_scheme") or section.raw("kv_cache_quant_algo")
    notes = {"kv_cache_scheme": f"{show(cache)}: a proposal; the cache's dtype is asked for"}
    note = f"quantization_config ({show(method)}): {total} bytes of weights"
    return replace(
        spec,
        published_weight_bytes=total,
        published_weight_bits=always.bits,
        published_expert_bits=routed.bits,
        provenance={
            **spec.provenance,
            **(notes if cache else {}),
            "published_weight_bytes": note,
        },
    )


# --- the keys of each method --------------------------------------------------------------------


def _plan(config: Keys) -> _Plan:
    """Return the plan that a ``quantization_config`` states."""
    method = config.text("quant_method") or ("modelopt" if config.has("quant_algo") else None)
    ignored = _left_out_by_rule(config)
    for key in _LISTS_OF_MODULES:
        ignored += config.listing(key) or []
    config.must_be("modules_in_block_to_quantize", (), "some matrices of a layer only")
    sparsity = config.section("sparsity_config")
    if sparsity is not None:
        sparsity.must_be("format", ("dense",), "weights without their zeros")
    left_out = Names("quantization_config.ignore", ignored)
    if method in ("compressed-tensors", "modelopt"):
        return _Plan(_groups(config), left_out, lm_head=True)
    if method == "mxfp4":  # gpt-oss: the experts' matrices only
        return _Plan(((Names("mxfp4", ["experts"]), MXFP4),), left_out, lm_head=False)
    if method == "fp8":
        return _Plan(((None, _fp8(config)),), left_out, lm_head=False)
    if method == "fbgemm_fp8":
        return _Plan(((None, FP8_CHANNEL),), left_out, lm_head=False)
    if method in ("gptq", "awq"):
        return _Plan(((None, _grouped(config, method)),), left_out, config.raw("lm_head") is True)
    if method is None and config.has("bits") and config.has("group_size"):
        scheme = _mlx(config)
        return _Plan(((None, scheme),), left_out, lm_head=True, embedding=scheme)
    if method == "bitsandbytes":
        return _Plan(((None, _bitsandbytes(config)),), left_out, lm_head=False)
    raise UnsupportedConfig(
        "quantization_config",
        f"quant_method {show(method)} is not understood; known: gptq, awq, compressed-tensors, "
        f"fp8, fbgemm_fp8, mxfp4, modelopt, bitsandbytes",
    )


def _left_out_by_rule(config: Keys) -> list[Any]:
    """Return what GPTQModel's ``dynamic`` leaves out; rules that change a module are refused."""
    rules = config.section("dynamic")
    names = [] if rules is None else rules.names()
    for name in names:
        if rules is not None and not name.startswith("-:") and rules.raw(name) not in (None, {}):
            raise UnsupportedConfig("dynamic", f"{show(name)}: a module of its own format")
    return [f"re:{name[2:]}" for name in names if name.startswith("-:")]


def _fp8(config: Keys) -> Scheme:
    block = config.listing("weight_block_size")
    if block is None:
        return FP8_TENSOR
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


def _mlx(config: Keys) -> Scheme:
    """Return MLX's scheme: an fp16 scale and offset per group, embedding and lm_head too."""
    config.must_be("mode", ("affine",), "another format of MLX")
    others = [name for name in config.names() if name not in ("bits", "group_size", "mode")]
    if others:
        raise UnsupportedConfig("quantization", f"{show(others[0])}: a module of its own format")
    return Scheme(config.count("bits", maximum=16), config.count("group_size"), 1, 32)


def _bitsandbytes(config: Keys) -> Scheme:
    if config.raw("load_in_8bit") is True:
        return Scheme(8, 0, 1, 32)
    if config.raw("load_in_4bit") is not True:
        raise UnsupportedConfig("quantization_config", "loads in neither 4 nor 8 bits")
    double = config.raw("bnb_4bit_use_double_quant") is True
    return Scheme(4, 64, 1, 8 if double else 32)


def _groups(config: Keys) -> tuple[tuple[Names | None, Scheme], ...]:
    """Return the groups of compressed-tensors and ModelOpt, each with its targets."""
    listed = config.section("quantized_layers")
    if listed is not None:
        by_scheme: dict[Scheme, list[Any]] = {}
        for module in listed.names():
            entry = listed.section(module)
            by_scheme.setdefault(_algorithm(entry), []).append(module)
        return tuple((Names("quantized_layers", m), s) for s, m in by_scheme.items())
    groups = config.section("config_groups")
    if groups is None:
        return ((None, _algorithm(config)),)
    found: list[tuple[Names | None, Scheme]] = []
    for name in groups.names():
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue  # activations only
        targets = group.listing("targets") or ["Linear"]
        names = None if "Linear" in targets else Names("targets", targets)
        found.append((names, _weights(weights, str(config.raw("format") or group.raw("format")))))
    return tuple(found)


def _algorithm(config: Keys | None) -> Scheme:
    algorithm = None if config is None else config.raw("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise UnsupportedConfig("quant_algo", f"{show(algorithm)} is not understood")
    return ALGORITHMS[algorithm]


def _weights(weights: Keys, layout: str) -> Scheme:
    """Return the scheme of a group's ``weights`` entry."""
    bits = weights.count("num_bits", maximum=16)
    if "mxfp4" in layout:
        return MXFP4
    rows = weights.count_or_none("group_size", rule="absent: one scale for more")
    floating = weights.raw("type") == "float"
    if bits == 4 and floating:
        return replace(NVFP4, rows=rows or 16)
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
