"""Traces: what folds, what goes back, what a file says, and what an event says in words."""

from __future__ import annotations

import json
import re
from importlib import resources
from itertools import pairwise

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servelab.explore import Header, Trace, kind_of, next_of, say, say_event, timeline
from servelab.explore.codec import KINDS, decode, encode
from servelab.explore.state import RunState
from servelab.paging import BlockPool, BlockTable, OutOfBlocks, PoolState, PrefixCache
from servelab.serving import Engine, Plan, SamplingParams, State
from servelab.serving.request import table_of
from tests.paged_world import World
from tests.serving_world import ShadowRunner

BLOCK_SIZE = 2
OPERATIONS = ["start", "extend", "fork", "truncate", "free", "epoch"]
HISTORY = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(1, 7)))


def play(world: World, operation: str, which: int, how_many: int) -> None:
    """One operation on a world; refusals change nothing and are left out."""
    request = world.running[which % len(world.running)] if world.running else None
    try:
        if operation == "start" or request is None:
            world.start([i % 3 for i in range(how_many)])
        elif operation == "extend":
            world.extend(request, [which % 3] * how_many)
        elif operation == "fork":
            world.fork(request)
        elif operation == "truncate":
            world.truncate(request, request.table.num_tokens // 2)
        elif operation == "free":
            world.free(request)
        else:
            world.cache.new_epoch()
    except OutOfBlocks:
        pass


@settings(max_examples=60, deadline=None)
@given(history=HISTORY, moves=st.lists(st.floats(0, 1), max_size=12))
def test_a_pool_alone_folds_to_its_live_states_and_back(
    history: list[tuple[str, int, int]], moves: list[float]
) -> None:
    world = World(num_blocks=9, block_size=BLOCK_SIZE)
    live = {0: world.state()}
    for operation in history:
        play(world, *operation)
        live[len(world.log)] = world.state()
    trace = Trace(Header(BLOCK_SIZE, num_blocks=9), world.log)
    assert {place: trace.state_at(place).device for place in live} == live
    cursor = trace.cursor(len(world.log))
    for place in [*(round(move * len(world.log)) for move in moves), *reversed(live)]:
        assert cursor.move_to(place) == trace.state_at(place)
        if place in live:
            assert cursor.state.device == live[place]
    assert cursor.state == RunState.empty(9)
    assert Trace.from_json(trace.to_json()).events == world.log


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=14), st.integers(1, 9), st.integers(1, 3)
    ),
    min_size=1,
    max_size=7,
)


def traced(
    num_blocks: int = 14,
    num_swap_blocks: int = 0,
    budget: int = 12,
    seqs: int = 4,
    runner: ShadowRunner | None = None,
) -> tuple[Engine, Trace]:
    header = Header(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        token_budget=budget,
        max_seqs=seqs,
        model="shadow",
    )
    trace = Trace(header)
    engine = Engine(
        runner or ShadowRunner(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        num_swap_blocks=num_swap_blocks,
        sink=trace,
    )
    return engine, trace


def add(engine: Engine, prompt: list[int], max_tokens: int, n: int, name: str) -> None:
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=len(prompt), ignore_eos=True)
    engine.add(prompt, params, request_id=name)


def live_state(engine: Engine) -> tuple[PoolState, PoolState | None, dict[str, State]]:
    scheduler = engine.scheduler
    device = PoolState.of(scheduler.pool, [table_of(s) for s in scheduler.running])
    swapped = [s.table for s in scheduler.waiting if s.table is not None]
    host = scheduler.swap_pool and PoolState.of(scheduler.swap_pool, swapped)
    states = {s.name: s.state for r in engine.unfinished for s in r.sequences}
    return device, host, states


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, swap=st.sampled_from([0, 9]), abort_at=st.integers(0, 20))
def test_a_run_folds_to_the_live_engine_after_each_step_and_back(
    requests: list[tuple[list[int], int, int]], swap: int, abort_at: int
) -> None:
    engine, trace = traced(num_swap_blocks=swap)
    seen = {}
    for number, (prompt, max_tokens, n) in enumerate(requests):
        add(engine, prompt, max_tokens, n, f"r{number}")
    while engine.unfinished:
        engine.step()
        if len(seen) == abort_at and engine.unfinished:
            engine.abort(engine.unfinished[0].id)
        seen[len(trace.events)] = (*live_state(engine), engine.clock_seconds, engine.counters.steps)
    cursor = trace.cursor()
    for order in (list(seen), list(reversed(seen))):
        for place in order:
            device, host, states, seconds, steps = seen[place]
            state = cursor.move_to(place)
            assert state == trace.state_at(place)
            assert state.device == device
            assert state.host == (host or PoolState.empty(1))
            assert {name: state.sequences[name].state for name in states} == states
            ended = [s for name, s in state.sequences.items() if name not in states]
            assert all(s.state is State.FINISHED and s.table is None for s in ended if s.reason)
            assert (state.seconds, state.steps) == (seconds, steps)
            assert set(state.names) == set(device.tables), "each table has its sequence"
    assert cursor.move_to(0) == RunState.empty(14, swap)
    again = Trace.from_json(trace.to_json())
    assert (again.events, again.header) == (trace.events, trace.header)
    assert again.to_json() == trace.to_json()


def long_run(swap: int = 0) -> Trace:
    """Shared prefixes, forks, evictions and pre-emptions, over more steps than a keyframe's."""
    engine, trace = traced(num_blocks=26, num_swap_blocks=swap, budget=16, seqs=5)
    for number in range(12):
        prompt = [1, 2, 3, 1, 2, 3, *([number % 3 + 1] * (3 + number))]
        add(
            engine,
            prompt,
            max_tokens=4 + 2 * number,
            n=3 if number in (2, 7) else 1,
            name=f"r{number}",
        )
    while engine.unfinished:
        engine.step()
    assert engine.counters.preemptions_by_swap + engine.counters.preemptions_by_recompute > 3
    return trace


@pytest.mark.parametrize("swap", [0, 30])
def test_a_file_fits_its_schema_and_a_demo_is_small(swap: int) -> None:
    trace = long_run(swap)
    schema = json.loads((resources.files("servelab.explore") / "trace.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    plain = json.loads(trace.to_json())
    assert validator.is_valid({**plain, "steps": plain["steps"][::9]})  # all would take a minute
    assert len(plain["keyframes"]) == len(plain["steps"]) // 32 >= 2
    assert len(trace.to_json()) <= 300_000
    kinds = {event[0] for step in plain["steps"] for event in step["events"]}
    assert kinds >= set(KINDS) - {"epoch", "swap"} | ({"swap"} if swap else set())
    empty = {**plain, "steps": [], "keyframes": []}
    for name in kinds:  # and it is strict: an event with one field more or fewer does not fit
        event = next(e for step in plain["steps"] for e in step["events"] if e[0] == name)
        assert validator.is_valid({**empty, "tail": [event]})
        assert not validator.is_valid({**empty, "tail": [[*event, 0]]})
        assert not validator.is_valid({**empty, "tail": [event[:-1]]})


def test_steps_keyframes_and_checks_follow_from_the_events() -> None:
    trace = long_run()
    assert len(trace.ends) == len(trace.checks) == trace.state_at(len(trace.events)).steps
    assert all(kind_of(trace.events[end - 1]) == "step" for end in trace.ends)
    assert all(start < stop for start, stop in pairwise(trace.ends))
    assert len(set(trace.checks)) > len(trace.checks) // 2, "checks tell states apart"
    recorded = Trace(trace.header)
    for event in trace.events:  # read in the middle of recording, as a live page does
        recorded(event)
        if kind_of(event) == "step":
            assert recorded.ends[-1] == len(recorded.events)
    assert recorded.to_json() == trace.to_json()


def test_times_can_be_left_out_and_then_nothing_depends_on_them() -> None:
    trace = long_run()
    slower = Trace(trace.header, [decode(_slower(encode(event))) for event in trace.events])
    assert slower.to_json() != trace.to_json()
    assert slower.without_seconds().to_json() == trace.without_seconds().to_json()
    assert slower.checks == trace.checks


def _slower(event: list) -> list:
    return [*event[:2], event[2] * 1.7, *event[3:]] if event[0] == "step" else event


def test_a_file_that_contradicts_itself_is_refused() -> None:
    text = long_run().to_json()

    def changed(change) -> str:
        plain = json.loads(text)
        change(plain)
        return json.dumps(plain)

    def other_check(plain) -> None:
        plain["steps"][5]["check"] = "0" * 16

    def lost_event(plain) -> None:
        del plain["steps"][3]["events"][0]

    def other_keyframe(plain) -> None:
        plain["keyframes"][0]["state"]["device"]["refs"][1] += 1

    def other_kind(plain) -> None:
        plain["steps"][0]["events"][0][0] = "hello"

    def no_header(plain) -> None:
        del plain["header"]

    def other_schema(plain) -> None:
        plain["schema"] = 1  # where a block had its predecessor, not its place

    def no_blocks(plain) -> None:
        plain["header"]["num_blocks"] = 1

    assert Trace.from_json(changed(lambda plain: None)).to_json() == text
    for change in (other_check, lost_event, other_keyframe, other_kind, no_header):
        with pytest.raises(ValueError, match=r"step|event|keyframe|lacks"):
            Trace.from_json(changed(change))
    for change in (other_schema, no_blocks):
        with pytest.raises(ValueError, match=r"schema|num_blocks"):
            Trace.from_json(changed(change))
    for text in ("", "[]", "null", "{"):
        with pytest.raises(ValueError):  # noqa: PT011 (two kinds: no JSON, no trace)
            Trace.from_json(text)


def test_an_event_that_does_not_follow_is_named_when_the_trace_is_read() -> None:
    engine, trace = traced()
    add(engine, [1, 2, 3], max_tokens=2, n=1, name="r")
    engine.step()
    stranger = Trace(trace.header, trace.events[1:])  # the arrival is missing
    with pytest.raises(ValueError, match=r"event \d+ does not follow.*never submitted"):
        stranger.state_at(0)
    with pytest.raises(ValueError, match="position must be in 0 to"):
        trace.state_at(len(trace.events) + 1)
    with pytest.raises(ValueError, match="position must be in 0 to"):
        trace.cursor().move_to(-1)


def test_an_empty_trace() -> None:
    trace = Trace(Header(block_size=16, num_blocks=2))
    assert (trace.ends, trace.checks, trace.names, trace.prefixes) == ([], [], {}, {})
    assert Trace.from_json(trace.to_json()).events == []
    assert timeline(trace.events).lanes == ()
    with pytest.raises(ValueError, match="place must be below 0"):
        say(trace, 0)


def test_an_id_that_is_used_again_goes_back_to_its_first_use() -> None:
    engine, trace = traced()
    for _ in range(2):
        add(engine, [1, 2, 3], max_tokens=2, n=1, name="same")
        while engine.unfinished:
            engine.step()
    second = next_of(trace, "submit", 1)
    assert second is not None
    cursor = trace.cursor(second)
    ended = dict(cursor.state.sequences)
    cursor.move_to(len(trace.events))
    assert cursor.move_to(second).sequences == ended
    assert [lane.name for lane in timeline(trace.events).lanes] == ["same/0", "same/0"]


HOSTILE = ['</svg><script>alert("1")</script>', "a&b\x00\x1b\ud800", "\u202eevil", "x" * 5000, ""]


def test_names_of_any_kind_survive_a_file() -> None:
    engine, trace = traced(num_blocks=40)
    for name in HOSTILE:
        add(engine, [1, 2, 3], max_tokens=2, n=2, name=name)
    while engine.unfinished:
        engine.step()
    again = Trace.from_json(trace.to_json())
    assert again.events == trace.events
    assert set(again.names.values()) == {f"{name}/{child}" for name in HOSTILE for child in (0, 1)}


# --- words ----------------------------------------------------------------------------------------


def test_a_copy_on_write_is_told_with_all_its_numbers() -> None:
    trace = Trace(Header(block_size=4, num_blocks=9))
    pool = BlockPool(9, 4, sink=trace)
    parent = BlockTable(pool)
    parent.append(6)
    child = parent.fork()
    ((source, copy),) = child.append(1)
    place = next_of(trace, "copy", 0)
    assert place is not None
    said = f"table 1 writes into block {source}, shared by 2: copied to block {copy}"
    assert say(trace, place) == said
    assert next_of(trace, "copy", place + 1) is None
    assert place in trace.history(source)
    assert place in trace.history(copy)


def test_what_is_cached_and_evicted_is_told() -> None:
    trace = Trace(Header(block_size=2, num_blocks=3))
    pool = BlockPool(3, 2, sink=trace)
    cache, table = PrefixCache(pool), BlockTable(pool)
    table.append(2, cache.lookup([5, 6, 7]))
    cache.publish(table, [5, 6])
    table.free()
    BlockTable(pool).append(4)
    place = next_of(trace, "evict", 0)
    assert place is not None
    assert (
        say(trace, place) == "block 1 is about to be used again: the prefix cache finds it no more"
    )
    assert [kind_of(trace.events[i]) for i in trace.history(1)] == [
        *("allocate", "add", "cache", "drop", "release", "evict", "allocate", "add")
    ]


def test_every_event_of_a_run_has_words_and_names_its_sequence() -> None:
    trace = long_run(swap=30)
    cursor, names, host_names = trace.cursor(), trace.names, trace.host_names
    said = [
        say_event(event, cursor.move_to(place), names, host_names)
        for place, event in enumerate(trace.events)
    ]
    assert all(len(sentence) > 8 for sentence in said)
    assert not [sentence for sentence in said if re.search(r"\btable \d", sentence)]
    assert {kind_of(event) for event in trace.events} >= {
        *("submit", "admit", "return", "preempt", "fork", "finish", "plan", "step", "swap"),
        *("allocate", "hit", "release", "add", "drop", "copy", "grow", "shrink", "cache", "evict"),
    }
    for kind, pattern in (
        ("preempt", r"r\d+/\d is pre-empted: its blocks go to the CPU"),
        ("return", r"r\d+/\d returns from the CPU, \d+ tokens cached"),
        ("finish", r"r\d+/\d ends \(length\)"),
        ("swap", r"on the CPU: block 1, the first of the free ones, is taken"),
        ("plan", r"step 1: 16 tokens of 2 sequences; \d+ wait"),
    ):
        place = next_of(trace, kind, 0)
        assert place is not None
        assert re.fullmatch(pattern, said[place]), said[place]


def test_a_failed_step_is_told_and_costs_its_requests_only() -> None:
    def fault(plan: Plan, done: int) -> None:
        if any(sequence.request.id == "bad" for sequence, *_ in plan.rows):
            raise RuntimeError("no <such> kernel")

    engine, trace = traced(runner=ShadowRunner(fault), seqs=1)
    add(engine, [1, 2], max_tokens=2, n=1, name="bad")
    add(engine, [1, 2], max_tokens=2, n=1, name="good")
    while engine.unfinished:
        engine.step()
    said = [say(trace, place) for place in range(len(trace.events))]
    assert "step 1 fails: RuntimeError: no <such> kernel" in said
    assert "bad/0 ends (error)" in said
    bad, good = timeline(trace.events).lanes
    assert (bad.reason, good.reason, len(timeline(trace.events).bars)) == ("error", "length", 2)
