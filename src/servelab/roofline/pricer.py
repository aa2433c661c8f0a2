"""The price of many steps of one model on one chip: what `step_cost` says, in microseconds.

Models: the same operators as `servelab.roofline.step`, summed by what they depend on. Matrices,
experts and the cache's append see only the number of new tokens, lm_head only the rows it
multiplies: both are priced once per number and remembered. Attention sees each sequence, but of
sequences with one new token only how many keys each of them reads; recurrent state sees how many
sequences there are. Layers that see the same are counted together.

Assumes: as `step_cost`; time is that of one operator after another (`Bound.serial_seconds`).

Ignores: names of operators: what a step is made of, `step_cost` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from servelab.hardware import Accelerator
from servelab.models import Attention, Indexer, LatentAttention, ModelSpec, RecurrentState
from servelab.roofline.cost import Cost
from servelab.roofline.operators import (
    Step,
    attention_cost,
    causal_pairs,
    checked_step,
    index_cost,
    latent_cost,
    latent_flop,
    matmul,
    recurrence_cost,
    visible_keys,
    visible_pairs,
)
from servelab.roofline.step import step_cost
from servelab.units import check_count, dtype_bits

# Operators of `step_cost` whose cost depends on more than the number of new tokens.
_SEE_SEQUENCES = frozenset({"attention", "index", "recurrence"})


class Price(NamedTuple):
    """What a step, or a part of it, calculates, moves, and takes, one operator after another."""

    flop: int
    read_bytes: int
    written_bytes: int
    seconds: float


class Pricer:
    """Prices steps of ``spec`` on ``chip``.

    Parameters: ``dtype`` of arithmetic, activations and weights; ``kv_dtype`` of the cache and
    ``weight_dtype`` where they differ (None: ``dtype``).
    Raises: ``ValueError`` for an unknown dtype, or where the chip has no peak rate for ``dtype``;
    ``UnsupportedConfig`` where the configuration leaves out what the weights depend on.

    >>> from servelab import hardware, models, roofline
    >>> spec, chip = models.get("qwen3-8b"), hardware.get("h100-sxm-80gb")
    >>> step = [(1, 2048)] * 64 + [(512, 0)]
    >>> price, cost = Pricer(spec, chip).price(step), roofline.step_cost(spec, step)
    >>> (price.flop, price.read_bytes) == (cost.flop, cost.read_bytes), f"{price.seconds * 1e3:.2f}"
    (True, '14.42')
    """

    def __init__(
        self,
        spec: ModelSpec,
        chip: Accelerator,
        dtype: str = "bf16",
        kv_dtype: str | None = None,
        weight_dtype: str | None = None,
    ) -> None:
        spec.require_parameters()
        self.spec, self.chip, self.dtype = spec, chip, dtype
        self.kv_dtype, self.weight_dtype = kv_dtype or dtype, weight_dtype or dtype
        for stored in (self.kv_dtype, self.weight_dtype):
            dtype_bits(stored)  # refuses an unknown one now, not at the first step
        self._flop_per_second = chip.peak(dtype)
        self._bytes_per_second = chip.bandwidth_bytes_per_second
        self._of_tokens: dict[int, Price] = {}
        self._of_logits: dict[int, Price] = {0: Price(0, 0, 0, 0.0)}
        attentions: Counter[Attention | LatentAttention] = Counter()
        self._indexers: Counter[Indexer] = Counter()
        self._states: Counter[RecurrentState] = Counter()
        for layer, count in spec.layer_counts.items():
            if isinstance(layer.attention, Attention | LatentAttention):
                attentions[layer.attention] += count
                if layer.attention.indexer is not None:
                    self._indexers[layer.attention.indexer] += count
            if layer.state is not None:
                self._states[layer.state] += count
        self._attentions = [
            (_Attends(attention, self.kv_dtype, dtype), count)
            for attention, count in attentions.items()
        ]

    def price(self, step: Step, logit_rows: int | None = None) -> Price:
        """Return the price of a step of (new, cached) pairs.

        Parameters: ``logit_rows`` that lm_head multiplies (None: one per sequence).
        Raises: ``TypeError``, ``ValueError`` as ``step_cost``.
        """
        pairs = checked_step(step)
        singles = [cached for new, cached in pairs if new == 1]
        chunks = [pair for pair in pairs if pair[0] != 1]
        rows = len(pairs) if logit_rows is None else check_count("logit_rows", logit_rows, 0)
        return self.price_parts(singles, chunks, rows)

    def price_parts(
        self, singles: Sequence[int], chunks: Sequence[tuple[int, int]], logit_rows: int
    ) -> Price:
        """Return the price of a step in parts, unchecked: what an engine asks at every step.

        Parameters: ``singles`` cached tokens of each sequence with one new token; ``chunks`` the
        other sequences' pairs; ``logit_rows`` that lm_head multiplies.
        """
        tokens = len(singles) + sum([new for new, _ in chunks])
        fixed = self._of_tokens.get(tokens) or self._price_tokens(tokens)
        head = self._of_logits.get(logit_rows) or self._price_logits(logit_rows)
        flop, read = fixed.flop + head.flop, fixed.read_bytes + head.read_bytes
        written, seconds = fixed.written_bytes + head.written_bytes, fixed.seconds + head.seconds
        for one, count in self._seeing(singles, chunks, tokens):
            flop += count * one[0]
            read += count * one[1]
            written += count * one[2]
            seconds += count * self._seconds(*one)
        return Price(flop, read, written, seconds)

    def _seconds(self, flop: int, read: int, written: int) -> float:
        return max(flop / self._flop_per_second, (read + written) / self._bytes_per_second)

    def _price_tokens(self, tokens: int) -> Price:
        """Return the price of all operators that see nothing but the new tokens."""
        dtypes = (self.weight_dtype, self.kv_dtype, self.dtype)
        whole = step_cost(self.spec, [(tokens, 0)], [0], *dtypes)
        kept = Cost.total(part for part in whole.parts if part.name not in _SEE_SEQUENCES)
        seconds = math.fsum(
            part.count * self._seconds(*_sums(part.cost)) for part in kept.operators
        )
        price = Price(*_sums(kept), seconds)
        self._of_tokens[tokens] = price
        return price

    def _price_logits(self, rows: int) -> Price:
        head = self.spec.lm_head
        cost = matmul(rows, head.d_in, head.d_out, self.weight_dtype, self.dtype, head.bias)
        price = Price(*_sums(cost), self._seconds(*_sums(cost)))
        self._of_logits[rows] = price
        return price

    def _seeing(
        self, singles: Sequence[int], chunks: Sequence[tuple[int, int]], tokens: int
    ) -> list[tuple[_Sums, int]]:
        """Return the operators that see the sequences, each with its number of layers."""
        kv, own = self.kv_dtype, self.dtype
        found = [(one.cost(singles, chunks, tokens), count) for one, count in self._attentions]
        for indexer, count in self._indexers.items():
            ends = sum(singles) + len(singles)  # an indexer scores every key
            pairs = ends + sum(causal_pairs(new, cached) for new, cached in chunks)
            keys = ends + sum(new + cached for new, cached in chunks)
            found.append((_sums(index_cost(indexer, tokens, pairs, keys, kv, own)), count))
        for state, count in self._states.items():
            cost = recurrence_cost(state, tokens, len(singles) + len(chunks))
            found.append((_sums(cost), count))
        return found


# FLOP, bytes read, bytes written.
_Sums = tuple[int, int, int]


def _sums(cost: Cost) -> _Sums:
    return cost.flop, cost.read_bytes, cost.written_bytes


class _Attends:
    """One kind of attention, by sums: what its queries move depends on nothing but their number."""

    def __init__(self, spec: Attention | LatentAttention, kv_dtype: str, dtype: str) -> None:
        self.spec, self.kv_dtype, self.dtype = spec, kv_dtype, dtype
        self.sees_all = spec.window is None and spec.top_tokens is None
        self.bits_per_key = spec.kv_width * dtype_bits(kv_dtype)
        self.flop_per_pair = spec.flop_per_pair if isinstance(spec, Attention) else 0
        self.of_queries: dict[int, _Sums] = {}  # by their number

    def cost(self, singles: Sequence[int], chunks: Sequence[tuple[int, int]], tokens: int) -> _Sums:
        """Return what one layer costs."""
        spec = self.spec
        if self.sees_all:
            pairs = keys = sum(singles) + len(singles)  # one pair with each key, its own too
        else:
            pairs = keys = sum(_keys_of_singles(spec, singles))
        for new, cached in chunks:
            pairs += visible_pairs(new, cached, spec)
            keys += visible_keys(new, cached, spec)
        if isinstance(spec, LatentAttention):
            flop = _latent_flop(spec, singles, chunks)
        else:
            flop = self.flop_per_pair * pairs
        _, read, written = self.of_queries.get(tokens) or self._queries(tokens)
        return flop, read - (-keys * self.bits_per_key // 8), written

    def _queries(self, tokens: int) -> _Sums:
        if isinstance(self.spec, LatentAttention):
            cost = latent_cost(self.spec, 0, tokens, 0, self.kv_dtype, self.dtype)
        else:
            cost = attention_cost(self.spec, tokens, 0, 0, self.kv_dtype, self.dtype)
        self.of_queries[tokens] = sums = _sums(cost)
        return sums


def _latent_flop(
    spec: LatentAttention, singles: Sequence[int], chunks: Sequence[tuple[int, int]]
) -> int:
    """Return the FLOP of latent attention, for each sequence the cheaper way."""
    flop = sum(
        latent_flop(spec, new, visible_pairs(new, cached, spec), visible_keys(new, cached, spec))
        for new, cached in chunks
    )
    seen = _keys_of_singles(spec, singles)
    ends = (min(seen), max(seen)) if seen else ()
    absorbed = spec.absorbed_flop_per_pair
    if all(latent_flop(spec, 1, keys, keys) == keys * absorbed for keys in ends):
        # Both ways cost affine amounts in the keys: cheaper at both ends, cheaper between.
        return flop + absorbed * sum(seen)
    return flop + sum(latent_flop(spec, 1, keys, keys) for keys in seen)


def _keys_of_singles(spec: Attention | LatentAttention, singles: Sequence[int]) -> list[int]:
    """Return the keys that the one new token of each sequence sees, itself among them."""
    if spec.window is not None and spec.chunked:
        keys = [cached % spec.window + 1 for cached in singles]
        most = spec.top_tokens
    else:
        keys = [cached + 1 for cached in singles]
        most = min((n for n in (spec.window, spec.top_tokens) if n is not None), default=None)
    return keys if most is None else [n if n < most else most for n in keys]
