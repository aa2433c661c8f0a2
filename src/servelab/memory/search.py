"""The inverses of capacity: the longest context, found by search on the exact function.

Models: the largest length for which a count of bytes or blocks still fits. Windows, state, padding
and groups make that count anything but a straight line, so no slope is used.

Assumes: a longer sequence never needs less.

Ignores: the model's own longest legal context, unless it is given as ``limit_tokens``.
"""

from collections.abc import Callable
from typing import Any

from servelab.memory.capacity import sequence_bytes
from servelab.memory.engines import capacity
from servelab.models import ModelSpec, View
from servelab.models.parallel import rank
from servelab.units import check_count

#: Nothing that fits at this length is limited by memory.
_ENDLESS_TOKENS = 2**60


def largest(fits: Callable[[int], bool], limit: int | None = None) -> int | None:
    """Return the largest count from 0 for which ``fits`` holds, None if it holds for all.

    Parameters: ``fits`` true up to some count and false from there on; ``limit`` the largest count
    to be considered.

    >>> largest(lambda n: n * n < 50), largest(lambda n: n * n < 50, limit=3)
    (7, 3)
    """
    ceiling = _ENDLESS_TOKENS if limit is None else limit
    if fits(ceiling):
        return limit
    low, high = 0, 1
    while high < ceiling and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def max_context(
    spec: ModelSpec,
    available_bytes: int,
    sequences: int = 1,
    kv_dtype: str = "bf16",
    view: View = "logical",
    tp: int = 1,
) -> int | None:
    """Return the longest context that ``sequences`` sequences can all have, to the byte.

    Parameters: as ``max_sequences``. None where memory sets no limit, because every layer's window
    is full and the cache no longer grows.
    Raises: ``TypeError``, ``ValueError`` for bad counts, format or view.

    >>> from servelab import models
    >>> max_context(models.get("llama-3-8b"), 16 * 2**30, sequences=8)
    16384
    >>> max_context(models.get("mistral-7b"), 2**30, sequences=2) is None
    True
    """
    available_bytes = check_count("available_bytes", available_bytes, minimum=0)
    share = available_bytes // check_count("sequences", sequences)
    part = rank(spec, tp)
    return largest(lambda tokens: sequence_bytes(part, tokens, kv_dtype, view) <= share)


def max_engine_context(
    spec: ModelSpec,
    available_bytes: int | tuple[int, ...],
    sequences: int = 1,
    limit_tokens: int | None = None,
    **settings: Any,
) -> int | None:
    """Return the longest ``max_model_len`` for which an engine still fits ``sequences`` sequences.

    With one sequence this is the length that vLLM suggests where it refuses a longer one.

    Parameters: ``limit_tokens`` the longest length considered (None: no limit but memory's);
    ``settings`` as in ``capacity``: engine, block_size, kv_dtype, tp, ...
    Raises: as ``capacity``.

    >>> from servelab import models
    >>> max_engine_context(models.get("llama-3-8b"), 2**30, engine="vllm")
    8176
    """
    sequences = check_count("sequences", sequences)

    def fits(tokens: int) -> bool:
        length = max(tokens, 1)
        return capacity(spec, available_bytes, length, **settings).sequences >= sequences

    return largest(fits, limit_tokens)


def suggested_context(
    spec: ModelSpec,
    available_bytes: int,
    limit_tokens: int,
    null_blocks: int = 0,
    **settings: Any,
) -> int:
    """Return the length that vLLM suggests where it refuses a longer one; 0 if none fits.

    The refusal compares bytes: what one sequence takes against what is available. Older versions
    do so without the null block, 0.32 takes one off first.

    Parameters: ``limit_tokens`` the length that was refused; ``null_blocks`` taken off;
    ``settings`` as in ``capacity``, but the engine.
    Raises: as ``capacity``.
    Source: vLLM ``v1/core/kv_cache_utils.py`` at 001cabc1, ``estimate_max_model_len``.

    >>> from servelab import models
    >>> suggested_context(models.get("llama-3-8b"), 2**30, limit_tokens=131072)
    8192
    """

    def fits(tokens: int) -> bool:
        told = capacity(spec, available_bytes, max(tokens, 1), engine="vllm", **settings)
        return told.needed_bytes + null_blocks * told.bytes_per_block <= available_bytes

    return largest(fits, check_count("limit_tokens", limit_tokens)) or 0
