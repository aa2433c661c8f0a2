"""What a request asks of the sampler, and the random numbers it is given.

Models: temperature, top-k and top-p in that order, as in vLLM; one uniform number per sample, which
depends on the request's seed, the child and the position of the token, and on nothing else. So a
request's tokens do not depend on its neighbours, on its place in the batch or on pre-emption.

Assumes: a runner inverts the distribution with that number (`servelab.decoder.sampler`).

Ignores: penalties, minimum probability, grammars, stop strings.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from servelab.units import check_count, check_flag, check_number, check_share


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the tokens of a request, and when to stop; names and defaults as in vLLM.

    Parameters: ``n`` sequences of one prompt; ``temperature`` (0: the most likely token, always);
    ``top_k`` most likely tokens to draw from (0: all); ``top_p`` least probability that the
    tokens drawn from have together; ``seed`` (None: the engine chooses one per request);
    ``max_tokens`` to generate (None: as many as model and cache allow); ``stop_token_ids`` that end
    a sequence besides the model's own, and are kept; ``ignore_eos`` do not end at the model's own;
    ``logprobs`` most likely tokens to report per position beside the one drawn (None: none).
    Raises: ``TypeError``, ``ValueError`` for values out of range; ``ValueError`` for ``n`` > 1 with
    temperature 0, which would give n times the same.

    >>> SamplingParams(temperature=0, max_tokens=5).greedy
    True
    >>> SamplingParams(top_p=0)
    Traceback (most recent call last):
    ...
    ValueError: top_p must be greater than 0 and at most 1, got 0
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # Stored as plain numbers that fit where they go: a runner packs those of all its rows into
        # arrays, and what one request brings must not fail its neighbours.
        for name, minimum in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, check_int64(name, value, minimum))
        object.__setattr__(self, "top_p", check_share("top_p", self.top_p))
        temperature = float(check_number("temperature", self.temperature))
        object.__setattr__(self, "temperature", temperature)
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        stops = tuple(check_count("stop_token_ids", token, 0) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stops)
        check_flag("ignore_eos", self.ignore_eos)
        if self.n > 1 and self.greedy:
            raise ValueError(f"n must be 1 at temperature 0, got {self.n}: all would be equal")

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is always taken."""
        return self.temperature == 0


# The least that is allowed of each whole number, and those that may be None.
_LEAST = {"n": 1, "top_k": 0, "seed": -(2**63), "max_tokens": 1, "logprobs": 0}
_OPTIONAL = ("seed", "max_tokens", "logprobs")


def check_int64(name: str, value: int, minimum: int = -(2**63)) -> int:
    """Return ``value`` if it is a whole number of 64 bits, with a sign, and at least ``minimum``.

    Raises: ``TypeError``, ``ValueError``.

    >>> check_int64("seed", 2**63)
    Traceback (most recent call last):
    ...
    ValueError: seed must fit into 64 bits, got 9223372036854775808
    """
    value = check_count(name, value, minimum)
    if value >= 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {value}")
    return value


def uniform(seed: int, child: int, position: int) -> float:
    """Return the number in [0, 1) that draws the token at ``position`` of a child of a request.

    Parameters: ``seed`` of the request, 64 bits; ``child`` 0 to n - 1; ``position`` in the
    sequence, that of the first prompt token being 0.
    Returns: 53 random bits as a fraction: every double in reach is equally likely.

    >>> uniform(1, 0, 7) == uniform(1, 0, 7), uniform(1, 0, 7) == uniform(1, 1, 7)
    (True, False)
    >>> sum(uniform(3, 0, place) for place in range(1000)) // 10
    49.0
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, child, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def request_seed(engine_seed: int, arrival: int) -> int:
    """Return the seed of a request that brings none: another for each, the same in each run.

    >>> request_seed(0, 1) == request_seed(0, 1), request_seed(0, 1) == request_seed(0, 2)
    (True, False)
    """
    packed = b"seed" + struct.pack("<qq", engine_seed, arrival)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little", signed=True)
