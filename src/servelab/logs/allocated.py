"""The bytes of the tokens or cells that an engine allocates.

Models: SGLang's and TensorRT-LLM's tokens on one rank, llama.cpp's cells in the layers that a line
is about, from the model or from the widths that llama.cpp prints of it.

Assumes: llama.cpp's cache is f16 or f32 where its line names no format.

Ignores: pools for windows in SGLang and TensorRT-LLM.
"""

import itertools
from collections.abc import Iterator

from servelab.logs.readings import Reading
from servelab.logs.run import Derived, Rule, Run, cut
from servelab.logs.setups import Setup, kv_format, setups
from servelab.memory.formats import ROW_BLOCKS, index_bytes, keys_bytes
from servelab.models import Attention, LayerSpec, ModelSpec
from servelab.models.parallel import rank
from servelab.units import format_bytes, size_bytes


def _keys_and_values(target: Reading, run: Run) -> Iterator[Derived]:
    """The cache is its keys and its values."""
    for keys in run.same_statement("k_size", target):
        for values in run.same_statement("v_size", target):
            yield Derived(
                keys.value * keys.scale + values.value * values.scale,
                keys.low + values.low,
                keys.high + values.high,
                f"K {keys.text} + V {values.text}",
            )


def _allocated(target: Reading, run: Run) -> Iterator[Derived]:
    """SGLang, TensorRT-LLM: the tokens they allocate, times the bytes of one."""
    assert run.spec is not None
    if target.engine == "llama.cpp":
        yield from _cells(target, run)
        return
    for setup in setups(run, run.spec):
        # SGLang keeps one page more, which padded tokens write to
        page = setup.block_size if run.setting("block_size") else 1
        extra = (page, 64, 0) if target.engine == "sglang" else (0,)
        for per_token, what in _token_sizes(run.spec, setup, target):
            for tokens in run.same_statement("tokens", target) or run.nearest("tokens", target):
                for more in dict.fromkeys(extra):
                    size = (tokens.value + more) * per_token
                    why = f"{tokens.text} x {format_bytes(per_token)}{what}"
                    why += f", and a page of {more}" if more else ""
                    yield Derived(size, size, size, why, cut(tokens) or setup.doubt)


def _token_sizes(spec: ModelSpec, setup: Setup, target: Reading) -> list[tuple[int, str]]:
    """Return what one token may take on a rank: with index keys, and as logs before had it."""
    try:
        layers = rank(spec, setup.tp).layers
        kept = sum(_part(layer, setup.kv_dtype, target.quantity) for layer in layers)
        index = sum(index_bytes(layer, "fp8_ds_mla") for layer in layers)
    except ValueError:
        return []
    if not index:
        return [(kept, "")]
    return [(kept + index, ", index keys included"), (kept, ", index keys left out")]


def _part(layer: LayerSpec, kv_dtype: str, quantity: str) -> int:
    """Return the bytes of one token's keys, values or both in a layer."""
    whole = keys_bytes(layer, kv_dtype)
    heads = layer.attention
    if quantity == "kv_size" or not isinstance(heads, Attention):
        return whole
    keys = whole * heads.head_dim // (heads.head_dim + heads.value_dim)
    return keys if quantity == "k_size" else whole - keys


def _cells(target: Reading, run: Run) -> Iterator[Derived]:
    """llama.cpp: cells of every layer, or of the layers that its line counts."""
    assert run.spec is not None
    layers = run.spec.layers
    cached = [layer for layer in layers if layer.attention and layer.kv_elements_per_token]
    full = [layer for layer in cached if layer.attention and layer.attention.window is None]
    sliding = [layer for layer in cached if layer not in full]
    counted = run.same_statement("layers", target)
    for group in (cached, full, sliding):
        if counted and len(group) != counted[0].value:
            continue
        for word, name in _formats(target, run):
            per_cell = sum(_part(layer, name, target.quantity) for layer in group)
            what = f"{format_bytes(per_cell)} of {len(group)} layers in {word}"
            for cells in _cells_of(target, run):
                ends = (cells.value * per_cell, cells.low * per_cell, cells.high * per_cell)
                yield Derived(*ends, f"{cells.text} x {what}", cut(cells))


def _described_cells(target: Reading, run: Run) -> Iterator[Derived]:
    """llama.cpp: cells times layers times the widths that its description of the model states."""
    if target.engine != "llama.cpp":
        return
    part = {"k_size": "k", "v_size": "v"}.get(target.quantity, "kv")
    widths = [run.nearest(f"{name}_width", target) for name in part]
    if not all(widths):  # before grouped-query attention: as wide as the model
        widths = [run.nearest("width", target)] * len(part)
    for numbers in itertools.product(*widths):
        for layers in run.same_statement("layers", target) or run.nearest("layers", target):
            for word, name in _formats(target, run):
                low, middle, high = (
                    int(getattr(layers, end))
                    * _row_bytes(sum(int(getattr(n, end)) for n in numbers), name)
                    for end in ("low", "value", "high")
                )
                what = f"{layers.text} x {sum(n.value for n in numbers):,} numbers in {word}"
                for cells in _cells_of(target, run):
                    doubt = cut(cells, layers, *numbers)
                    why = f"{cells.text} x {what}"
                    yield Derived(
                        cells.value * middle, cells.low * low, cells.high * high, why, doubt
                    )


def _cells_of(target: Reading, run: Run) -> list[Reading]:
    """Return the cells that a size is of: its own line's, else the context's."""
    return run.same_statement("cells", target) or run.nearest("context", target)


def _formats(target: Reading, run: Run) -> list[tuple[str, str]]:
    """Return the formats a size may be in, as printed and as known; none where K and V differ."""
    names = {"k_size": ["k_dtype"], "v_size": ["v_dtype"]}
    both = ["k_dtype", "v_dtype"]
    words = {
        r.word for n in names.get(target.quantity, both) for r in run.same_statement(n, target)
    } or {"f16", "f32"}
    if len(words) > 1 and words != {"f16", "f32"}:
        return []  # each is checked by itself
    found = [(word, kv_format(word)) for word in sorted(words)]
    return [(word, name) for word, name in found if name is not None]


def _row_bytes(elements: int, kv_dtype: str) -> int:
    group, group_bytes = ROW_BLOCKS.get(kv_dtype, (0, 0))
    return -(-elements // group) * group_bytes if group else size_bytes(elements, kv_dtype)


#: The rules of what is allocated: from the log alone, and from the model.
ALLOCATED_RULES: dict[str, tuple[Rule, ...]] = {
    "kv_size": (_keys_and_values, _described_cells),
    "k_size": (_described_cells,),
    "v_size": (_described_cells,),
}
ALLOCATED_MODEL_RULES: dict[str, tuple[Rule, ...]] = {
    "kv_size": (_allocated,),
    "k_size": (_allocated,),
    "v_size": (_allocated,),
}
