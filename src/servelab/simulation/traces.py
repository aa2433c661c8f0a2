"""Requests and when they arrive: published traces, and arrivals drawn at random.

Models: a trace as a list of arrivals: a time, the tokens of prompt and answer, and, where the trace
tells, which blocks of the prompt are shared with other requests. Two formats are read, plain or
compressed with gzip: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) and Mooncake's JSON
lines (timestamp in milliseconds, input_length, output_length, hash_ids for blocks of 512 tokens).

Assumes: times count from the first arrival. A byte-order mark, CRLF, blank lines and columns or
keys beside these are accepted; a request without a prompt or an answer, a time before its
predecessor's, or anything else that is not as above is refused with the number of its line.

Ignores: the text of requests, and users who wait for an answer before they ask again.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from servelab.units import check_count, check_positive, near_names

#: Tokens of the prompt that one of Mooncake's hash ids stands for.
MOONCAKE_BLOCK_TOKENS = 512

# Ids that a runner may give to what is not shared begin above.
_LARGEST_ID = 2**60
_LARGEST_COUNT = 10**9
# Three decades: a double still tells a tenth of a microsecond from the next; later a step is lost.
_LATEST_SECONDS = 1e9
# A line of a trace has a few kilobytes.
_LONGEST_LINE = 2**24
_BUNDLED = resources.files("servelab") / "data/traces"
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,7})\d*)?")
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")
_SECOND = timedelta(seconds=1)
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


class Arrival(NamedTuple):
    """One request: when it comes, and how long its prompt and its answer are.

    ``block_ids`` name the prompt's blocks of ``Trace.block_tokens`` from its start, the last of
    them perhaps partial; equal ids stand for equal tokens behind an equal beginning.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Arrivals in order of time, the first at or after 0.

    Parameters: ``name``; ``arrivals``; ``block_tokens`` of a block that ``block_ids`` name.
    Raises: ``ValueError`` for no arrivals, a time before its predecessor's or beyond 10^9 s, and a
    request without a prompt or an answer; ``TypeError``.

    >>> trace = Trace("two", (Arrival(0.0, 100, 10), Arrival(4.0, 50, 5)))
    >>> trace.seconds, trace.rate(2.0).arrivals[1].seconds, trace.output_tokens
    (4.0, 0.5, 15)
    """

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ValueError(f"{self.name}: a trace needs at least one request")
        check_count("block_tokens", self.block_tokens)
        last = 0.0
        for arrival in self.arrivals:
            if not last <= arrival.seconds <= _LATEST_SECONDS:
                raise ValueError(
                    f"{self.name}: times must not decrease, nor exceed {_LATEST_SECONDS:.0e} s: "
                    f"one of {arrival.seconds} s is after one of {last} s"
                )
            last = arrival.seconds
            check_count("prompt_tokens", arrival.prompt_tokens)
            check_count("output_tokens", arrival.output_tokens)

    @property
    def seconds(self) -> float:
        """Return the time of the last arrival."""
        return self.arrivals[-1].seconds

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts."""
        return sum(arrival.prompt_tokens for arrival in self.arrivals)

    @property
    def output_tokens(self) -> int:
        """Return the tokens of all answers."""
        return sum(arrival.output_tokens for arrival in self.arrivals)

    @property
    def shares_prefixes(self) -> bool:
        """Return whether the trace tells which prompts begin alike."""
        return any(arrival.block_ids for arrival in self.arrivals)

    def head(self, num_requests: int) -> Trace:
        """Return the first ``num_requests``."""
        return replace(self, arrivals=self.arrivals[: check_count("num_requests", num_requests)])

    def rate(self, per_second: float) -> Trace:
        """Return the same requests, their times stretched evenly to this mean rate.

        The mean is that of the gaps between arrivals.
        Raises: ``ValueError`` for a rate that is not positive, or a trace that lasts no time.
        """
        if not self.seconds:
            raise ValueError(f"{self.name}: all requests arrive at once, no rate can be given")
        gaps = len(self.arrivals) - 1
        factor = gaps / check_positive("per_second", per_second) / self.seconds
        moved = (a._replace(seconds=a.seconds * factor) for a in self.arrivals)
        return replace(self, arrivals=tuple(moved))


def poisson(
    per_second: float,
    lengths: Iterable[tuple[int, int]],
    seed: int = 0,
    name: str = "poisson",
) -> Trace:
    """Return requests of the given lengths, one after another, at random times.

    Gaps are exponential with mean 1 / ``per_second``, in whole microseconds, so that the last bit
    of a platform's logarithm decides nothing.

    Parameters: ``lengths`` of (prompt, output) tokens, finitely many; ``seed`` of the times.
    Raises: ``TypeError``, ``ValueError`` for a bad rate or length, or no requests.

    >>> trace = poisson(10.0, [(1000, 100)] * 2000, seed=1)
    >>> len(trace.arrivals), round(trace.seconds)
    (2000, 201)
    """
    if check_positive("per_second", per_second) < 1 / _LATEST_SECONDS:
        raise ValueError(f"per_second must be at least {1 / _LATEST_SECONDS:.0e}, got {per_second}")
    draw = random.Random(check_count("seed", seed, minimum=-(2**63)))
    now, arrivals = 0, []
    for prompt, output in lengths:
        check_count("prompt_tokens", prompt)
        check_count("output_tokens", output)
        arrivals.append(Arrival(now / 1e6, prompt, output))
        now += round(draw.expovariate(per_second) * 1e6)
    return Trace(name, tuple(arrivals))


# --- files --------------------------------------------------------------------------------------


class BadTrace(ValueError):
    """A trace that cannot be read; the message names file and line."""


def read_trace(path: str | os.PathLike[str], num_requests: int | None = None) -> Trace:
    """Return the trace in a file, or its first ``num_requests``.

    The format is told by the first line: Mooncake's is JSON, Azure's is not. Compression is told by
    the first bytes.
    Raises: ``BadTrace``; ``OSError`` for a file that cannot be opened.
    """
    path = Path(path)
    limit = None if num_requests is None else check_count("num_requests", num_requests)
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        unpacked = gzip.GzipFile(fileobj=raw) if packed else raw
        lines = _Lines(path.name, io.TextIOWrapper(unpacked, encoding="utf-8-sig", newline=""))
        arrivals: list[Arrival] = []
        last = 0.0
        for arrival in _arrivals(lines):
            if arrival.seconds < last:
                raise lines.error("times must not decrease: it is before its predecessor")
            last = arrival.seconds
            arrivals.append(arrival)
            if len(arrivals) == limit:
                break
    if not arrivals:
        raise BadTrace(f"{path.name} holds no request")
    start = arrivals[0].seconds
    name = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    return Trace(name, tuple(Arrival(a.seconds - start, *a[1:]) for a in arrivals))


def names() -> list[str]:
    """Return the names of the bundled traces.

    >>> "azure_2023_conv" in names()
    True
    """
    return sorted(f.name.split(".")[0] for f in _BUNDLED.iterdir() if f.name.endswith(".gz"))


def get(name: str, num_requests: int | None = None) -> Trace:
    """Return a bundled trace, or its first ``num_requests``.

    Raises: ``KeyError`` for an unknown name; the message lists near ones.

    >>> get("mooncake_synthetic", 100).prompt_tokens
    1313850
    """
    for file in _BUNDLED.iterdir():
        if file.name.endswith(".gz") and file.name.split(".")[0] == name:
            with resources.as_file(file) as path:
                return read_trace(path, num_requests)
    raise KeyError(f"no bundled trace {name!r}; near: {near_names(name, names())}")


class _Lines:
    """The lines of a text, blank ones left out, and where we are in it."""

    def __init__(self, name: str, text: io.TextIOBase) -> None:
        self.name, self.number, self._text = name, 0, text

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                line = self._text.readline(_LONGEST_LINE)
            except UnicodeDecodeError as error:
                raise self.error(f"it is no UTF-8 text ({error.reason})", ahead=1) from None
            except (EOFError, OSError, zlib.error) as error:
                raise self.error(f"gzip data are damaged or cut short ({error})", ahead=1) from None
            if not line:
                return
            self.number += 1
            if len(line) == _LONGEST_LINE:
                raise self.error(f"it is longer than {_LONGEST_LINE:,} characters")
            if line.strip():
                yield line.rstrip("\r\n")

    def error(self, what: str, ahead: int = 0) -> BadTrace:
        return BadTrace(f"{self.name}, line {self.number + ahead}: {what}")


def _arrivals(lines: _Lines) -> Iterator[Arrival]:
    """Yield what the lines say, times as the file counts them."""
    source = iter(lines)
    first = next(source, None)
    if first is None:
        raise BadTrace(f"{lines.name} is empty")
    if first.lstrip().startswith("{"):
        yield _mooncake(first, lines)
        for line in source:
            yield _mooncake(line, lines)
        return
    header = [name.strip() for name in _fields(first, lines)]
    missing = [name for name in _AZURE_COLUMNS if name not in header]
    if missing:
        raise lines.error(
            f"no column {missing[0]}; a trace is CSV with {', '.join(_AZURE_COLUMNS)}, or JSON "
            f"lines with {', '.join(_MOONCAKE_KEYS)}"
        )
    column = {name: place for place, name in enumerate(header)}
    start: datetime | None = None
    for line in source:
        values = _fields(line, lines)
        if len(values) != len(header):
            raise lines.error(f"{len(values)} values for {len(header)} columns: {line[:60]!r}")
        moment, ticks = _moment(values[column["TIMESTAMP"]], lines)
        start = start or moment
        prompt = _count("ContextTokens", _number(values[column["ContextTokens"]]), lines)
        output = _count("GeneratedTokens", _number(values[column["GeneratedTokens"]]), lines)
        whole = (moment - start) // _SECOND
        yield Arrival((whole * 10**7 + ticks) / 1e7, prompt, output)


def _fields(line: str, lines: _Lines) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise lines.error(f"it is no CSV ({error})") from None


def _moment(text: str, lines: _Lines) -> tuple[datetime, int]:
    """Return a timestamp to the second, and the tenths of microseconds behind it."""
    found = _MOMENT.fullmatch(text.strip())
    try:
        if found:
            return datetime.fromisoformat(found[1]), int((found[2] or "0").ljust(7, "0"))
    except ValueError:
        pass
    raise lines.error(f"TIMESTAMP must be like 2023-11-16 18:15:46.6805900, got {text[:60]!r}")


def _number(text: str) -> object:
    """Return a whole number that a CSV field holds, else the field."""
    text = text.strip()
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else text


def _mooncake(line: str, lines: _Lines) -> Arrival:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise lines.error(f"it is no JSON, or cut short: {line[:60]!r}") from None
    if not isinstance(row, dict):
        raise lines.error(f"a JSON object is needed, got {line[:60]!r}")
    for key in _MOONCAKE_KEYS[:3]:
        if key not in row:
            raise lines.error(f"no {key}; each line has {', '.join(_MOONCAKE_KEYS)}")
    milliseconds = row["timestamp"]
    number = isinstance(milliseconds, int | float) and not isinstance(milliseconds, bool)
    if not number or not 0 <= milliseconds < 1e15:
        raise lines.error(f"timestamp must be milliseconds from 0, got {milliseconds!r}")
    prompt, output = (_count(key, row[key], lines) for key in _MOONCAKE_KEYS[1:3])
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < _LARGEST_ID for i in ids):
        raise lines.error(f"hash_ids must be a list of whole numbers from 0, got {str(ids)[:60]}")
    blocks = -(-prompt // MOONCAKE_BLOCK_TOKENS)
    if ids and len(ids) != blocks:
        raise lines.error(f"{prompt} tokens are {blocks} blocks of 512, got {len(ids)} hash_ids")
    return Arrival(milliseconds / 1e3, prompt, output, tuple(ids))


def _count(name: str, value: object, lines: _Lines) -> int:
    if type(value) is not int or not 1 <= value <= _LARGEST_COUNT:
        raise lines.error(f"{name} must be a whole number from 1, got {str(value)[:60]!r}")
    return value
