"""Traces: what is read, what is refused and where; random arrivals; prefix hits by cache size."""

import gzip
import json
from itertools import pairwise

import pytest

from servelab.allocation.hits import engine_hit_rate, plain_hit_rate
from servelab.paging import OutOfBlocks
from servelab.simulation import Arrival, BadTrace, Trace, poisson, read_trace, traces

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"
LATER = "2023-11-16 18:15:50.9951690,396,109"
TURN = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}


def written(tmp_path, content, name="trace.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(*rows):
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens"),
    [
        ("azure_2023_conv", 19_366, 22_361_870, 4_088_665),
        ("azure_2023_code", 8_819, 18_059_974, 245_896),
        ("mooncake_conversation", 12_031, 144_793_823, 4_122_048),
        ("mooncake_synthetic", 3_993, 61_194_628, 595_432),
    ],
)
def test_published_traces(name, requests, prompt_tokens, output_tokens):
    trace = traces.get(name)
    assert trace.name == name
    assert len(trace.arrivals) == requests
    assert (trace.prompt_tokens, trace.output_tokens) == (prompt_tokens, output_tokens)
    assert trace.arrivals[0].seconds == 0
    assert trace.shares_prefixes == name.startswith("mooncake")


def test_the_bundled_traces_are_named():
    assert len(traces.names()) == 4
    with pytest.raises(KeyError, match="no bundled trace 'azure'; near: azure_2023_code"):
        traces.get("azure")


def test_azure_times_and_lengths(tmp_path):
    trace = read_trace(written(tmp_path, "\n".join([HEADER, ROW, LATER])))
    assert trace.arrivals == (Arrival(0.0, 374, 44), Arrival(4.314579, 396, 109))


def test_mooncake_times_lengths_and_blocks(tmp_path):
    later = TURN | {"timestamp": 4500.0, "input_length": 512, "hash_ids": [7]}
    trace = read_trace(written(tmp_path, jsonl(TURN, later)))
    assert trace.arrivals == (Arrival(0.0, 700, 5, (7, 8)), Arrival(1.5, 512, 5, (7,)))
    assert trace.block_tokens == 512


HARMLESS = {
    "CRLF": f"{HEADER}\r\n{ROW}\r\n{LATER}\r\n",
    "byte-order mark": f"\ufeff{HEADER}\n{ROW}\n{LATER}",
    "blank lines": f"\n{HEADER}\n\n{ROW}\n  \n{LATER}\n\n",
    "no end of line": f"{HEADER}\n{ROW}\n{LATER}",
    "other columns, other order": "\n".join(
        ["user,GeneratedTokens,TIMESTAMP,ContextTokens"]
        + [",".join(["a", row.split(",")[2], *row.split(",")[:2]]) for row in (ROW, LATER)]
    ),
    "quotes and spaces": f'{HEADER}\n"{ROW[:27]}", 374 ,44\n{LATER}',
    "gzip": gzip.compress(f"{HEADER}\n{ROW}\n{LATER}".encode()),
}


@pytest.mark.parametrize("content", HARMLESS.values(), ids=HARMLESS)
def test_harmless_forms_are_read(tmp_path, content):
    trace = read_trace(written(tmp_path, content))
    assert [arrival[1:3] for arrival in trace.arrivals] == [(374, 44), (396, 109)]


def test_equal_times_are_in_order(tmp_path):
    trace = read_trace(written(tmp_path, jsonl(TURN, TURN, TURN)))
    assert [arrival.seconds for arrival in trace.arrivals] == [0, 0, 0]


def test_only_as_many_lines_as_asked_for_are_read(tmp_path):
    path = written(tmp_path, f"{HEADER}\n{ROW}\nnonsense")
    assert len(read_trace(path, 1).arrivals) == 1
    with pytest.raises(BadTrace, match="line 3"):
        read_trace(path, 2)
    with pytest.raises(ValueError, match="num_requests must be at least 1, got 0"):
        read_trace(path, 0)


# --- what is refused ----------------------------------------------------------------------------

PACKED = gzip.compress("\n".join([HEADER] + [ROW] * 400).encode())
REFUSED = {
    "empty file": ("", "trace.csv is empty"),
    "only blank lines": ("\n \n", "trace.csv is empty"),
    "only a header": (HEADER, "trace.csv holds no request"),
    "empty gzip": (gzip.compress(b""), "trace.csv is empty"),
    "no header": (f"{ROW}\n{LATER}", "line 1: no column TIMESTAMP"),
    "missing column": (f"TIMESTAMP,ContextTokens\n{ROW[:31]}", "line 1: no column GeneratedTokens"),
    "a value short": (f"{HEADER}\n{ROW}\n{LATER[:31]}", "line 3: 2 values for 3 columns"),
    "a value long": (f"{HEADER}\n{ROW},1", "line 2: 4 values for 3 columns"),
    "blank line counted": (f"{HEADER}\n\n{ROW}\n\n{LATER},", "line 5: 4 values"),
    "negative": (f"{HEADER}\n{ROW}\n{LATER[:28]}-396,109", "line 3: ContextTokens .* got '-396'"),
    "zero": (f"{HEADER}\n{ROW[:32]}0", "line 2: GeneratedTokens must be .* from 1, got '0'"),
    "not a number": (f"{HEADER}\n{ROW[:32]}many", "line 2: GeneratedTokens .* got 'many'"),
    "a fraction": (f"{HEADER}\n{ROW[:32]}4.5", "line 2: GeneratedTokens .* got '4.5'"),
    "empty value": (f"{HEADER}\n{ROW[:32]}", "line 2: GeneratedTokens .* got ''"),
    "too long": (f"{HEADER}\n{ROW}{'0' * 5000}", "line 2: GeneratedTokens"),
    "other digits": (f"{HEADER}\n{ROW[:32]}٤٤", "line 2: GeneratedTokens"),
    "bad time": (f"{HEADER}\nyesterday,374,44", "line 2: TIMESTAMP must be like 2023-.*yesterday"),
    "no such day": (f"{HEADER}\n2023-02-30{ROW[10:]}", "line 2: TIMESTAMP must be like"),
    "unsorted": (f"{HEADER}\n{LATER}\n{ROW}", "line 3: times must not decrease"),
    "no text": (HEADER.encode() + b"\n\xff\xfe\x00", "it is no UTF-8 text"),
    "an array": ("[1]", "line 1: no column TIMESTAMP.*JSON lines with timestamp"),
    "gzip cut short": (PACKED[:-20], "line .*: gzip data are damaged or cut short"),
    "gzip damaged": (PACKED[:40] + b"?" * 20 + PACKED[60:], "gzip data are damaged|no UTF-8|line"),
    "line cut short": (jsonl(TURN, json.dumps(TURN)[:40]), "line 2: it is no JSON, or cut short"),
    "no object": (jsonl(TURN, "[1, 2]"), r"line 2: a JSON object is needed, got '\[1, 2\]'"),
    "missing key": (jsonl({"timestamp": 0, "input_length": 9}), "line 1: no output_length"),
    "negative key": (jsonl(TURN | {"output_length": -5}), "line 1: output_length .* got '-5'"),
    "a flag": (jsonl(TURN | {"output_length": True}), "line 1: output_length .* got 'True'"),
    "text for a number": (jsonl(TURN | {"input_length": "9"}), "line 1: input_length"),
    "no time": (jsonl(TURN | {"timestamp": None}), "timestamp must be milliseconds .* got None"),
    "NaN": (jsonl(TURN | {"timestamp": float("nan")}), "timestamp must be milliseconds .* got nan"),
    "times fall": (jsonl(TURN, TURN | {"timestamp": 0}), "line 2: times must not decrease"),
    "an id short": (jsonl(TURN | {"hash_ids": [1]}), "700 tokens are 2 blocks of 512, got 1"),
    "ids of another kind": (jsonl(TURN | {"hash_ids": [1, "2"]}), "hash_ids must be a list"),
    "one endless line": (f"{HEADER}\n" + "0" * 2**24, "line 2: it is longer than 16,777,216 char"),
    "deep": (jsonl(TURN, "{" + '"a":[' * 100_000), "line 2: it is no JSON"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_line(tmp_path, content, message):
    with pytest.raises(BadTrace, match=message) as caught:
        read_trace(written(tmp_path, content))
    assert len(str(caught.value)) < 300


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.csv")


def test_a_trace_is_checked():
    with pytest.raises(ValueError, match="needs at least one request"):
        Trace("none", ())
    with pytest.raises(ValueError, match="times must not decrease"):
        Trace("back", (Arrival(2.0, 1, 1), Arrival(1.0, 1, 1)))
    for never in (float("nan"), float("inf"), 1.1e9):
        with pytest.raises(ValueError, match=r"must not decrease, nor exceed 1e\+09 s"):
            Trace("never", (Arrival(never, 1, 1),))
    for count in (0, -3, 2.0):
        with pytest.raises((TypeError, ValueError), match="prompt_tokens must be"):
            Trace("prompt", (Arrival(0.0, count, 1),))
        with pytest.raises((TypeError, ValueError), match="output_tokens must be"):
            Trace("output", (Arrival(0.0, 1, count),))
    for rate in (1e-310, 1e-20):
        with pytest.raises(ValueError, match="per_second must be at least 1e-09"):
            poisson(rate, [(1, 1)] * 3)
        with pytest.raises(ValueError, match="nor exceed"):
            Trace("slow", (Arrival(0.0, 1, 1), Arrival(1.0, 1, 1))).rate(rate)
    with pytest.raises(ValueError, match="all requests arrive at once"):
        Trace("once", (Arrival(0.0, 1, 1),) * 2).rate(1.0)


# --- arrivals at random -------------------------------------------------------------------------


def test_poisson_gaps_are_exponential():
    trace = poisson(5.0, [(10, 1)] * 20_001, seed=3)
    gaps = [b.seconds - a.seconds for a, b in pairwise(trace.arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.02)
    assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2 * mean**2, rel=0.05)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)


def test_poisson_depends_on_the_seed_alone():
    lengths = [(10, n + 1) for n in range(50)]
    assert poisson(5.0, lengths, seed=1) == poisson(5.0, lengths, seed=1)
    assert poisson(5.0, lengths, seed=1) != poisson(5.0, lengths, seed=2)
    assert all(round(a.seconds * 1e6) / 1e6 == a.seconds for a in poisson(5.0, lengths).arrivals)
    for *bad, message in (
        (0.0, lengths, "per_second must be greater than 0"),
        (float("inf"), lengths, "per_second must be finite"),
        (1.0, [], "needs at least one request"),
        (1.0, [(0, 1)], "prompt_tokens must be at least 1"),
        (1.0, [(1, 0)], "output_tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            poisson(*bad)


def test_rate_and_head():
    trace = poisson(5.0, [(10, 1)] * 101, seed=3).rate(2.0)
    assert trace.seconds == pytest.approx(50.0)
    assert len(trace.head(7).arrivals) == 7


# --- prefix hits by cache size ------------------------------------------------------------------

# Shares of all ids found by the plain rule in a cache without end, and of 1,000 to 50,000 blocks.
HITS = {
    "mooncake_conversation": (0.366, 0.045, 0.212, 0.355),
    "mooncake_synthetic": (0.640, 0.084, 0.424, 0.640),
}


@pytest.mark.parametrize("name", HITS)
def test_plain_hit_rates_of_the_published_traces(name):
    trace = traces.get(name)
    found = [plain_hit_rate(trace, blocks) for blocks in (None, 1_000, 10_000, 50_000)]
    assert found == pytest.approx(HITS[name], abs=0.005)
    # The engine's rule loses partial blocks and the last block of whole prompts: little here.
    part = trace.head(2_000)
    assert engine_hit_rate(part, 5_000) == pytest.approx(plain_hit_rate(part, 5_000), abs=0.005)


def trace_of(*prompts):
    """A trace of (tokens, ids) in blocks of 4."""
    arrivals = [Arrival(float(n), tokens, 1, ids) for n, (tokens, ids) in enumerate(prompts)]
    return Trace("small", tuple(arrivals), block_tokens=4)


def test_the_two_rules_differ_where_they_should():
    twice = trace_of((8, (1, 2)), (8, (1, 2)))  # full to the end: the last is computed again
    assert (plain_hit_rate(twice), engine_hit_rate(twice, 9)) == (2 / 4, 1 / 4)
    partial = trace_of((7, (1, 2)), (7, (1, 2)))  # a partial block is never cached
    assert (plain_hit_rate(partial), engine_hit_rate(partial, 9)) == (2 / 4, 1 / 4)
    longer = trace_of((8, (1, 2)), (9, (1, 2, 3)))
    assert (plain_hit_rate(longer), engine_hit_rate(longer, 9)) == (2 / 5, 2 / 5)
    gap = trace_of((12, (1, 2, 3)), (12, (1, 9, 3)))  # what stands behind a miss is none
    assert plain_hit_rate(gap) == 1 / 6


def test_a_small_cache_forgets_the_least_recently_used():
    again = trace_of((5, (1, 2)), (5, (3, 4)), (5, (1, 2)))
    assert [plain_hit_rate(again, blocks) for blocks in (2, 3, 4)] == [0, 0, 2 / 6]
    assert [engine_hit_rate(again, blocks) for blocks in (2, 4)] == [0, 1 / 6]
    with pytest.raises(OutOfBlocks):
        engine_hit_rate(again, 1)
    with pytest.raises(ValueError, match="does not tell which blocks"):
        plain_hit_rate(poisson(1.0, [(5, 5)]))
