"""How each number of a start-up log follows from the other numbers in it.

Models: vLLM's blocks, tokens, concurrency and refusal; the memory budgets that it prints.

Assumes: intervals: a size printed with two decimals is any size that rounds to it. What the log
does not state is the engine's default.

Ignores: the model (`servelab.logs.model_rules`); bytes of what is allocated
(`servelab.logs.allocated`).
"""

from collections.abc import Iterator

from servelab.logs.defaults import BLOCK_SIZES, block_sizes, swap_spaces
from servelab.logs.readings import Reading
from servelab.logs.run import Derived, Rule, Run, cut, proportional
from servelab.memory import VLLM_MARGIN_BYTES

_NOT_IN_PROPORTION = (
    "a model with windows or states needs less than in proportion to length: its configuration "
    "tells"
)


def _tokens_from_blocks(target: Reading, run: Run) -> Iterator[Derived]:
    """Tokens are blocks times the tokens of a block."""
    stated = run.nearest("block_size", target)
    for blocks in run.nearest("gpu_blocks", target):
        for size in stated:
            yield Derived(
                blocks.value * size.value,
                blocks.low * size.low,
                blocks.high * size.high,
                f"{blocks.text} of {size.text}",
                cut(blocks, size),
            )
        if not stated:  # an engine states a number that is a whole number of usual blocks
            sizes = [s for s in BLOCK_SIZES if blocks.low * s <= target.value <= blocks.high * s]
            size_tokens = sizes[0] if sizes else BLOCK_SIZES[0]
            yield Derived(
                blocks.value * size_tokens,
                blocks.low * size_tokens,
                blocks.high * size_tokens,
                f"{blocks.text} of {size_tokens} tokens, a size that the log does not state",
                cut(blocks),
            )


def _stated_twice(target: Reading, run: Run) -> Iterator[Derived]:
    """SGLang sums up with the tokens of a pool; of its pools, each may have its own."""
    if target.engine != "sglang":
        return
    sums_up = not any(run.same_statement(name, target) for name in ("k_size", "kv_size"))
    for other in run.nearest("tokens", target):
        if sums_up or other.value == target.value:
            yield Derived(other.value, other.low, other.high, "stated twice", cut(other))


def _concurrency(target: Reading, run: Run) -> Iterator[Derived]:
    """Concurrency is tokens over the longest request; V1 counts that request in whole blocks."""
    if not proportional(run):
        return
    stated = run.setting("block_size")
    size = stated.value if stated and not stated.may_be_cut else BLOCK_SIZES[0]
    for source in (*run.nearest("tokens", target), *run.nearest("gpu_blocks", target)):
        if source.place > target.place:
            continue  # of another start: an engine prints what it has first
        slots = size if source.quantity == "gpu_blocks" else 1
        for length in run.nearest("max_model_len", target):
            if length.low <= 0:
                continue
            whole = -(-length.high // size) * size
            # newer vLLM prints int(concurrency x length) as tokens
            high = (source.high * slots + 1) / length.low
            groups = target.low > high and slots == 1 and not source.value % size
            yield Derived(
                source.value * slots / length.value,
                source.low * slots / whole,
                high,
                f"{source.value * slots:,} tokens / {length.text} per request",
                cut(source, length),
                _NOT_IN_PROPORTION if run.spec is None and groups else "",
            )


def _estimated_length(target: Reading, run: Run) -> Iterator[Derived]:
    """The longest length is the asked one, shrunk as available is to needed, in whole blocks."""
    if not proportional(run):
        return
    for needed in run.nearest("needed", target):
        for length in run.nearest("max_model_len", target):
            for available in run.nearest("available", target):
                if needed.low <= 0 or available.low < 0:
                    continue
                low = available.low / needed.high * length.low
                high = available.high / needed.low * length.high
                middle = available.value * available.scale / (needed.value * needed.scale)
                for size, guess in block_sizes(run):
                    whole = low // size * size
                    windows = run.spec is None and target.high < whole
                    yield Derived(
                        middle * length.value // size * size,
                        whole,
                        high,
                        f"{length.text} x {available.text} / {needed.text}, in whole blocks",
                        cut(needed, length, available) or guess,
                        _NOT_IN_PROPORTION if windows else "",
                    )


def _needed_from_capacity(target: Reading, run: Run) -> Iterator[Derived]:
    """What one request needs is its share of the cache."""
    if not proportional(run):
        return
    for tokens in run.nearest("tokens", target):
        for length in run.nearest("max_model_len", target):
            for available in run.nearest("available", target):
                # vLLM floors to blocks: up to one block of the memory is in no token
                share = length.value / tokens.value if tokens.value else 0
                if not share or available.low <= 0 or length.value > tokens.value:
                    continue
                spare = available.high / tokens.value * BLOCK_SIZES[0]
                low = (available.low - spare) * length.low / tokens.high
                yield Derived(
                    available.value * available.scale * share,
                    low,
                    available.high * length.high / tokens.low,
                    f"{available.text} x {length.text} / {tokens.text}",
                    cut(tokens, length, available),
                    _NOT_IN_PROPORTION if run.spec is None and target.high < low else "",
                )


def _cpu_blocks_from_gpu(target: Reading, run: Run) -> Iterator[Derived]:
    """The swap space holds as many blocks of the same size as it has room for."""
    if run.spec is not None:
        return  # exact there
    for blocks in run.nearest("gpu_blocks", target):
        for available in run.nearest("available", target):
            if available.low <= 0 or blocks.low <= 0:
                continue
            ends = available.low / (blocks.high + 1), available.high / blocks.low
            for swap, stated, doubt in swap_spaces(target, run, *ends):
                yield Derived(
                    swap * blocks.value // (available.value * available.scale),
                    swap * blocks.low // available.high,
                    swap * (blocks.high + 1) / available.low,
                    f"{stated} / ({available.text} / {blocks.text})",
                    cut(blocks, available) or doubt,
                )


def _usable(target: Reading, run: Run) -> Iterator[Derived]:
    """An engine may use a share of the whole memory."""
    for total in run.nearest("total", target):
        shares = [(r, 1.0) for r in run.nearest("utilization", target)]
        shares += [(r, 0.01) for r in run.nearest("percent", target)]
        for share, factor in shares:
            # as the user gave it, seldom with more digits than are printed
            for lower, upper, note in (
                (share.value, share.value, ""),
                (share.low, share.high, ", if the share is rounded"),
            ):
                yield Derived(
                    total.value * total.scale * share.value * factor,
                    total.low * lower * factor,
                    total.high * upper * factor,
                    f"{total.text} x {share.text}{note}",
                    cut(share),
                )


def _budget(target: Reading, run: Run) -> Iterator[Derived]:
    """What is left for the cache: the usable memory minus everything that is not cache."""
    for terms in (
        ("usable", "weights", "non_torch", "activation"),
        ("usable", "consumed", "activation"),
        ("usable", "weights", "non_torch", "activation", "estimated_graphs"),
        ("usable", "consumed", "activation", "estimated_graphs"),
    ):
        yield from _difference(target, run, terms)
    for usable in _usable(target, run):
        for rest in _sums(target, run, ("peak_torch", "non_torch")):
            yield _minus(usable, rest)


def _suggested(target: Reading, run: Run) -> Iterator[Derived]:
    """The cache that vLLM suggests: as the budget, minus the graphs and a margin of 150 MiB."""
    margin = Derived(VLLM_MARGIN_BYTES, VLLM_MARGIN_BYTES, VLLM_MARGIN_BYTES, "150 MiB margin")
    for terms in (
        ("usable", "weights", "activation", "non_torch", "graphs"),
        ("usable", "weights", "activation", "non_torch"),
        ("usable", "consumed", "activation", "graphs"),
        ("usable", "consumed", "activation"),
    ):
        for left in _difference(target, run, terms):
            yield _minus(left, margin)


def _suggested_bytes(target: Reading, run: Run) -> Iterator[Derived]:
    """The suggestion is printed twice: in GiB and in bytes."""
    for other in run.same_statement("suggested", target):
        yield Derived(
            other.value * other.scale, other.low, other.high, f"{other.text} on the same line"
        )


def _difference(target: Reading, run: Run, terms: tuple[str, ...]) -> Iterator[Derived]:
    for rest in _sums(target, run, terms[1:]):
        for first in run.nearest(terms[0], target):
            yield _minus(_as_derived(first), rest)


def _sums(target: Reading, run: Run, terms: tuple[str, ...]) -> Iterator[Derived]:
    """Yield the sum of the nearest reading of each term, nothing where one is missing."""
    nearest = [run.nearest(term, target)[:1] for term in terms]
    if all(nearest):
        parts = [found[0] for found in nearest]
        yield Derived(
            sum(r.value * r.scale for r in parts),
            sum(r.low for r in parts),
            sum(r.high for r in parts),
            " - ".join(map(_named, parts)),
        )


def _as_derived(reading: Reading) -> Derived:
    return Derived(
        reading.value * reading.scale,
        reading.low,
        reading.high,
        _named(reading),
        cut(reading),
    )


def _named(reading: Reading) -> str:
    return f"{reading.text} {reading.quantity.replace('_', ' ')}"


def _minus(a: Derived, b: Derived) -> Derived:
    return Derived(
        a.value - b.value, a.low - b.high, a.high - b.low, f"{a.why} - {b.why}", a.doubt or b.doubt
    )


#: The rules of each quantity; a reading is checked by every one that has what it needs.
RULES: dict[str, tuple[Rule, ...]] = {
    "usable": (_usable,),
    "available": (_budget,),
    "suggested": (_suggested,),
    "suggested_bytes": (_suggested_bytes, _suggested),
    "needed": (_needed_from_capacity,),
    "tokens": (_tokens_from_blocks, _stated_twice),
    "cpu_blocks": (_cpu_blocks_from_gpu,),
    "max_concurrency": (_concurrency,),
    "estimated_max_model_len": (_estimated_length,),
}
