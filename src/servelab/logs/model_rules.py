"""How the numbers of a start-up log follow from a model's configuration.

Models: vLLM's pool (V0 and V1, groups, null block), TensorRT-LLM's blocks, the bytes of the tokens
or cells that SGLang, TensorRT-LLM and llama.cpp allocate, the weights of a rank.

Assumes: a setup as in `servelab.logs.setups`; where only one that the log does not state explains a
number, no verdict is given.

Ignores: pools for windows in SGLang and TensorRT-LLM; draft models; images and adapters.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from servelab.logs.quantities import Reading
from servelab.logs.rules import Derived, Rule, Run, cut, swap_bytes, uniform
from servelab.logs.setups import WEIGHT_TOLERANCE, Setup, kv_format, rank_weights, setups
from servelab.memory import Capacity, capacity, suggested_context
from servelab.memory.formats import index_bytes, keys_bytes
from servelab.models import Attention, LayerSpec, ModelSpec
from servelab.models.parallel import rank
from servelab.units import format_bytes

#: TensorRT-LLM's ``kv_cache_free_gpu_mem_fraction`` where none is given.
_FREE_FRACTION = 0.9
#: Enough memory for any sequence: what one needs does not depend on it.
_PLENTY_BYTES = 1 << 60


@lru_cache(maxsize=4096)
def _counted(
    spec: ModelSpec, available_bytes: int, engine: str, setup: Setup, length: int
) -> Capacity | None:
    """Return what fits, None where the engine would refuse the setup."""
    try:
        return capacity(
            spec,
            available_bytes,
            length,
            setup.block_size,
            setup.kv_dtype,
            engine=engine,
            tp=setup.tp,
            pp=setup.pp,
            dcp=setup.dcp if engine == "vllm" else 1,
            max_num_batched_tokens=setup.batched_tokens,
        )
    except ValueError:
        return None


def _ways(run: Run, spec: ModelSpec) -> Iterator[tuple[str, Setup]]:
    """Yield how vLLM may count: in groups, or (V0, no hybrid manager) every layer in full."""
    for setup in setups(run, spec):
        yield "vllm", setup
        if not uniform(spec):
            yield "exact", setup


def _of_available(
    target: Reading, run: Run, numbers: Callable[[Capacity], list[tuple[float, str]]]
) -> Iterator[Derived]:
    """Yield what follows from the memory that is left, at both ends of what it rounds."""
    spec = run.spec
    assert spec is not None
    length = run.nearest("max_model_len", target)
    tokens = int(length[0].high) if length else spec.max_context_tokens or 1
    for engine, setup in _ways(run, spec):
        for available in run.nearest("available", target):
            ends = [
                _counted(spec, max(int(size), 0), engine, setup, max(tokens, 1))
                for size in (available.low, available.value * available.scale, available.high)
            ]
            low, middle, high = ends
            if low is None or middle is None or high is None:
                continue
            block = format_bytes(middle.bytes_per_block)
            for (a, _), (b, what), (c, _) in zip(*map(numbers, (low, middle, high)), strict=True):
                why = f"{available.text} / {block} per block{what}{setup.note}"
                yield Derived(b, a, c, why, cut(available) or setup.doubt)


def _blocks(target: Reading, run: Run) -> Iterator[Derived]:
    if target.engine == "tensorrt-llm":
        yield from _tensorrt_blocks(target, run)
    else:
        yield from _of_available(target, run, lambda fits: [(fits.blocks, ", rounded down")])


def _tensorrt_blocks(target: Reading, run: Run) -> Iterator[Derived]:
    """TensorRT-LLM takes a share of the free memory and rounds blocks up."""
    assert run.spec is not None
    for setup in setups(run, run.spec):
        one = _counted(run.spec, _PLENTY_BYTES, "tensorrt-llm", setup, 1)
        for free in run.nearest("free", target):
            if one is None:
                continue
            low, middle, high = (
                -(-int(size * _FREE_FRACTION) // one.bytes_per_block)
                for size in (free.low, free.value * free.scale, free.high)
            )
            yield Derived(
                middle,
                low,
                high,
                f"{free.text} free x {_FREE_FRACTION} / {format_bytes(one.bytes_per_block)} per "
                "block, rounded up",
                setup.doubt,
            )


def _tokens(target: Reading, run: Run) -> Iterator[Derived]:
    def counts(fits: Capacity) -> list[tuple[float, str]]:
        of = f", {fits.block_size} tokens each"
        return [
            (fits.tokens, of),
            (fits.printed_tokens, of + ", printed as concurrency x length"),
        ]

    if target.engine == "vllm":
        yield from _of_available(target, run, counts)


def _concurrency(target: Reading, run: Run) -> Iterator[Derived]:
    assert run.spec is not None
    if not uniform(run.spec):
        yield from _of_available(
            target,
            run,
            lambda fits: [(fits.max_concurrency, f", {fits.blocks_per_sequence:,} per request")],
        )


def _cpu_blocks(target: Reading, run: Run) -> Iterator[Derived]:
    """The swap space holds whole blocks: it shows the bytes of a block on a rank."""
    assert run.spec is not None
    swap, stated = swap_bytes(run)
    for setup in setups(run, run.spec):
        fits = _counted(run.spec, int(swap), "exact", setup, 1)
        if fits is not None:
            block = format_bytes(fits.bytes_per_block)
            why = f"{stated} / {block} per block, rounded down{setup.note}"
            yield Derived(fits.blocks, fits.blocks, fits.blocks, why, setup.doubt)


def _needed(target: Reading, run: Run) -> Iterator[Derived]:
    assert run.spec is not None
    for length in run.nearest("max_model_len", target):
        for engine, setup in _ways(run, run.spec):
            ends = [
                _counted(run.spec, _PLENTY_BYTES, engine, setup, max(int(tokens), 1))
                for tokens in (length.low, length.high)
            ]
            low, high = ends
            if low is None or high is None:
                continue
            why = (
                f"{length.text} in {low.blocks_per_sequence:,} blocks of "
                f"{format_bytes(low.bytes_per_block)}{setup.note}"
            )
            doubt = cut(length) or setup.doubt
            yield Derived(low.needed_bytes, low.needed_bytes, high.needed_bytes, why, doubt)


def _estimated(target: Reading, run: Run) -> Iterator[Derived]:
    assert run.spec is not None
    for setup in setups(run, run.spec):
        for available in run.nearest("available", target):
            for length in run.nearest("max_model_len", target):
                found = [
                    _suggested(run.spec, max(int(size), 0), setup, max(int(length.high), 1))
                    for size in (available.low, available.value * available.scale, available.high)
                ]
                low, middle, high = found
                if low is None or middle is None or high is None:
                    continue
                why = f"the longest length whose blocks fit into {available.text}{setup.note}"
                yield Derived(middle, low, high, why, cut(available, length) or setup.doubt)


@lru_cache(maxsize=4096)
def _suggested(spec: ModelSpec, available_bytes: int, setup: Setup, limit: int) -> int | None:
    try:
        return suggested_context(
            spec,
            available_bytes,
            limit,
            block_size=setup.block_size,
            kv_dtype=setup.kv_dtype,
            tp=setup.tp,
            pp=setup.pp,
            dcp=setup.dcp,
            max_num_batched_tokens=setup.batched_tokens,
        )
    except ValueError:
        return None


def _weights(target: Reading, run: Run) -> Iterator[Derived]:
    """A rank's share of the configuration's weights, within 5 %."""
    assert run.spec is not None
    if run.spec.unknown:
        return
    for setup in setups(run, run.spec):
        expected = rank_weights(run.spec, setup.tp)
        if expected is None:
            continue
        reported = target.value * target.scale
        doubt = setup.doubt
        if setup.pp > 1:
            doubt = "a pipeline stage holds a part of the layers"
        low, high = expected * (1 - WEIGHT_TOLERANCE), expected * (1 + WEIGHT_TOLERANCE)
        quantized = run.setting("quantization")
        if quantized and quantized.word != "None" and run.spec.published_weight_bytes is None:
            low, doubt = 0, f"quantised when it was loaded ({quantized.word})"
        if reported > high:  # towers, draft layers, adapters are loaded but are no text decoder
            high, doubt = reported, "more is loaded than the text decoder"
        why = f"the configuration's {format_bytes(expected, 'GiB')} on each of {setup.tp} rank(s)"
        yield Derived(expected, low, high, f"{why}, within 5 %", doubt)


# --- bytes of what is allocated -----------------------------------------------------------------


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
            for tokens in run.same_line("tokens", target) or run.nearest("tokens", target):
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
    stated = [
        r.word
        for name in ("k_dtype", "v_dtype")
        if target.quantity in ("kv_size", name[0] + "_size")
        for r in run.same_line(name, target)
    ]
    if len(set(stated)) > 1:
        return  # K and V are checked by themselves
    cached = [layer for layer in run.spec.layers if layer.kv_elements_per_token]
    full = [layer for layer in cached if layer.attention and layer.attention.window is None]
    sliding = [layer for layer in cached if layer.attention and layer.attention.window]
    lines = run.same_line("layers", target)
    for group in (cached, full, sliding):
        if lines and len(group) != lines[0].value:
            continue
        for word in stated[:1] or ["f16", "f32"]:
            name = kv_format(word)
            if name is None:
                continue
            per_cell = sum(_part(layer, name, target.quantity) for layer in group)
            for cells in run.same_line("cells", target) or run.nearest("context", target):
                why = f"{cells.text} x {format_bytes(per_cell)} of {len(group)} layers in {word}"
                yield Derived(
                    cells.value * per_cell,
                    cells.low * per_cell,
                    cells.high * per_cell,
                    why,
                    cut(cells),
                )


#: The rules that need the model; they stand beside those of `servelab.logs.rules`.
MODEL_RULES: dict[str, tuple[Rule, ...]] = {
    "weights": (_weights,),
    "gpu_blocks": (_blocks,),
    "cpu_blocks": (_cpu_blocks,),
    "tokens": (_tokens,),
    "max_concurrency": (_concurrency,),
    "needed": (_needed,),
    "estimated_max_model_len": (_estimated,),
    "kv_size": (_allocated,),
    "k_size": (_allocated,),
    "v_size": (_allocated,),
}
