"""Units: what is parsed is exact, what is printed can be read back, and no 1,000 of a unit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servelab import units
from servelab.units import GB, GiB, KiB, MiB, TiB

BYTE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def number_in(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


# --- text to numbers ----------------------------------------------------------------------------


@given(st.integers(0, 10**30), st.sampled_from(sorted(BYTE_UNITS)), st.sampled_from(["", " "]))
def test_every_whole_size_is_read_to_the_byte(count: int, unit: str, space: str) -> None:
    assert units.parse_bytes(f"{count}{space}{unit}") == count * BYTE_UNITS[unit]
    assert units.parse_bytes(f" {count:,} {unit} ") == count * BYTE_UNITS[unit]
    assert units.parse_bytes(f"{count:_}{unit}") == count * BYTE_UNITS[unit]


@given(st.integers(0, 10**18), st.sampled_from(["kB", "MB", "GB", "TB"]))
def test_every_decimal_fraction_that_is_whole_bytes_is_read_to_the_byte(
    size_bytes: int, unit: str
) -> None:
    zeros = len(str(BYTE_UNITS[unit])) - 1
    whole, rest = divmod(size_bytes, BYTE_UNITS[unit])
    assert units.parse_bytes(f"{whole}.{rest:0{zeros}d} {unit}") == size_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9007199254740993 B", 2**53 + 1),  # a float has no such number
        ("1.001 kB", 1001),  # 1.001 * 1000 is 1000.9999999999999 in floats
        ("1e3 GB", 10**12),
        ("0.5KiB", 512),
        ("0 B", 0),
    ],
)
def test_sizes_are_exact(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


# vLLM: docs/configuration, "--max-model-len": lower case decimal, upper case binary
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("1m", 10**6),
        ("2M", 2**21),
        ("8192", 8192),
        ("8,192", 8192),
        ("1_000", 1000),
        ("1.5K", 1536),
    ],
)
def test_token_suffixes_are_those_of_vllm(text: str, expected: int) -> None:
    assert units.parse_tokens(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "1,5 GB",  # a decimal comma must not become 15 GB
        "1,50,000 B",
        "12,34 B",
        "1__0 B",
        "16",
        "16 gib",
        "16 Gb",
        "GiB",
        "",
        "-1 GiB",
        "+1 GiB",
        "nan GiB",
        "inf GB",
        "1e400 GB",
        "1e1000000000 GB",
        "0x10 B",
        "1. GB",
        ".5 GB",
        "1 GiB 2",
        "٣ GB",
        "1.5 B",
        "1e-3 B",
    ],
)
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["1.0001K", "-5", "5 tokens", "5G", "32kk", "", "1,2"])
def test_what_is_no_token_count_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        units.parse_tokens(text)


@pytest.mark.parametrize("text", ["50", "50 m", "-1 s", "1 S", "fast"])
def test_what_is_no_time_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        units.parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7us", 7e-6), ("7 µs", 7e-6), ("50ms", 0.05), ("3ns", 3e-9), ("1.5 min", 90.0), ("2h", 7200)],
)
def test_times_are_the_nearest_float(text: str, expected: float) -> None:
    assert units.parse_seconds(text) == expected


# --- numbers to text, and back ------------------------------------------------------------------


@given(st.integers(0, 2**60))
def test_a_printed_size_reads_back_within_its_digits(size: int) -> None:
    text = units.format_bytes(size)
    number, unit = text.split()
    half_a_digit = 0.005 * BYTE_UNITS[unit]
    assert abs(number_in(text) * BYTE_UNITS[unit] - size) <= half_a_digit * 1.001
    if unit != "TiB":
        assert number_in(text) < 1024
    if unit != "B":
        assert number_in(text) >= 1
    if re.fullmatch(r"[\d,]+", number):
        assert units.parse_bytes(text) == size


@given(st.integers(0, 9999), st.sampled_from(sorted(BYTE_UNITS)))
def test_a_whole_number_of_a_unit_is_printed_whole(count: int, unit: str) -> None:
    text = units.format_bytes(count * BYTE_UNITS[unit], unit)
    assert text == f"{count:,} {unit}"
    assert units.parse_bytes(text) == count * BYTE_UNITS[unit]


@pytest.mark.parametrize("unit_bytes", [KiB, MiB, GiB, TiB])
def test_the_largest_size_below_a_unit_is_not_1024_of_the_one_below(unit_bytes: int) -> None:
    below = units.format_bytes(unit_bytes - 1)
    assert "1,024" not in below
    assert units.format_bytes(unit_bytes) == f"1 {below.split()[1]}" or below == "1,023 B"


def test_a_size_keeps_its_unit_until_its_digits_round_up() -> None:
    assert units.format_bytes(1023.5 * KiB) == "1,023.50 KiB"
    assert units.format_bytes(1023.996 * KiB) == "1.00 MiB"
    assert units.format_bytes(1023.96 * KiB, digits=1) == "1.0 MiB"


def test_gb_and_gib_are_told_apart() -> None:
    # correctness R7: the weights of Llama-3-8B are 16.06 GB and 14.96 GiB
    assert units.format_bytes(16_060_522_496, "GB") == "16.06 GB"
    assert units.format_bytes(16_060_522_496, "GiB") == "14.96 GiB"
    assert units.format_bytes(80 * GB, "GB") != units.format_bytes(80 * GiB, "GB") == "85.90 GB"


SI = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18, "Z": 10**21}


@pytest.mark.parametrize(
    ("form", "suffix"),
    [
        (units.format_flop, "FLOP"),
        (units.format_flop_rate, "FLOP/s"),
        (units.format_bandwidth, "B/s"),
    ],
)
@given(value=st.floats(1, 9.9e23))
def test_rates_and_work_have_three_digits_and_no_thousand(
    form: Callable[[float], str], suffix: str, value: float
) -> None:
    number, unit = form(value).split()
    assert len(number.replace(".", "")) == 3
    assert 1 <= float(number) < 1000
    assert math.isclose(float(number) * SI[unit.removesuffix(suffix)], value, rel_tol=0.00501)


@pytest.mark.parametrize(
    ("flop", "text"),
    [(999.96e9, "1.00 TFLOP"), (9.996e9, "10.0 GFLOP"), (999.4e9, "999 GFLOP"), (0, "0 FLOP")],
)
def test_work_rounds_into_the_next_prefix(flop: float, text: str) -> None:
    assert units.format_flop(flop) == text


@given(st.floats(1e-9, 999))
def test_times_read_back_within_three_digits(seconds: float) -> None:
    text = units.format_seconds(seconds)
    assert math.isclose(units.parse_seconds(text), seconds, rel_tol=0.00501)
    assert 1 <= number_in(text) < 1000
    assert len(text.split()[0].replace(".", "")) == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00099996, "1.00 ms"),
        (0.9999, "1.00 s"),
        (9.996e-6, "10.0 µs"),
        (1e-5, "10.0 µs"),
        (0, "0 s"),
        (-0.0125, "-12.5 ms"),
        (3600, "3,600 s"),
    ],
)
def test_times_round_into_the_next_unit(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@given(st.integers(0, 2**40))
def test_tokens_print_exactly_and_read_back(tokens: int) -> None:
    assert units.parse_tokens(units.format_tokens(tokens)) == tokens
    assert units.parse_tokens(units.format_tokens(tokens * KiB)) == tokens * KiB
    assert int(units.format_count(tokens).replace(",", "")) == tokens


# --- sizes of formats, tables, NumPy ------------------------------------------------------------


@given(st.integers(0, 10**20), st.sampled_from(sorted(units.DTYPE_BITS)))
def test_sizes_round_up_to_a_byte(elements: int, dtype: str) -> None:
    bits = elements * units.DTYPE_BITS[dtype]
    assert bits <= 8 * units.size_bytes(elements, dtype) < bits + 8


def test_format_sizes_are_those_of_numpy() -> None:
    for dtype, numpy_type in {
        "fp64": np.float64,
        "fp32": np.float32,
        "fp16": np.float16,
        "int8": np.int8,
    }.items():
        assert units.size_bytes(7, dtype) == np.zeros(7, numpy_type).nbytes


def test_numpy_integers_are_counts_and_come_back_as_python_ints() -> None:
    for value in (np.int32(7), np.int64(7), np.uint8(7)):
        assert type(units.check_count("n", value)) is int
    assert units.size_bytes(np.int32(2**30), "fp64") == 2**33  # would overflow in int32
    assert units.format_bytes(np.int64(2**30)) == "1 GiB"
    assert units.format_seconds(np.float32(0.5)) == "500 ms"


def test_a_table_lines_up() -> None:
    lines = units.table([["a", 1], ["bc", 12345]], ["name", "count"]).splitlines()
    assert lines == ["name   count", "----  ------", "a          1", "bc    12,345"]
    with pytest.raises(ValueError, match=r"row \['a'\] has 1 cells, the header has 2"):
        units.table([["a"]], ["name", "count"])
