"""The numbers of a log: found behind any prefix, in colour, wrapped, between other lines.

Models: a number as the interval that rounds to it, with where it stands and whether it is whole.

Assumes: a number with its unit behind it is whole; one that ends its line may have been cut there.
A line is wrapped at spaces, or by a terminal at its width, which is 40 columns or more.

Ignores: numbers whose name has been cut off.
"""

import bisect
import itertools
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from servelab.logs.quantities import QUANTITIES, UNITS, patterns
from servelab.units import parse_tokens

#: What only these engines print, whether or not a number follows.
_MARKS = re.compile(
    r"vLLM API server version|Initializing an? (?:V\d )?LLM engine|VllmWorker"
    r"|ServerArgs\(|KV Cache is allocated|\[TensorRT-LLM\]|\[TRT-LLM\]"
    r"|llama_model_load|llm_load_print_meta|llama_new_context_with_model|llama_init_from_model"
    r"|llama_context:|llama_kv_cache"
)
#: A tensor-parallel rank in a line's prefix: "(Worker_TP1 pid=7)", "[2026-01-01 TP1]".
_RANK = re.compile(r"TP(\d{1,2})(?=[ \]_])")
_START = re.compile(
    r"vLLM API server version|Initializing an? (?:V\d )?LLM engine|ServerArgs\("
    r"|llama_model_loader: loaded meta data|loading draft model|llama\.cpp: loading model"
    r"|TensorRT-LLM version"
)
# The escape character is lost when a log is pasted; the rest of the code stays.
_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]?)?|\[\d{1,3}(?:;\d{1,3})*m|\r(?=\n)")
_NARROWEST_TERMINAL = 40
#: What stands behind a number of each kind where its line may have been cut inside it.
_CUT = {
    "count": re.compile(r"(?<=\d),?\n"),
    "ratio": re.compile(r"\.?\n"),
    "word": re.compile(r"\n"),
    "size": re.compile(r"(?!)"),  # its unit is behind it
}


class Reading(NamedTuple):
    """One number of a log.

    Fields: ``engine`` whose line it is ("" for a setting); ``quantity``; ``unit`` as meant;
    ``value`` as printed, in that unit; ``low``, ``high`` what may have been rounded to it, in bytes
    for a size; ``word`` of a format; ``position`` in its line; ``statement`` the same for all
    numbers of one sentence; ``may_be_cut`` whether it ends its line without a unit;
    ``across_lines`` whether its sentence runs over a line's end; ``extended`` whether low and high
    already allow for a cut.
    """

    engine: str
    quantity: str
    unit: str
    value: float
    low: float
    high: float
    word: str = ""
    position: int = 0
    line_number: int = 0
    line: str = ""
    statement: int = 0
    may_be_cut: bool = False
    across_lines: bool = False
    extended: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Return line and column, by which readings are ordered."""
        return self.line_number, self.position

    @property
    def text(self) -> str:
        """Return the number with its unit."""
        number = self.word or f"{self.value:,}"
        return f"{number}{self.unit}" if self.unit in ("x", "%", "") else f"{number} {self.unit}"

    @property
    def scale(self) -> int:
        """Return the bytes of one unit of a size, 1 for all else."""
        return UNITS[self.unit][1] if self.unit in UNITS else 1

    def extensions(self) -> Iterator["Reading"]:
        """Yield what the number may have been before its line was cut: up to six more digits."""
        if not self.may_be_cut or self.extended or self.word:
            return
        if self.high > self.low:  # a ratio may have had more decimals
            yield self._replace(
                low=self.value, high=self.value + (self.high - self.low), extended=True
            )
        if isinstance(self.value, int):
            for digits in range(1, 7):
                low = self.value * 10**digits
                yield self._replace(low=low, high=low + 10**digits, extended=True)


class UnknownEngine(ValueError):
    """The text has no line of an engine whose start-up log is understood."""


class _Text:
    """Numbered lines as one string; a line that a terminal broke runs on into the next."""

    def __init__(self, lines: list[tuple[int, str]], broken: frozenset[int] = frozenset()) -> None:
        self.lines = lines
        pieces = [line if number in broken else line + "\n" for number, line in lines]
        self.joined = "".join(pieces)
        self._starts = list(itertools.accumulate(map(len, pieces), initial=0))

    def place(self, position: int) -> tuple[int, int]:
        """Return the index of the line in ``lines`` and the column of a position."""
        index = bisect.bisect_right(self._starts, position, hi=len(self.lines)) - 1
        return index, position - self._starts[index]


def read(text: str) -> tuple[list[Reading], list[int], int]:
    """Return the readings in order, the lines on which an engine starts, and the ranks seen.

    Raises: ``UnknownEngine`` where no line is one of the four engines'.

    >>> found, _, _ = read("GPU KV cache size: 2,042,016 tokens")
    >>> found[0].engine, found[0].quantity, found[0].value
    ('vllm', 'tokens', 2042016)
    """
    split = itertools.pairwise(("first", *_COLOUR.sub("", text).split("\n")))
    # of empty lines, the first stands for those that follow
    lines = [(n, line) for n, (before, line) in enumerate(split, start=1) if line or before]
    whole = _Text(lines)
    readings = list(_scan(whole))
    pieces, broken = _hard_wrapped(lines)
    if pieces:
        readings += [r for r in _scan(_Text(pieces, broken)) if r.across_lines]
    if not any(r.engine for r in readings) and not _MARKS.search(whole.joined):
        raise UnknownEngine(
            "no start-up line of vLLM, SGLang, TensorRT-LLM or llama.cpp found; other engines' "
            "logs are not understood"
        )
    # the same number seen both ways: the reading across the lines is the whole one
    places = {(r.place, r.quantity): r for r in readings}
    starts = [lines[whole.place(m.start())[0]][0] for m in _START.finditer(whole.joined)]
    ranks = max((int(m[1]) + 1 for m in _RANK.finditer(whole.joined)), default=1)
    return sorted(places.values(), key=lambda r: r.place), starts, ranks


def _hard_wrapped(
    lines: list[tuple[int, str]],
) -> tuple[list[tuple[int, str]], frozenset[int]]:
    """Return the lines that a terminal broke at its width with those they run on into.

    Lines that are as long as the longest were broken there, unless they just happen to be.
    """
    width = max(len(line) for _, line in lines)
    if width < _NARROWEST_TERMINAL:
        return [], frozenset()
    broken = frozenset(number for number, line in lines[:-1] if len(line) == width)
    kept = broken | {number + 1 for number in broken}
    return [numbered for numbered in lines if numbered[0] in kept], broken


def _scan(text: _Text) -> Iterator[Reading]:
    """Yield the readings of every shape."""
    joined = text.joined
    for engine, names, pattern in patterns():
        for match in pattern.finditer(joined):
            statement = next(_statements)
            first, _ = text.place(match.start())
            last, _ = text.place(match.end() - 1)
            if any(len(line) < _NARROWEST_TERMINAL for _, line in text.lines[first:last]):
                continue  # the lines in between are too short to have been wrapped
            for group, name in enumerate(names, start=1):
                if match[group] is None:
                    continue
                index, column = text.place(match.start(group))
                open_end = QUANTITIES[name][0] != "size" and match.end(group) == match.end()
                if open_end and text.place(match.end() - 1)[0] != index:
                    continue  # nothing behind it says that the next line still belongs to it
                line_number, line = text.lines[index]
                yield Reading(
                    engine,
                    name,
                    *_number(name, match[group]),
                    column,
                    line_number,
                    line,
                    statement,
                    may_be_cut=bool(_CUT[QUANTITIES[name][0]].match(joined, match.end(group))),
                    across_lines=first != last,
                )


_statements = itertools.count()


@lru_cache(maxsize=4096)
def _number(name: str, written: str) -> tuple[str, float, float, float, str]:
    """Return unit, value, low and high end of what rounds to it (bytes for a size), and word."""
    kind, unit, _ = QUANTITIES[name]
    if kind == "word":
        return "", 0, 0, 0, written
    digits, label = written.replace(",", ""), ""
    if kind == "size":  # "(1.0/23.54) GiB" has one unit for two sizes
        digits, label = re.fullmatch(r"([-\d.]+)(?:/[\d.]+)?\)?\s*([A-Za-z]*)", digits).groups()  # type: ignore[union-attr]
    decimals = len(digits.partition(".")[2])
    if kind == "count":
        return unit or "", *(parse_tokens(written),) * 3, ""
    value = float(digits) if decimals else int(digits)
    scale = 1
    if kind == "size":
        unit, scale = UNITS[label or "bytes"]
    half = 0 if unit == "bytes" else 0.5 * 10.0**-decimals
    return unit or "", value, (value - half) * scale, (value + half) * scale, ""
