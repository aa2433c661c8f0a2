"""How each number of a start-up log follows from the other numbers in it.

Models: the engines' arithmetic, on intervals: a size printed with two decimals is any size that
rounds to it, so what follows from it is a range.

Assumes: of several numbers that one may follow from (workers, repeated starts) any will do, the
nearest first. What the log does not state is the engine's default.

Ignores: the model (`servelab.logs.model_rules`).
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from servelab.logs.quantities import Reading
from servelab.memory import VLLM_MARGIN_BYTES
from servelab.models import ModelSpec
from servelab.units import GiB

#: Sizes of blocks that engines use; vLLM's default on a GPU is the first.
BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 1)
#: vLLM V0's ``swap_space`` where none is given.
SWAP_SPACE_GIB = 4
#: A reading has at most this many others of one quantity, on each side, to follow from.
_NEAREST = 12


@dataclass(frozen=True)
class Derived:
    """A number as it follows from others.

    Fields: ``value`` and the interval ``low`` to ``high``, in bytes for a size; ``why`` the
    arithmetic; ``doubt`` why agreement would prove nothing ("" where it would).
    """

    value: float
    low: float
    high: float
    why: str
    doubt: str = ""


class Run:
    """The readings of one start of an engine.

    Parameters: ``spec`` the model, if it is known; ``ranks_seen`` how many tensor-parallel ranks
    the log's prefixes name; ``readings`` in order, the settings in force among them.
    """

    def __init__(
        self, readings: Iterable[Reading], spec: ModelSpec | None = None, ranks_seen: int = 1
    ) -> None:
        self.spec = spec
        self.ranks_seen = ranks_seen
        self._readings: dict[str, list[Reading]] = {}
        for reading in readings:
            self._readings.setdefault(reading.quantity, []).append(reading)

    def nearest(self, quantity: str, to: Reading) -> list[Reading]:
        """Return the readings of a quantity, nearest first, those before ``to`` before the rest.

        One that may have been cut is followed by what it may have been.
        """
        found = self._readings.get(quantity, [])
        place = bisect.bisect_left(found, to.place, key=_place)
        before = reversed(found[max(place - _NEAREST, 0) : place])
        after = found[place : place + _NEAREST]
        different: dict[tuple[float, float], Reading] = {}
        for reading in (*before, *after):
            if reading is not to:
                different.setdefault((reading.low, reading.high), reading)
        return [r for one in different.values() for r in (one, *one.extensions())]

    def same_line(self, quantity: str, to: Reading) -> list[Reading]:
        """Return the readings of a quantity on the line of ``to``."""
        found = self._readings.get(quantity, [])
        place = bisect.bisect_left(found, (to.line_number, -1), key=_place)
        line = itertools.takewhile(lambda r: r.line_number == to.line_number, found[place:])
        return list(line)

    def setting(self, quantity: str) -> Reading | None:
        """Return the last whole reading of a setting, None if there is none."""
        found = self._readings.get(quantity, [])
        return next((r for r in reversed(found) if not r.may_be_cut), None)


def _place(reading: Reading) -> tuple[int, int]:
    return reading.place


def uniform(spec: ModelSpec) -> bool:
    """Return whether every layer with a cache keeps every token, and none a state.

    >>> from servelab import models
    >>> [uniform(models.get(name)) for name in ("qwen3-8b", "mistral-7b")]
    [True, False]
    """
    return not spec.state_bytes_per_sequence and all(
        layer.attention is None or layer.attention.window is None for layer in spec.layer_counts
    )


Rule = Callable[[Reading, Run], Iterator[Derived]]


def cut(*readings: Reading) -> str:
    """Return the doubt that comes with readings that may have been cut."""
    return "; ".join(
        f"line {r.line_number} ends in {r.text}, which may have been cut"
        for r in readings
        if r.extended
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


def _same_tokens(target: Reading, run: Run) -> Iterator[Derived]:
    """SGLang and TensorRT-LLM state the tokens twice."""
    if target.engine == "vllm":
        return  # several workers, each with its own
    for other in run.nearest("tokens", target):
        yield Derived(
            other.value, other.low, other.high, f"the same as line {other.line_number}", cut(other)
        )


def _concurrency(target: Reading, run: Run) -> Iterator[Derived]:
    """Concurrency is tokens over the longest request; V1 counts that request in whole blocks."""
    if run.spec is not None and not uniform(run.spec):
        return  # windows and states are counted by group: the model's own rule has it
    block = run.setting("block_size")
    size = block.value if block else BLOCK_SIZES[0]
    pools = [(r, r.low, r.high) for r in run.nearest("tokens", target)]
    pools += [(r, r.low * size, r.high * size) for r in run.nearest("gpu_blocks", target)]
    for source, low, high in pools:
        for length in run.nearest("max_model_len", target):
            if length.low <= 0:
                continue
            whole = -(-length.high // size) * size
            what = f"{low:,.0f} tokens" if source.quantity == "gpu_blocks" else source.text
            yield Derived(
                low / length.value,
                low / whole,
                (high + 1) / length.low,  # newer vLLM prints int(concurrency x length) as tokens
                f"{what} / {length.text} per request",
                cut(source, length),
            )


def _estimated_length(target: Reading, run: Run) -> Iterator[Derived]:
    """The longest length is the asked one, shrunk as available is to needed, in whole blocks."""
    for needed in run.nearest("needed", target):
        for length in run.nearest("max_model_len", target):
            for available in run.nearest("available", target):
                if needed.low <= 0 or available.low < 0:
                    continue
                low = available.low / needed.high * length.low
                high = available.high / needed.low * length.high
                middle = available.value * available.scale / (needed.value * needed.scale)
                size = BLOCK_SIZES[0]
                yield Derived(
                    middle * length.value // size * size,
                    low // size * size,
                    high,
                    f"{length.text} x {available.text} / {needed.text}, in whole blocks",
                    cut(needed, length, available),
                )


def _needed_from_capacity(target: Reading, run: Run) -> Iterator[Derived]:
    """What one request needs is its share of the cache."""
    for tokens in run.nearest("tokens", target):
        for length in run.nearest("max_model_len", target):
            for available in run.nearest("available", target):
                # vLLM floors to blocks: up to one block of the memory is in no token
                share = length.value / tokens.value if tokens.value else 0
                if not share or available.low <= 0 or length.value > tokens.value:
                    continue
                spare = available.high / tokens.value * BLOCK_SIZES[0]
                yield Derived(
                    available.value * available.scale * share,
                    (available.low - spare) * length.low / tokens.high,
                    available.high * length.high / tokens.low,
                    f"{available.text} x {length.text} / {tokens.text}",
                    cut(tokens, length, available),
                )


def _cpu_blocks_from_gpu(target: Reading, run: Run) -> Iterator[Derived]:
    """The swap space holds as many blocks of the same size as it has room for."""
    if run.spec is not None:
        return  # exact there
    for blocks in run.nearest("gpu_blocks", target):
        for available in run.nearest("available", target):
            if available.low <= 0 or blocks.low <= 0:
                continue
            swap, stated = swap_bytes(run)
            yield Derived(
                swap * blocks.value // (available.value * available.scale),
                swap * blocks.low // available.high,
                swap * (blocks.high + 1) / available.low,
                f"{stated} / ({available.text} / {blocks.text})",
                cut(blocks, available),
            )


def swap_bytes(run: Run) -> tuple[float, str]:
    stated = run.setting("swap_space")
    if stated is None:
        return SWAP_SPACE_GIB * GiB, f"a swap space of {SWAP_SPACE_GIB} GiB, the default,"
    return stated.value * GiB, f"a swap space of {stated.text}"


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
    for other in run.nearest("suggested", target):
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


def _keys_and_values(target: Reading, run: Run) -> Iterator[Derived]:
    """The cache is its keys and its values."""
    for keys in run.same_line("k_size", target):
        for values in run.same_line("v_size", target):
            yield Derived(
                keys.value * keys.scale + values.value * values.scale,
                keys.low + values.low,
                keys.high + values.high,
                f"K {keys.text} + V {values.text}",
            )


#: The rules of each quantity; a reading is checked by every one that has what it needs.
RULES: dict[str, tuple[Rule, ...]] = {
    "usable": (_usable,),
    "available": (_budget,),
    "suggested": (_suggested,),
    "suggested_bytes": (_suggested_bytes,),
    "needed": (_needed_from_capacity,),
    "tokens": (_tokens_from_blocks, _same_tokens),
    "cpu_blocks": (_cpu_blocks_from_gpu,),
    "max_concurrency": (_concurrency,),
    "estimated_max_model_len": (_estimated_length,),
    "kv_size": (_keys_and_values,),
}
