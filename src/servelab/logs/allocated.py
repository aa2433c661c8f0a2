"""The bytes of the tokens or cells that an engine allocates.

Models: SGLang's and TensorRT-LLM's tokens on one rank, llama.cpp's cells in the layers that a line
is about, from the model or from the widths that llama.cpp prints of it.

Assumes: llama.cpp's cache is f16 or f32 where its line names no format.

Ignores: pools for windows in TensorRT-LLM.
"""

import itertools
from collections.abc import Iterator

from servelab.logs.readings import Reading
from servelab.logs.run import Derived, Rule, Run, cut
from servelab.logs.setups import Setup, kv_format, setups
from servelab.memory.formats import ROW_BLOCKS, index_bytes, keys_bytes
from servelab.models import Attention, LatentAttention, LayerSpec, ModelSpec
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
                    doubt = cut(tokens) or setup.doubt
                    yield Derived(size, size, size, why, doubt, setup.excuse)


def _token_sizes(spec: ModelSpec, setup: Setup, target: Reading) -> list[tuple[int, str]]:
    """Return what one token may take on a rank: with index keys, and as logs before had it."""
    try:
        layers = [layer for layer in rank(spec, setup.tp).layers if layer.attention]
        sizes = [
            (sum(_part(layer, setup.kv_dtype, target.quantity) for layer in group), what)
            for group, what in _groups(layers)
        ]
        index = sum(index_bytes(layer, "fp8_ds_mla") for layer in layers)
    except ValueError:
        return []
    if not index:
        return sizes
    kept = sizes[0][0]
    return [(kept + index, ", index keys included"), (kept, ", index keys left out")]


def _groups(layers: list[LayerSpec]) -> list[tuple[list[LayerSpec], str]]:
    """Return all layers, and those that may have a pool of their own: with and without a window."""
    full = [layer for layer in layers if layer.attention and layer.attention.window is None]
    sliding = [layer for layer in layers if layer not in full]
    if not full or not sliding:
        return [(layers, "")]
    return [(layers, ""), (full, " of layers in full"), (sliding, " of layers with windows")]


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
    groups = [group for group, _ in _groups(cached)]
    counted = run.same_statement("layers", target)
    of_line = [g for g in groups if counted and len(g) == counted[0].value]
    beside = {len(g) for g in groups} & {r.value for r in run.nearest("layers", target)}
    excuse = "it is a draft model's" if run.setting("draft") else ""
    if counted and not of_line and beside:
        excuse = f"its {counted[0].text} are beside the {max(beside)} of the model"
    for group in of_line or groups:
        for word, name in _formats(target, run):
            for per_cell, how in _cell_sizes(group, name, target.quantity):
                what = f"{format_bytes(per_cell)} of {len(group)} layers in {word}{how}"
                for cells in _cells_of(target, run):
                    ends = (cells.value * per_cell, cells.low * per_cell, cells.high * per_cell)
                    yield Derived(*ends, f"{cells.text} x {what}", cut(cells), excuse)


def _cell_sizes(layers: list[LayerSpec], kv_dtype: str, quantity: str) -> Iterator[tuple[int, str]]:
    """Yield the bytes of a cell: for latents in each way that llama.cpp has kept them."""
    yield sum(_part(layer, kv_dtype, quantity) for layer in layers), ""
    latents = [a for layer in layers if isinstance(a := layer.attention, LatentAttention)]
    if latents:
        for as_heads, how in ((False, ", latents again as values"), (True, ", latents as heads")):
            kept = [LayerSpec(_unfolded(a, as_heads), None, 0) for a in latents]
            yield sum(_part(layer, kv_dtype, quantity) for layer in kept), how


def _unfolded(latent: LatentAttention, as_heads: bool) -> Attention:
    """Return the heads whose keys and values are kept: the latent as one, or all, projected.

    Source: ggml-org/llama.cpp#12801 (from heads to latents), #19067 (latents no longer as values).
    """
    heads = latent.num_q_heads
    if as_heads:
        key = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        return Attention(heads, heads, key, v_head_dim=latent.v_head_dim)
    return Attention(heads, 1, latent.kv_width, v_head_dim=latent.kv_lora_rank)


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
    }
    if not words and run.same_statement("cells", target):
        return []  # newer lines name it: it has been cut off
    words = words or {"f16", "f32"}
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
