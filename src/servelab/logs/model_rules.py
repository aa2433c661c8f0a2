"""How the numbers of a start-up log follow from a model's configuration.

Models: vLLM's pool (V0 and V1, groups, null block), TensorRT-LLM's blocks, the weights of a rank.

Assumes: a setup as in `servelab.logs.setups`; where only one that the log does not state explains a
number, no verdict is given.

Ignores: bytes of what is allocated (`servelab.logs.allocated`); draft models; images and adapters.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from servelab.logs.defaults import swap_spaces
from servelab.logs.readings import Reading
from servelab.logs.run import Derived, Rule, Run, cut, uniform
from servelab.logs.setups import WEIGHT_TOLERANCE, Setup, cut_setting, rank_weights, setups
from servelab.memory import Capacity, capacity, suggested_context
from servelab.models import ModelSpec
from servelab.units import format_bytes

#: TensorRT-LLM's ``kv_cache_free_gpu_mem_fraction`` where none is given.
_FREE_FRACTION = 0.9
#: A quantised model is smaller than this share of what it was: 8 of 16 bits, tables left in full.
_LIGHTEST = 0.85
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
                yield Derived(b, a, c, why, cut(available) or setup.doubt, setup.excuse)


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
                setup.excuse,
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
    for setup in setups(run, run.spec):
        one = _counted(run.spec, _PLENTY_BYTES, "exact", setup, 1)
        if one is None:
            continue
        block = one.bytes_per_block
        for swap, stated, doubt in swap_spaces(target, run, block, block):
            if doubt and setup.doubt:
                continue  # one guess at a time: two explain anything
            blocks = swap // block
            why = f"{stated} / {format_bytes(block)} per block, rounded down{setup.note}"
            yield Derived(blocks, blocks, blocks, why, setup.doubt or doubt, setup.excuse)


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
            ends_bytes = (low.needed_bytes, low.needed_bytes, high.needed_bytes)
            yield Derived(*ends_bytes, why, doubt, setup.excuse)


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
                doubt = cut(available, length) or setup.doubt
                yield Derived(middle, low, high, why, doubt, setup.excuse)


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
        excuse = cut_setting(run)
        if run.spec.published_weight_bytes is None:
            if quantized and quantized.word != "None":
                low, doubt = 0, f"quantised when it was loaded ({quantized.word})"
            elif reported < expected * _LIGHTEST and not (quantized and target.engine == "vllm"):
                excuse = "whether it was quantised, offloaded or split is not in the log"
        if (
            reported > high and not doubt
        ):  # towers, draft layers, adapters are loaded but are no text decoder
            high, doubt = reported, "more is loaded than the text decoder"
        why = f"the configuration's {format_bytes(expected, 'GiB')} on each of {setup.tp} rank(s)"
        yield Derived(expected, low, high, f"{why}, within 5 %", doubt, excuse)


#: The rules that need the model; they stand beside those of `servelab.logs.rules`.
MODEL_RULES: dict[str, tuple[Rule, ...]] = {
    "weights": (_weights,),
    "gpu_blocks": (_blocks,),
    "cpu_blocks": (_cpu_blocks,),
    "tokens": (_tokens,),
    "max_concurrency": (_concurrency,),
    "needed": (_needed,),
    "estimated_max_model_len": (_estimated,),
}
