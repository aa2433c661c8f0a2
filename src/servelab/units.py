"""Bytes, tokens, FLOP and seconds: reading them, checking them, and turning them into text.

Models: the SI and binary prefixes of the field, the size of each number format, and the
check that a count really is a count. Every other room prints through this one.

Assumes: GB is 10^9 bytes and GiB is 2^30 bytes, always; bandwidth is decimal; token suffixes are
vLLM's (k, m are 10^3, 10^6; K, M are 2^10, 2^20).

Ignores: the scale factors that a quantised format stores beside its elements.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from fractions import Fraction
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

#: Bits of one element of each number format.
DTYPE_BITS = {
    "fp64": 64,
    "fp32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "fp4": 4,
}

_BINARY_UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
_DECIMAL_UNITS = {"B": 1, "kB": KB, "MB": MB, "GB": GB, "TB": TB}
_SI_PREFIXES = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18, "Z": 21}
_TOKEN_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
_TIME_UNITS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}


#: Other spellings of the formats: those of the engines' flags and logs.
DTYPE_SPELLINGS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}

# --- checks -------------------------------------------------------------------------------------


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """Return ``value`` if it is a whole number of things, at least ``minimum``.

    Parameters: ``name`` for the error message; ``value`` to check; ``minimum`` allowed.
    Raises: ``TypeError`` for a bool, a float or a non-number; ``ValueError`` below ``minimum``.

    >>> check_count("tokens", 2048)
    2048
    >>> check_count("tokens", 2.5)
    Traceback (most recent call last):
    ...
    TypeError: tokens must be an int, got 2.5 (float)
    >>> check_count("tokens", 0)
    Traceback (most recent call last):
    ...
    ValueError: tokens must be at least 1, got 0
    """
    if type(value) is int and value >= minimum:  # nearly always: the general test is slow
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)


def check_number(name: str, value: object) -> float:
    """Return ``value``, an int or a float, if it is a finite number.

    Raises: ``TypeError`` for a bool or a non-number; ``ValueError`` for NaN, inf, and a whole
    number that no float comes near.

    >>> check_number("seconds", float("inf"))
    Traceback (most recent call last):
    ...
    ValueError: seconds must be finite, got inf
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        finite = False
    if not finite:
        raise ValueError(f"{name} must be finite, got {value}")
    return int(value) if isinstance(value, Integral) else float(value)


def check_positive(name: str, value: object) -> float:
    """Return ``value`` as a float if it is a finite number greater than zero.

    Raises: ``TypeError`` for a bool or a non-number; ``ValueError`` for zero, negative, NaN, inf.

    >>> check_positive("bandwidth", 3.35e12)
    3350000000000.0
    >>> check_positive("bandwidth", -1.0)
    Traceback (most recent call last):
    ...
    ValueError: bandwidth must be greater than 0, got -1.0
    """
    number = check_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")
    return float(number)


def check_share(name: str, value: object) -> float:
    """Return ``value`` as a float if it is a share of a whole, greater than 0 and at most 1.

    Raises: as ``check_number``; ``ValueError`` outside.

    >>> check_share("efficiency", 1.5)
    Traceback (most recent call last):
    ...
    ValueError: efficiency must be greater than 0 and at most 1, got 1.5
    """
    share = check_number(name, value)
    if not 0 < share <= 1:
        raise ValueError(f"{name} must be greater than 0 and at most 1, got {value}")
    return float(share)


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False: a number or None would be multiplied by, unseen.

    Raises: ``TypeError`` for anything else.

    >>> check_flag("bias", 2)
    Traceback (most recent call last):
    ...
    TypeError: bias must be True or False, got 2 (int)
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def check_fields(instance: object, *names: str, minimum: int = 1) -> None:
    """Check counts among the fields of a frozen dataclass, and store each as a Python int.

    The Python int matters: a NumPy integer is a count too, but one that overflows.
    Raises: as ``check_count``.
    """
    for name in names:
        object.__setattr__(instance, name, check_count(name, getattr(instance, name), minimum))


def dtype_bits(dtype: str) -> int:
    """Return the bits of one element of ``dtype``.

    Raises: ``ValueError`` for a format that is not in ``DTYPE_BITS``.

    >>> dtype_bits("bf16"), dtype_bits("int4")
    (16, 4)
    >>> dtype_bits("float16")
    Traceback (most recent call last):
    ...
    ValueError: unknown dtype 'float16'; known: bf16, fp16, fp32, fp4, fp64, fp8, int4, int8
    """
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(sorted(DTYPE_BITS))}")
    return DTYPE_BITS[dtype]


def size_bytes(elements: int, dtype: str) -> int:
    """Return the bytes of ``elements`` numbers in ``dtype``, rounded up to a whole byte.

    Raises: as ``check_count`` and ``dtype_bits``.

    >>> size_bytes(4096, "bf16"), size_bytes(3, "int4")
    (8192, 2)
    """
    return -(-check_count("elements", elements, minimum=0) * dtype_bits(dtype) // 8)


def near_names(wanted: object, known: Iterable[str]) -> str:
    """Return the known names most like a wanted one, or all if none is, for an error message.

    >>> near_names("h100", ["a100-sxm", "h100-pcie", "h100-sxm"]), near_names("", [])
    ('h100-pcie, h100-sxm', '')
    """
    names, text = list(known), str(wanted).lower()
    near = [n for n in names if text in n] or difflib.get_close_matches(text, names, 4, cutoff=0.3)
    return ", ".join(near or names)


class ReadOnly:
    """A frozen dataclass whose mappings cannot be changed either, and which can still be copied.

    >>> import copy
    >>> from servelab import hardware
    >>> chip = hardware.get("h100-sxm-80gb")
    >>> copy.deepcopy(chip) == chip
    True
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # a mappingproxy does not pickle; what is derived is calculated again
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        plain = {k: dict(v) if isinstance(v, MappingProxyType) else v for k, v in values.items()}
        return _rebuilt, (type(self), plain)


def _rebuilt(kind: type[Any], values: dict[str, Any]) -> Any:
    return kind(**values)


# --- numbers to text ----------------------------------------------------------------------------


def format_count(value: int) -> str:
    """Return a count with thousands separators.

    Raises: as ``check_count``.

    >>> format_count(8190735360)
    '8,190,735,360'
    """
    return f"{check_count('count', value, minimum=0):,}"


def format_bytes(value: float, unit: str | None = None, digits: int = 2) -> str:
    """Return a size with its unit, in the unit asked for or in the largest binary one that fits.

    Parameters: ``value`` in bytes; ``unit`` one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB;
    ``digits`` after the point (none for whole numbers of the unit below 10,000).
    Raises: ``ValueError`` for another unit; as ``check_number``.

    >>> format_bytes(16060522496, "GB"), format_bytes(16060522496, "GiB")
    ('16.06 GB', '14.96 GiB')
    >>> format_bytes(147456), format_bytes(80 * GiB), format_bytes(100)
    ('144 KiB', '80 GiB', '100 B')
    """
    value = check_number("bytes", value)
    if unit is None:  # rounded first, so that a byte less than 1 GiB is not 1,024.00 MiB
        units = list(_BINARY_UNITS)
        fits = (u for u in units[:-1] if round(abs(value) / _BINARY_UNITS[u], digits) < KiB)
        unit = next(fits, units[-1])
    scale = _BINARY_UNITS.get(unit) or _DECIMAL_UNITS.get(unit)
    if scale is None:
        raise ValueError(
            f"unknown unit {unit!r}; known: {', '.join({**_BINARY_UNITS, **_DECIMAL_UNITS})}"
        )
    scaled = value / scale
    whole = scaled == int(scaled) and abs(scaled) < 10_000
    return f"{scaled:,.0f} {unit}" if whole else f"{scaled:,.{digits}f} {unit}"


def _format_si(value: float, unit: str, digits: int = 3) -> str:
    """Return ``value`` with ``digits`` significant digits and an SI prefix."""
    value = check_number(unit, value)
    if value == 0:
        return f"0 {unit}"
    rounded = float(f"{value:.{digits - 1}e}")  # so that 999.96 becomes 1 k, not 1000
    prefix = max(
        (p for p, e in _SI_PREFIXES.items() if abs(rounded) >= 10**e),
        key=_SI_PREFIXES.__getitem__,
        default="",
    )
    scaled = rounded / 10 ** _SI_PREFIXES[prefix]
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(scaled))))
    return f"{scaled:.{decimals}f} {prefix}{unit}"


def format_flop(value: float) -> str:
    """Return an amount of work, in FLOP with an SI prefix.

    Raises: as ``check_number``.

    >>> format_flop(15009316864)
    '15.0 GFLOP'
    """
    return _format_si(value, "FLOP")


def format_flop_rate(value: float) -> str:
    """Return a compute rate, in FLOP/s with an SI prefix.

    Raises: as ``check_number``.

    >>> format_flop_rate(989e12)
    '989 TFLOP/s'
    """
    return _format_si(value, "FLOP/s")


def format_bandwidth(value: float) -> str:
    """Return a memory rate, in decimal bytes per second.

    Raises: as ``check_number``.

    >>> format_bandwidth(3.35e12)
    '3.35 TB/s'
    """
    return _format_si(value, "B/s")


def format_seconds(value: float, digits: int = 3) -> str:
    """Return a time with ``digits`` significant digits, in s, ms, µs or ns.

    Raises: as ``check_number``.

    >>> format_seconds(0.00448), format_seconds(90.4), format_seconds(0.0)
    ('4.48 ms', '90.4 s', '0 s')
    """
    value = check_number("seconds", value)
    if value == 0:
        return "0 s"
    rounded = float(f"{value:.{digits - 1}e}")
    unit = next((u for u in ("s", "ms", "µs") if abs(rounded) >= float(_TIME_UNITS[u])), "ns")
    scaled = rounded / float(_TIME_UNITS[unit])
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(scaled))))
    return f"{scaled:,.{decimals}f} {unit}"


def format_tokens(value: int) -> str:
    """Return a number of tokens, with K (2^10) only where it is exact.

    Raises: as ``check_count``.

    >>> format_tokens(32768), format_tokens(1024), format_tokens(5600), format_tokens(1000)
    ('32K', '1K', '5,600', '1,000')
    """
    value = check_count("tokens", value, minimum=0)
    return f"{value // KiB:,}K" if value and value % KiB == 0 else f"{value:,}"


def table(rows: list[list[object]], header: list[str]) -> str:
    """Return rows as a plain-text table: text flush left, numbers flush right.

    Parameters: ``rows`` of cells (an int gets thousands separators, other cells ``str``; an empty
    cell says nothing about its column); ``header`` one title per column.
    Raises: ``ValueError`` where a row's length differs from the header's.

    >>> print(table([["llama-3-8b", 131072], ["qwen3-8b", 147456]], ["model", "B/token"]))
    model       B/token
    ----------  -------
    llama-3-8b  131,072
    qwen3-8b    147,456
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"row {row!r} has {len(row)} cells, the header has {len(header)}")
    texts = [
        [f"{c:,}" if isinstance(c, int) and not isinstance(c, bool) else str(c) for c in r]
        for r in rows
    ]
    widths = [max(len(line[i]) for line in [header, *texts]) for i in range(len(header))]
    numeric = [all(re.match(r"[-+~≥≤]?[\d.,]|$", r[i]) for r in texts) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = (
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, texts)])


# --- text to numbers ----------------------------------------------------------------------------


_NUMBER = re.compile(
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)"
    r"\s*(?P<unit>[A-Za-zµ]*)"
)


def _parse(text: str, factors: Mapping[str, int | Fraction], what: str, example: str) -> Fraction:
    """Return what ``text`` says, exactly: 1.001 kB is 1001 bytes, which floats would miss."""
    if not isinstance(text, str):
        raise TypeError(f"{what} is read from a str, got {text!r} ({type(text).__name__})")
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match["unit"] not in factors:
        raise ValueError(f"cannot read {text!r} as {what}; write it like {example}")
    return Fraction(re.sub("[,_]", "", match["number"])) * factors[match["unit"]]


def _whole(value: Fraction, text: str, what: str) -> int:
    if value.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of {what}")
    return value.numerator


def parse_bytes(text: str) -> int:
    """Return the bytes that a size with its unit names; the unit may not be left out.

    Raises: ``TypeError`` for anything but a str; ``ValueError`` where number or unit cannot be
    read, or the result is not whole.

    >>> parse_bytes("16 GiB"), parse_bytes("80GB")
    (17179869184, 80000000000)
    """
    return _whole(
        _parse(text, {**_BINARY_UNITS, **_DECIMAL_UNITS}, "a size", "16 GiB or 80 GB"),
        text,
        "bytes",
    )


def parse_tokens(text: str) -> int:
    """Return the tokens that a count with vLLM's suffixes names.

    Raises: ``TypeError`` for anything but a str; ``ValueError`` where it cannot be read or is not
    whole.

    >>> parse_tokens("32K"), parse_tokens("32k"), parse_tokens("1.5K"), parse_tokens("8,192")
    (32768, 32000, 1536, 8192)
    """
    return _whole(
        _parse(text, _TOKEN_SUFFIXES, "a number of tokens", "8192, 32K or 100k"),
        text,
        "tokens",
    )


def parse_seconds(text: str) -> float:
    """Return the seconds that a time with its unit names; the unit may not be left out.

    Raises: ``TypeError`` for anything but a str; ``ValueError`` where it cannot be read.

    >>> parse_seconds("50ms"), parse_seconds("2 s")
    (0.05, 2.0)
    """
    return float(_parse(text, _TIME_UNITS, "a time", "50ms or 2s"))
