"""Values of all kinds, compared and shown: whatever a function of a student may return.

Models: two values are the same if a reader would say so: a list and a tuple of the same numbers, a
tensor and an array of the same shape, 2 and 2.0, nan and nan; numbers up to a tolerance, whole
ones exactly.

Assumes: a tensor or an array is what has a ``tolist``.

Ignores: dtypes and devices.
"""

import math
import reprlib
from collections.abc import Iterator, Mapping, Set
from numbers import Integral, Real

_MOST_NUMBERS = 8  # of a tensor that is written out
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxset = 4, 24, 16, 16
_SHORT.maxstring, _SHORT.maxother = 160, 160


def same(value: object, right: object, tolerance: float = 1e-9) -> bool:
    """Return whether ``value`` is ``right``, numbers relative to the larger of theirs and 1.

    >>> same((1, [2.0]), [1, (2,)]), same(1, 2), same("1", 1), same(math.nan, math.nan)
    (True, False, False, True)
    """
    value, right = _plain(value), _plain(right)
    if type(value) is list and type(right) is list and value == right:  # fast, for large tensors
        return True
    if isinstance(value, Real) and isinstance(right, Real):
        if isinstance(value, Integral) and isinstance(right, Integral):
            return int(value) == int(right)
        if math.isnan(value) or math.isnan(right):
            return math.isnan(value) and math.isnan(right)
        return math.isclose(value, right, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(right, list):
        return (
            isinstance(value, list)
            and len(value) == len(right)
            and all(same(*pair, tolerance) for pair in zip(value, right, strict=True))
        )
    if isinstance(right, Mapping):
        return (
            isinstance(value, Mapping)
            and value.keys() == right.keys()
            and all(same(value[key], right[key], tolerance) for key in right)
        )
    return value is right or (type(value) is type(right) and bool(value == right))


def shown(value: object) -> str:
    """Return a value as short text, whatever it is.

    >>> shown(list(range(99)))
    '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, ...]'
    """
    try:
        shape = shape_of(value)
        if math.prod(shape) > _MOST_NUMBERS:
            return f"{type(value).__name__} of shape {shape}"
        plain = _rounded(_plain(value))
        text = " ".join(_SHORT.repr(plain).split())
    except Exception as error:  # a repr of the student's own
        return f"something whose repr raises {type(error).__name__}"
    return f"{text} of shape {shape}" if shape else text


def largest_difference(value: object, right: object) -> float:
    """Return the largest difference between two tensors of one shape.

    >>> largest_difference([[1.0, 2.0]], [[1.0, 2.5]])
    0.5
    """
    pairs = zip(_numbers(_plain(value)), _numbers(_plain(right)), strict=True)
    return max((abs(one - other) for one, other in pairs), default=0.0)


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, Real):
        yield float(value)


def size(value: object) -> int:
    """Return about how much there is to read in a value, without writing it out.

    >>> size(3) < size([3, 3]) < size({"a": [3, 3]}) < size("a long text of letters")
    True
    """
    if shape := shape_of(value):
        return 8 * math.prod(shape)
    if isinstance(value, Mapping):
        return 1 + sum(size(key) + size(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(size, value))
    return len(repr(value)) if isinstance(value, (str, Real)) else 1


def shape_of(value: object) -> tuple[int, ...]:
    """Return the shape of a tensor or an array; nothing for what has none, or no dimension.

    >>> shape_of([1, 2])
    ()
    """
    return tuple(getattr(value, "shape", ())) if callable(getattr(value, "tolist", None)) else ()


def _plain(value: object) -> object:
    """Return tensors, tuples and ranges as lists, sets as they are."""
    to_list = getattr(value, "tolist", None)
    if callable(to_list) and not isinstance(value, type):
        return to_list()
    if isinstance(value, (tuple, range)):
        return list(value)
    return set(value) if isinstance(value, Set) else value


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return value
