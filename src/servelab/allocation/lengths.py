"""How long requests are: prompt and output lengths, drawn at random and the same everywhere.

Models: independent prompt and output lengths. ShareGPT by 25 quantiles of its lengths in OPT's
tokens, with straight lines between them, closer together in the tail, where a line from 95 % to the
maximum would lengthen the mean output by a tenth; short instructions by two lognormals with
Alpaca's mean lengths. Pairs that do not fit into the context are drawn again, as the vLLM paper's
artifact drops them.

Assumes: prompt and output lengths are independent (their rank correlation in ShareGPT is 0.21).

Ignores: arrival times, and the text.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from itertools import accumulate, pairwise
from math import exp, log
from operator import mul
from statistics import NormalDist
from typing import Protocol

from servelab.units import check_count, check_positive

#: Mean tokens of a running ShareGPT sequence by the 79,725 pairs themselves: the sum of
#: M N + M (M - 1) / 2 over that of M, prompts N, outputs M. Drawn apart they give 427.
#: Source: as `sharegpt`; the pairs are not shipped (see the data's README).
SHAREGPT_PAIRS_LIVE_TOKENS = 459.1


class Lengths(Protocol):
    """A distribution of lengths: a share of all lengths is ``below`` the length ``at`` that share.

    ``at`` and ``below`` are each other's inverse.
    """

    def at(self, share: float) -> float: ...
    def below(self, length: float) -> float: ...


@dataclass(frozen=True)
class Quantiles:
    """Lengths by some of their quantiles, with straight lines between.

    Parameters: ``shares`` from 0 to 1; ``values``: the length, in tokens, that each share of all
    lengths is below.
    Raises: ``ValueError`` where both do not increase, the shares from 0 to 1.

    >>> Quantiles(shares=(0, 0.5, 1), values=(1, 11, 101)).at(0.75)
    56.0
    """

    shares: tuple[float, ...]
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.values) or (self.shares[0], self.shares[-1]) != (0, 1):
            raise ValueError(f"quantiles are one value per share from 0 to 1, got {self.shares}")
        for steps in (self.shares, self.values):
            if any(low >= high for low, high in pairwise(steps)):
                raise ValueError(f"shares and values increase, got {steps}")

    def at(self, share: float) -> float:
        """Return the length that ``share`` of all lengths is below, 0 to 1."""
        return _line(share, self.shares, self.values)

    def below(self, length: float) -> float:
        """Return the share of lengths below ``length``: the inverse of ``at``."""
        return _line(min(max(length, self.values[0]), self.values[-1]), self.values, self.shares)


def _line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return y at x on the straight lines through the points."""
    i = min(bisect_right(xs, x), len(xs) - 1) - 1
    return ys[i] + (x - xs[i]) / (xs[i + 1] - xs[i]) * (ys[i + 1] - ys[i])


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal.

    Parameters: ``mean`` in tokens, before rounding to whole ones; ``sigma`` of the logarithm.

    >>> round(LogNormal(mean=60, sigma=1).at(0.5), 1)
    36.4
    """

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)
        check_positive("sigma", self.sigma)

    def at(self, share: float) -> float:
        """Return the length that ``share`` of all lengths is below, above 0 and below 1."""
        return exp(self._logarithm.inv_cdf(share))

    def below(self, length: float) -> float:
        """Return the share of lengths below ``length``, above 0."""
        return self._logarithm.cdf(log(length))

    @cached_property
    def _logarithm(self) -> NormalDist:
        return NormalDist(log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True)
class Workload:
    """Requests as pairs of prompt and output tokens.

    Parameters: ``name``; ``prompt`` and ``output`` lengths; ``max_tokens``: prompt and output
    together stay below it.

    >>> from itertools import islice
    >>> list(islice(sharegpt().requests(seed=0), 3))
    [(311, 469), (26, 133), (37, 219)]
    """

    name: str
    prompt: Lengths
    output: Lengths
    max_tokens: int

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens, minimum=3)

    def requests(self, seed: int) -> Iterator[tuple[int, int]]:
        """Yield pairs without end, the same ones for the same seed."""
        draw = random.Random(seed).random
        while True:
            # NormalDist refuses a share of 0, which random() may return.
            prompt = max(1, round(self.prompt.at(draw() or 0.5)))
            output = max(1, round(self.output.at(draw() or 0.5)))
            if prompt + output < self.max_tokens:
                yield prompt, output


@cache
def sharegpt() -> Workload:
    """Return ShareGPT as the vLLM paper used it, by its quantiles.

    Source: 79,725 pairs of sosp-ae-39/sosp-ae-astra, datasets (see the data's README).
    """
    path = resources.files("servelab") / "data/traces/sharegpt_quantiles.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    shares = tuple(percent / 100 for percent in record["shares_percent"])
    prompt, output = (
        Quantiles(shares, tuple(record[key])) for key in ("prompt_tokens", "output_tokens")
    )
    return Workload("ShareGPT", prompt, output, record["below_tokens"])


@cache
def short_instructions() -> Workload:
    """Return short instructions and answers: a fit to two means, not a data set.

    Alpaca's lengths are at hand only as ratios: ShareGPT's mean prompt is 8.4 times, its mean
    output 5.8 times as long (Kwon et al. 2023, section 6.1). The sigmas are chosen here, so that
    the savings of parallel sampling come near the paper's; they are no fact about Alpaca.
    """
    return Workload("short", LogNormal(161.31 / 8.4, 0.35), LogNormal(337.99 / 5.8, 1.0), 2048)


def live_lengths(workload: Workload) -> list[float]:
    """Return how often a sequence that runs has each length, exactly; entry i is length i.

    A sequence has one length per step, from its prompt's to one less than its last. If every
    request is served, the share of steps at length i is that of all (request, step) pairs at i,
    whatever the order of service. The weights add up to 1.

    >>> weights = live_lengths(sharegpt())
    >>> round(sum(length * weight for length, weight in enumerate(weights)), 1)
    431.5
    """
    most = workload.max_tokens
    prompts, outputs = (_probabilities(side, most) for side in (workload.prompt, workload.output))
    shorter = list(accumulate(outputs, initial=0.0))  # entry i: outputs of less than i tokens
    # Entry i: pairs that are drawn at all and whose prompt has at most i tokens.
    begun = list(accumulate(share * shorter[most - i] for i, share in enumerate(prompts)))
    # Less those that end before: with a prompt of n tokens, an output of less than i - n + 1.
    weights = [begun[i] - sum(map(mul, prompts, shorter[i + 1 : 0 : -1])) for i in range(most)]
    total = sum(weights)
    return [weight / total for weight in weights]


def _probabilities(lengths: Lengths, stop: int) -> list[float]:
    """Return the probability of each length below ``stop``, rounded as ``Workload`` rounds it."""
    below = [0.0, 0.0, *(lengths.below(length + 0.5) for length in range(1, stop))]
    return [high - low for low, high in pairwise(below)]


def fill(weights: Sequence[float], block_size: int) -> float:
    """Return the share of slots in allocated blocks that hold a token, for lengths so distributed.

    Parameters: ``weights`` of lengths 0, 1, 2, ..., as from ``live_lengths``.

    >>> fill([0, 1, 1, 1, 1], block_size=4)
    0.625
    """
    held = sum(length * w for length, w in enumerate(weights))
    slots = sum(-(-length // block_size) * block_size * w for length, w in enumerate(weights))
    return held / slots
