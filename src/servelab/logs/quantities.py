"""What start-up lines say: numbers by the quantity they name and the unit they carry.

Models: lines of vLLM (the two layouts of V0, V1, forks that print a column), SGLang, TensorRT-LLM
and llama.cpp (older and newer), behind any prefix, in colour, wrapped at spaces or at a terminal's
edge.

Assumes: a number with its unit behind it is whole; one that ends its line may have been cut there.
"GB" and "MB" in these logs are GiB and MiB: all four engines divide by powers of two.

Ignores: every line that names none of the quantities; what happens after the start.
"""

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

from servelab.units import GiB, KiB, MiB

#: Units as printed: what they mean, and their bytes.
_UNITS = {
    "GiB": ("GiB", GiB),
    "GB": ("GiB", GiB),
    "MiB": ("MiB", MiB),
    "MB": ("MiB", MiB),
    "KiB": ("KiB", KiB),
    "bytes": ("bytes", 1),
}
_DECIMAL = r"\d{1,12}(?:\.\d{1,8})?"
_PATTERNS = {
    # the look-ahead keeps a count from ending inside a longer one
    "count": r"(?:\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?!\d|[.,]\d)",
    "size": rf"-?{_DECIMAL}\s*(?:GiB|GB|MiB|MB|KiB|bytes)(?![A-Za-z])",
    "ratio": rf"{_DECIMAL}(?!\d|\.\d)",
    "word": r"[A-Za-z][\w.]{0,30}(?!\w)",
}
#: Every quantity: how it is written, its unit (None: as printed), and whether it is an answer
#: (a number that engines print for people to rely on) rather than a setting that explains others.
QUANTITIES: dict[str, tuple[str, str | None, bool]] = {
    "total": ("size", None, True),
    "usable": ("size", None, True),
    "weights": ("size", None, True),
    "consumed": ("size", None, True),
    "peak_torch": ("size", None, True),
    "activation": ("size", None, True),
    "non_torch": ("size", None, True),
    "graphs": ("size", None, True),
    "estimated_graphs": ("size", None, True),
    "available": ("size", None, True),
    "free": ("size", None, True),
    "suggested": ("size", None, True),
    "suggested_bytes": ("size", None, True),
    "needed": ("size", None, True),
    "kv_size": ("size", None, True),
    "k_size": ("size", None, True),
    "v_size": ("size", None, True),
    "state_size": ("size", None, True),
    "gpu_blocks": ("count", "blocks", True),
    "cpu_blocks": ("count", "blocks", True),
    "tokens": ("count", "tokens", True),
    "cells": ("count", "cells", True),
    "max_model_len": ("count", "tokens", True),
    "estimated_max_model_len": ("count", "tokens", True),
    "max_concurrency": ("ratio", "x", True),
    "context": ("count", "tokens", False),
    "utilization": ("ratio", "", False),
    "percent": ("ratio", "%", False),
    "swap_space": ("ratio", "GiB", False),
    "block_size": ("count", "tokens", False),
    "batched_tokens": ("count", "tokens", False),
    "layers": ("count", "layers", False),
    "k_width": ("count", "elements", False),
    "v_width": ("count", "elements", False),
    "width": ("count", "elements", False),
    "tp": ("count", "ranks", False),
    "pp": ("count", "stages", False),
    "dcp": ("count", "ranks", False),
    "kv_dtype": ("word", "", False),
    "k_dtype": ("word", "", False),
    "v_dtype": ("word", "", False),
    "dtype": ("word", "", False),
    "quantization": ("word", "", False),
}

# A space stands for any white space, a tilde for white space or none. Each begins with letters that
# are rare in logs: that is what makes the search fast.
_SETTING = r"['\"]?[=:\s]\s{0,4}['\"]?"
SHAPES: tuple[tuple[str, str], ...] = (
    # vLLM
    ("vllm", r"model weights took~{weights}"),
    ("vllm", r"Model loading took~{weights}"),
    ("vllm", r"model weights take~{weights}"),
    ("vllm", r"total_gpu_memory={total}"),
    ("vllm", r"peak_torch_memory={peak_torch}"),
    ("vllm", r"non_torch_memory={non_torch}"),
    ("vllm", r"kv_cache_size={available}"),
    (
        "vllm",
        r"total_gpu_memory \({total}\) x gpu_memory_utilization \({utilization}\) =~{usable}",
    ),
    ("vllm", r"non_torch_memory takes~{non_torch}"),
    ("vllm", r"activation peak memory takes~{activation}"),
    ("vllm", r"reserved for KV Cache is~{available}"),
    ("vllm", r"Available KV cache memory:~{available}"),
    ("vllm", r"blocks:~{gpu_blocks},~#?~CPU blocks:~{cpu_blocks}"),
    ("vllm", r"GPU blocks:~{gpu_blocks}(?!,~#?~CPU)"),
    ("vllm", r"KV cache size:~{tokens} tokens"),
    ("vllm", r"Maximum concurrency for {max_model_len} tokens per request:~{max_concurrency}x"),
    ("vllm", r"max seq len \({max_model_len}\)(?:,~\(?{needed} KV cache is needed)?"),
    ("vllm", r"available KV cache memory \({available}\)"),
    ("vllm", r"stored in KV cache \({tokens}\)"),
    ("vllm", r"estimated maximum model length is {estimated_max_model_len}"),
    ("vllm", rf"Free memory on device \({_DECIMAL}/{{total}}\)"),
    ("vllm", r"Desired GPU memory utilization is \({utilization}, {usable}\)"),
    (
        "vllm",
        r"Actual usage is {consumed} for consumed memory \(weights \+ non-torch\), {activation}"
        r" for peak activation(?:,~(?:and )?{graphs} for CUDAGraph memory)?",
    ),
    (
        "vllm",
        r"Actual usage is {weights} for weight, {activation} for peak activation"
        r"(?:, {non_torch} for non-torch memory(?:,~(?:and )?{graphs} for CUDAGraph memory)?)?",
    ),
    ("vllm", r"kv-cache-memory=(?P<suggested_bytes>\d{4,15})[`']? \({suggested}\) to fit into"),
    ("vllm", r"kv cache memory in use is {available}"),
    ("vllm", r"Estimated CUDA graph memory:~{estimated_graphs}"),
    ("vllm", r"Graph capturing finished in \d{1,6} secs?, took {graphs}"),
    # Aphrodite, a fork of vLLM: a column
    ("vllm", r"Total GPU memory:~{total}"),
    ("vllm", r"Memory utilization:~{percent}%"),
    ("vllm", r"Available for Aphrodite:~{usable}"),
    ("vllm", r"Model weights:~{weights}"),
    ("vllm", r"Reserved for KV cache:~{available}"),
    ("vllm", r"KV cache for {max_model_len} tokens:~{needed}"),
    ("vllm", r"Wasted memory:~{non_torch}"),
    ("vllm", r"Peak activations memory:~{activation}"),
    ("vllm", r"Minimum concurrency:~{max_concurrency}x"),
    ("vllm", r"Maximum sequence length allowed in the cache:~{tokens}"),
    # SGLang
    ("sglang", r"tokens:~{tokens},~K size:~{k_size},~V size:~{v_size}"),
    ("sglang", r"tokens:~{tokens},~KV size:~{kv_size}"),
    ("sglang", r"max_total_num_tokens={tokens}"),
    ("sglang", r"Load weight end\.[^\n]{0,200}?mem usage={weights}"),
    ("sglang", r"KV cache dtype:~(?:torch\.)?{kv_dtype}"),
    ("sglang", r"context_len={max_model_len}"),
    # TensorRT-LLM
    ("tensorrt-llm", r"KV cache primary pool:~{gpu_blocks}"),
    ("tensorrt-llm", r"tokens per block={block_size},~primary blocks={gpu_blocks}"),
    ("tensorrt-llm", r"Number of tokens per block:~{block_size}"),
    ("tensorrt-llm", r"Allocate {kv_size} for k/v cache"),
    ("tensorrt-llm", r"Using {tokens}(?: total)? tokens in paged KV cache"),
    ("tensorrt-llm", r"Allocated {kv_size} for max tokens in paged KV cache \({tokens}\)"),
    ("tensorrt-llm", r"paged kv cache: total:~{total},~available:~{free}"),
    # llama.cpp
    (
        "llama.cpp",
        r"self size~=~{kv_size}"
        r"(?:,~(?:K|c\^KV) \({k_dtype}\):~{k_size}(?:,~V \({v_dtype}\):~{v_size})?)?",
    ),
    (
        "llama.cpp",
        r"size~=~{kv_size} \(~{cells} cells,~{layers} layers(?:,~[\d/ ]{1,20} seqs)?\)"
        r"(?:,~K \({k_dtype}\):~{k_size},~V \({v_dtype}\):~{v_size}|(?!,~R))",
    ),
    ("llama.cpp", r"llama_memory_recurrent: size~=~{state_size}"),
    ("llama.cpp", r"llama_context: n_ctx~=~{context}"),
    ("llama.cpp", r"llama_new_context_with_model: n_ctx~=~{context}"),
    ("llama.cpp", r"llama_model_load_internal: n_ctx~=~{context}"),
    ("llama.cpp", r"kv_size~=~{context}, offload"),
    ("llama.cpp", r"n_layer~=~{layers}"),
    ("llama.cpp", r"n_embd~=~{width}"),
    ("llama.cpp", r"n_embd_k_gqa~=~{k_width}"),
    ("llama.cpp", r"n_embd_v_gqa~=~{v_width}"),
    # settings, as vLLM's and SGLang's command lines and configurations spell them
    ("", rf"tensor[-_]parallel[-_]size{_SETTING}{{tp}}"),
    ("", rf"pipeline[-_]parallel[-_]size{_SETTING}{{pp}}"),
    ("", rf"decode[-_]context[-_]parallel[-_]size{_SETTING}{{dcp}}"),
    ("", r"tp_size={tp}"),
    ("", r"pp_size={pp}"),
    ("", rf"kv[-_]cache[-_]dtype{_SETTING}(?:torch\.)?{{kv_dtype}}"),
    ("", rf"block[-_]size{_SETTING}{{block_size}}"),
    ("", r"page_size={block_size}"),
    ("", rf"swap[-_]space{_SETTING}{{swap_space}}"),
    ("", rf"gpu[-_]memory[-_]utilization{_SETTING}{{utilization}}"),
    ("", rf"max[-_]model[-_]len{_SETTING}{{max_model_len}}"),
    ("", r"max_seq_len={max_model_len}"),
    ("", rf"max[-_]num[-_]batched[-_]tokens{_SETTING}{{batched_tokens}}"),
    ("", r"dtype=torch\.{dtype}"),
    ("", rf"quantization{_SETTING}{{quantization}}"),
)
#: What only these engines print, whether or not a number follows.
_MARKS = re.compile(
    r"vLLM API server version|Initializing an? (?:V\d )?LLM engine|VllmWorker"
    r"|ServerArgs\(|KV Cache is allocated|\[TensorRT-LLM\]|\[TRT-LLM\]"
    r"|llama_model_load|llm_load_print_meta|llama_new_context_with_model|llama_context:"
)
#: A tensor-parallel rank in a line's prefix: "(Worker_TP1 pid=7)", "[2026-01-01 TP1]".
_RANK = re.compile(r"TP(\d{1,2})(?=[ \]_])")
_START = re.compile(
    r"vLLM API server version|Initializing an? (?:V\d )?LLM engine|ServerArgs\("
    r"|llama_model_loader: loaded meta data|llama\.cpp: loading model|TensorRT-LLM version"
)
# The escape character is lost when a log is pasted; the rest of the code stays.
_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]?)?|\[\d{1,3}(?:;\d{1,3})*m|\r(?=\n)")
_NARROWEST_TERMINAL = 40


@dataclass(frozen=True)
class Reading:
    """One number of a log.

    Fields: ``engine`` whose line it is ("" for a setting); ``quantity``; ``unit`` as meant;
    ``value`` as printed, in that unit; ``low``, ``high`` what may have been rounded to it, in bytes
    for a size; ``word`` of a format; ``position`` in the text; ``may_be_cut`` whether it ends its
    line without a unit; ``across_lines`` whether it was read over a line's end; ``extended``
    whether low and high already allow for a cut.
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
        return _UNITS[self.unit][1] if self.unit in _UNITS else 1

    def extensions(self) -> Iterator["Reading"]:
        """Yield what the number may have been before its line was cut: up to six more digits."""
        if not self.may_be_cut or self.extended or self.word:
            return
        written = f"{self.value:.15g}"
        if "." in written:
            step = 10.0 ** -len(written.partition(".")[2])
            yield replace(self, low=self.value, high=self.value + step, extended=True)
            return
        for digits in range(7):  # no digit more, but a fraction: for what is not a count
            low = self.value * 10**digits
            yield replace(self, low=low, high=low + 10**digits, extended=True)


class UnknownEngine(ValueError):
    """The text has no line of an engine whose start-up log is understood."""


@dataclass(frozen=True)
class _Text:
    """A text with its line numbers; ``lines`` without colour codes."""

    lines: list[str]
    first_line_number: int = 1
    glue: str = "\n"

    @cached_property
    def joined(self) -> str:
        return self.glue.join(self.lines)

    @cached_property
    def starts(self) -> list[int]:
        starts, at = [], 0
        for line in self.lines:
            starts.append(at)
            at += len(line) + len(self.glue)
        return starts

    def line_index(self, position: int) -> int:
        return bisect.bisect_right(self.starts, position) - 1


def read(text: str) -> tuple[list[Reading], list[int], int]:
    """Return the readings in order, the lines on which an engine starts, and the ranks seen.

    Raises: ``UnknownEngine`` where no line is one of the four engines'.

    >>> found, _, _ = read("GPU KV cache size: 2,042,016 tokens")
    >>> found[0].engine, found[0].quantity, found[0].value
    ('vllm', 'tokens', 2042016)
    """
    lines = _COLOUR.sub("", text).split("\n")
    whole = _Text(lines)
    readings = list(_scan(whole))
    for first, last in _hard_wrapped(lines):
        glued = _Text(lines[first : last + 1], first + 1, glue="")
        readings += [r for r in _scan(glued) if r.across_lines]
    if not any(r.engine for r in readings) and not _MARKS.search(whole.joined):
        raise UnknownEngine(
            "no start-up line of vLLM, SGLang, TensorRT-LLM or llama.cpp found; other engines' "
            "logs are not understood"
        )
    # the same number seen both ways: the reading across the lines is the whole one
    places = {(r.place, r.quantity): r for r in readings}
    starts = [whole.line_index(m.start()) + 1 for m in _START.finditer(whole.joined)]
    ranks = max((int(m[1]) + 1 for m in _RANK.finditer(whole.joined)), default=1)
    return sorted(places.values(), key=lambda r: r.place), starts, ranks


def _compile(shape: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[a-z_]+\})", shape)
    for i, part in enumerate(parts):
        if i % 2:
            name = part[1:-1]
            parts[i] = f"(?P<{name}>{_PATTERNS[QUANTITIES[name][0]]})"
        else:
            parts[i] = re.sub(
                r"\[[^]]*\]| |~",
                lambda m: {" ": r"\s{1,99}", "~": r"\s{0,99}"}.get(m[0], m[0]),
                part,
            )
    return re.compile("".join(parts))


@cache
def _compiled() -> list[tuple[str, re.Pattern[str]]]:
    return [(engine, _compile(shape)) for engine, shape in SHAPES]


def _hard_wrapped(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the runs of lines, as first and last index, that a terminal broke at its width."""
    width = max(map(len, lines))
    if width < _NARROWEST_TERMINAL:
        return
    first = None
    for i, line in enumerate(lines):
        if len(line) == width and first is None:
            first = i
        elif len(line) < width and first is not None:
            yield first, i
            first = None


def _scan(text: _Text) -> Iterator[Reading]:
    """Yield the readings of every shape."""
    joined = text.joined
    for engine, pattern in _compiled():
        for match in pattern.finditer(joined):
            first, last = text.line_index(match.start()), text.line_index(match.end() - 1)
            if first != last and any(
                len(text.lines[i]) < _NARROWEST_TERMINAL for i in range(first, last)
            ):
                continue  # the lines in between are too short to have been wrapped
            for name, written in match.groupdict().items():
                if written is None:
                    continue
                start, end = match.span(name)
                index = text.line_index(start)
                reading = _reading(engine, name, written)
                yield replace(
                    reading,
                    position=start - text.starts[index],
                    line_number=text.first_line_number + index,
                    line=text.lines[index],
                    may_be_cut=QUANTITIES[name][0] != "size"
                    and joined[end : end + 1] in ("", "\n"),
                    across_lines=first != last,
                )


def _reading(engine: str, name: str, written: str) -> Reading:
    kind, unit, _ = QUANTITIES[name]
    if kind == "word":
        return Reading(engine, name, "", 0, 0, 0, written)
    digits, label = re.match(r"([-\d.,]+)\s*([A-Za-z]*)", written).groups()  # type: ignore[union-attr]
    digits = digits.replace(",", "")
    decimals = len(digits.partition(".")[2])
    value = float(digits) if decimals else int(digits)
    scale = 1
    if kind == "size":
        unit, scale = _UNITS[label or "bytes"]
    rounded = kind != "count" and unit != "bytes"
    half = 0.5 * 10.0**-decimals if rounded else 0
    low, high = (value - half) * scale, (value + half) * scale
    return Reading(engine, name, unit or "", value, low, high)
