"""Pictures: well formed, complete, inside their frame, and saying what the state says."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from servelab import markup
from servelab.explore import (
    Header,
    Job,
    Svg,
    Timeline,
    Trace,
    count_blocks,
    draw_cache,
    draw_pool,
    draw_timeline,
    prefixes_of,
    static_batches,
    svg,
    timeline,
)
from servelab.explore.gantt import _NAMES, _shape
from servelab.explore.tables import _runs
from servelab.paging import BlockPool, BlockTable, PoolState, PrefixCache
from servelab.serving import Engine, SamplingParams
from servelab.serving.events import Planned
from tests.serving_world import ShadowRunner

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    '</svg><script>alert("1")</script>',
    "a&b\x00\x1b\ud800\ufffe",
    "\u202eevil",
    "界" * 900,
    "",
]
SIZES = [2, 3, 64, 65, 256, 257, 1001]


def parsed(picture: Svg) -> ElementTree.Element:
    """The picture as a tree; what every picture must be is checked on the way."""
    assert isinstance(picture, str)
    assert picture._repr_html_() == picture
    root = ElementTree.fromstring(picture)
    assert (root.tag, root.get("role")) == (f"{SVG}svg", "img")
    assert root[0].tag == f"{SVG}title"
    assert root[0].text == picture.heading
    if picture.description:
        assert (root[1].tag, root[1].text) == (f"{SVG}desc", picture.description)
    allowed = {"svg", "g", "title", "desc", "text", "rect", "path", "line"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    for element in root.iter():
        assert "id" not in element.attrib, "identifiers would clash on a page of pictures"
        assert not [name for name in element.attrib if name.startswith("on")]
        for name in ("fill", "stroke"):
            known = {None, "none", "currentColor", *svg.OWNERS, *svg.PARTS.values(), svg.NEUTRAL}
            assert element.get(name) in known, "colours come from one place"
    return root


def texts(root: ElementTree.Element) -> list[tuple[float, float, float, float, str]]:
    """Left, top, right and bottom of each text, in the picture's units, and the text."""
    found = []

    def walk(element: ElementTree.Element, x: float, y: float) -> None:
        if moved := re.fullmatch(r"translate\((\S+) (\S+)\)", element.get("transform", "")):
            x, y = x + float(moved[1]), y + float(moved[2])
        if element.tag == f"{SVG}text":
            said, size = element.text or "", float(element.get("font-size", 0))
            width = svg.text_width(said, size)
            shift = {"middle": 0.5, "end": 1.0}.get(element.get("text-anchor", ""), 0.0)
            left = x + float(element.get("x", 0)) - shift * width
            base = y + float(element.get("y", 0))
            found.append((left, base - 0.72 * size, left + width, base, said))
        for child in element:
            walk(child, x, y)

    walk(root, 0, 0)
    return found


def check_layout(root: ElementTree.Element) -> None:
    """No text leaves the frame, none lies on another, none is too small for a phone."""
    _, _, width, height = map(float, root.get("viewBox", "").split())
    assert width == svg.WIDTH
    sizes = [float(e.get("font-size", 0)) for e in root.iter(f"{SVG}text")]
    assert min(sizes, default=9) >= 9
    boxes = sorted(texts(root), key=lambda box: box[1])
    for i, (left, top, right, bottom, said) in enumerate(boxes):
        assert -0.5 <= left <= right <= width + 0.5, f"{said!r} leaves the picture"
        assert 0 <= top <= bottom <= height, f"{said!r} leaves the picture"
        for other in boxes[i + 1 :]:
            if other[1] >= bottom:
                break
            apart = other[0] >= right or other[2] <= left
            assert apart, f"{said!r} and {other[4]!r} overlap"


def busy_pool(
    num_blocks: int, block_size: int, seed: int
) -> tuple[BlockPool, list[BlockTable], dict[int, str]]:
    """A pool after a random history: shared prefixes, forks, copies, frees and evictions."""
    rng, pool = random.Random(seed), BlockPool(num_blocks, block_size)
    cache, tables, names = PrefixCache(pool), [], {}
    for number in range(12):
        prompt = [7] * rng.randrange(0, 2 * block_size + 1) + [number] * rng.randint(
            1, 5 * block_size
        )
        hit, table = cache.lookup(prompt), BlockTable(pool)
        names[table.id] = f"r{number}/0"
        if table.blocks_needed(len(prompt) - hit.num_tokens, hit) > pool.num_free:
            continue
        table.append(len(prompt) - hit.num_tokens, hit)
        cache.publish(table, prompt)
        tables.append(table)
        if number % 3 == 0:
            tables.append(table.fork())
            names[tables[-1].id] = f"r{number}/1"
            if tables[-1].blocks_needed(1) <= pool.num_free and number % 2:
                tables[-1].append(1)
        if rng.random() < 0.4:
            tables.pop(rng.randrange(len(tables))).free()
    return pool, tables, names


def cells(root: ElementTree.Element) -> dict[int, ElementTree.Element]:
    found = [e for e in root.iter(f"{SVG}g") if e.get("class") == "block"]
    blocks = [int(e.get("data-block", "")) for e in found]
    assert len(set(blocks)) == len(blocks), "a block is drawn twice"
    return dict(zip(blocks, found, strict=True))


def hover(element: ElementTree.Element) -> str:
    return element.findtext(f"{SVG}title", "")


@pytest.mark.parametrize("num_blocks", SIZES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_block_is_drawn_once_and_says_what_the_state_says(
    num_blocks: int, block_size: int
) -> None:
    pool, tables, names = busy_pool(num_blocks, block_size, seed=num_blocks)
    state = PoolState.of(pool, tables)
    picture = draw_cache(state, block_size, names, prefixes_of(pool))
    root = parsed(picture)
    check_layout(root)
    drawn = cells(root)
    assert sorted(drawn) == list(range(num_blocks))
    cached = {block for blocks in state.cached.values() for block in blocks}
    for block, refs in enumerate(state.refs):
        said = hover(drawn[block])
        holders = [names[t.id] for t in tables if block in t.blocks]
        assert len(holders) == refs
        if refs > 1:
            assert f"shared by {refs}: {', '.join(holders)};" in said
        elif refs:
            assert f"held by {holders[0]};" in said
        else:
            assert "shared" not in said
            assert "held" not in said
        assert ("the prefix cache finds it" in said) == (block in cached)
        assert ("free" in said) == (block in state.free)
    rows = [e for e in root.iter(f"{SVG}g") if e.get("class") == "table"]
    assert [int(e.get("data-table", "")) for e in rows] == list(state.tables)
    for row, blocks in zip(rows, state.tables.values(), strict=True):
        shown = [int(e.get("data-block", "")) for e in row.iter(f"{SVG}g") if e.get("data-block")]
        assert shown == [*blocks[: len(shown) - 3], *blocks[-3:]] or shown == blocks
    (free,) = [e for e in root.iter(f"{SVG}g") if e.get("class") == "free"] or [None]
    if free is not None:
        shown = [int(e.get("data-block", "")) for e in free if e.get("data-block")]
        assert shown[:2] == state.free[:2]
        assert shown[-1] == state.free[-1]
        assert len(shown) <= 3 * 14, "three rows"
        assert (len(state.free) == len(shown)) or len(shown) == 3 * 14 - 3, "and room for the note"


def test_the_bar_of_a_block_is_as_long_as_its_tokens() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    table = BlockTable(pool)
    table.append(16 + 5)
    drawn = cells(parsed(draw_pool(PoolState.of(pool, [table]), 16)))

    def bar(block: int) -> float:
        rects = [e for e in drawn[block].iter(f"{SVG}rect") if e.get("fill") in svg.OWNERS]
        return sum(float(e.get("width", 0)) for e in rects)

    assert bar(2) / bar(1) == pytest.approx(5 / 16, abs=0.01)
    assert bar(3) == 0


def test_stripes_show_each_of_two_holders_and_the_copy_shows_one() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    parent = BlockTable(pool)
    parent.append(6)
    child = parent.fork()
    before = cells(parsed(draw_pool(PoolState.of(pool, [parent, child]), 4)))
    child.append(1)
    after = cells(parsed(draw_pool(PoolState.of(pool, [parent, child]), 4)))

    def colours(element: ElementTree.Element) -> set[str]:
        return {e.get("fill", "") for e in element.iter()} & set(svg.OWNERS)

    assert colours(before[2]) == {svg.OWNERS[0], svg.OWNERS[1]}
    assert (colours(after[2]), colours(after[3])) == ({svg.OWNERS[0]}, {svg.OWNERS[1]})
    assert "×2" in [e.text for e in before[2].iter(f"{SVG}text")]
    assert "×2" not in [e.text for e in after[2].iter(f"{SVG}text")]


def test_the_numbers_are_those_of_the_pool() -> None:
    pool, tables, names = busy_pool(60, 4, seed=5)
    counts = count_blocks(PoolState.of(pool, tables), 4)
    assert counts.free == pool.num_free
    assert counts.held == sum(refs > 0 for refs in pool.refs)
    assert counts.shared == sum(refs > 1 for refs in pool.refs) > 0
    assert counts.cached == len(pool.index)
    assert counts.cached_free == sum(block in pool.index for block in pool.free_order())
    assert counts.table_tokens == sum(table.num_tokens for table in tables)
    slots = {slot for table in tables for slot in table.slots()}
    assert counts.tokens == len(slots)
    assert counts.unused_slots == counts.held * 4 - len(slots)
    said = draw_pool(PoolState.of(pool, tables), 4, names).description
    for number in (
        counts.held,
        counts.shared,
        counts.free,
        counts.cached_free,
        counts.unused_slots,
    ):
        assert re.search(rf"\b{number}\b", said)


def test_the_prefix_tree_shows_each_cached_block_once_under_its_parent() -> None:
    pool, tables, names = busy_pool(200, 2, seed=3)
    state, prefixes = PoolState.of(pool, tables), prefixes_of(pool)
    runs = list(_runs(state, prefixes))
    assert Counter(key for _, run in runs for key in run) == Counter(list(state.cached))
    path: list[list[str]] = []
    for depth, run in runs:
        path[depth:] = [run]
        parent = prefixes[run[0]][0]
        assert (parent == path[depth - 1][-1]) if depth else (parent not in state.cached)
        assert all(prefixes[low][0] == high for high, low in pairwise(run))
    assert max(depth for depth, _ in runs) >= 1, "the history branches"
    check_layout(parsed(draw_cache(state, 2, names, prefixes)))


def test_a_chain_longer_than_recursion_allows_is_drawn() -> None:
    pool = BlockPool(num_blocks=1500, block_size=1)
    cache, table = PrefixCache(pool), BlockTable(pool)
    prompt = [1] * 1400
    table.append(1400, cache.lookup(prompt))
    cache.publish(table, prompt)
    state = PoolState.of(pool, [table])
    check_layout(parsed(draw_cache(state, 1, {0: "long"}, prefixes_of(pool))))


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_a_picture(name: str) -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    table = BlockTable(pool)
    table.append(7)
    picture = draw_cache(
        PoolState.of(pool, [table, table.fork()]), 4, {0: name, 1: name}, title=name or "none"
    )
    root = parsed(picture)
    check_layout(root)
    assert markup.clean(name) in hover(cells(root)[1])
    engine, trace = traced(block_size=4, num_blocks=40)
    engine.add([1, 2, 3], SamplingParams(max_tokens=2, n=2, seed=1), request_id=name)
    while engine.unfinished:
        engine.step()
    check_layout(parsed(draw_timeline({name: timeline(trace.events)}, title=name or "none")))


# --- colours --------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("background", ["#ffffff", "#14181e"])  # of the theme, light and dark
@pytest.mark.parametrize("colour", [*svg.OWNERS, *svg.PARTS.values(), svg.NEUTRAL])
def test_colours_are_told_from_the_background(colour: str, background: str) -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast(colour, background) >= 3


def test_colour_is_never_the_only_sign() -> None:
    plain = [re.sub(r' fill="#\w+"', "", _shape(kind, 0, 50, 12)) for kind in _NAMES]
    assert len(set(plain)) == len(_NAMES), "spans differ in shape, with their colours taken away"
    assert len(set(svg.OWNERS)) == len(svg.OWNERS)


# --- timelines ------------------------------------------------------------------------------------


def traced(
    num_blocks: int = 30, block_size: int = 4, seqs: int = 4, swap: int = 0
) -> tuple[Engine, Trace]:
    trace = Trace(Header(block_size, num_blocks, swap, token_budget=24, max_seqs=seqs))
    engine = Engine(
        ShadowRunner(),
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=24,
        max_num_seqs=seqs,
        num_swap_blocks=swap,
        sink=trace,
    )
    return engine, trace


def served(swap: int = 0, num_requests: int = 14) -> tuple[Engine, Trace, list]:
    engine, trace = traced(swap=swap, num_blocks=26)
    rng, requests = random.Random(4), []
    for number in range(num_requests):
        prompt = [rng.randint(1, 6) for _ in range(rng.randint(3, 40))]
        params = SamplingParams(
            n=3 if number == 1 else 1, seed=number, max_tokens=rng.randint(3, 30), ignore_eos=True
        )
        requests.append(engine.add(prompt, params, request_id=f"r{number}"))
    while engine.unfinished:
        engine.step()
    return engine, trace, requests


@pytest.mark.parametrize("swap", [0, 30])
@pytest.mark.parametrize("unit", ["steps", "seconds"])
def test_lanes_and_bars_agree_with_the_engines_own_account(swap: int, unit: str) -> None:
    engine, trace, requests = served(swap)
    run = timeline(trace.events, unit, budget=24)
    lanes = {lane.name: lane for lane in run.lanes}
    assert sum(run.tokens.values()) == engine.counters.computed_tokens
    assert len(run.bars) == engine.counters.steps
    assert run.end == engine.clock_seconds  # the shadow's steps take a second each
    assert all(bar.tokens <= 24 for bar in run.bars)
    assert run.tokens["padding"] == 0
    for request in requests:
        first = lanes[f"{request.id}/0"]
        assert request.times.first_scheduled is not None
        waited = request.times.first_scheduled - request.times.arrival
        assert first.length("waiting") == waited
        ends = [lanes[s.name].finished for s in request.sequences]
        assert max(end for end in ends if end is not None) == request.times.last_token
        lost = sum(lanes[s.name].preempted for s in request.sequences)
        moved = sum(lanes[s.name].swapped for s in request.sequences)
        assert lost + moved == request.num_preemptions
        for sequence in request.sequences:
            spans = lanes[sequence.name].spans
            assert all(a.stop <= b.start for a, b in pairwise(spans))
    both = engine.counters.preemptions_by_recompute, engine.counters.preemptions_by_swap
    kinds = sum(lane.preempted for lane in run.lanes), sum(lane.swapped for lane in run.lanes)
    assert kinds == both
    assert max(both) > 0
    siblings = [lane.name for lane in run.lanes if lane.name.startswith("r1/")]
    place = [lane.name for lane in run.lanes].index("r1/0")
    assert [lane.name for lane in run.lanes[place : place + 3]] == siblings
    root = parsed(draw_timeline(run))
    check_layout(root)
    drawn = [hover(e) for e in root.iter(f"{SVG}g") if e.get("class") == "lane"]
    assert [said.split(":")[0] for said in drawn] == [lane.name for lane in run.lanes]


def test_a_victim_that_comes_back_in_the_same_step_is_counted_too() -> None:
    """What it computed is still in the prefix cache; its lane has no span of length 0."""
    trace = Trace(Header(block_size=4, num_blocks=12))
    engine = Engine(ShadowRunner(), num_blocks=12, block_size=4, sink=trace)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.generate([[number % 3, 1, 2, 3, 4] for number in range(8)], params)
    run, counted = timeline(trace), engine.counters.preemptions_by_recompute
    spans = sum(span.kind == "preempted" for lane in run.lanes for span in lane.spans)
    assert spans < counted
    assert sum(lane.preempted for lane in run.lanes) == counted
    assert f"; pre-empted {counted} times." in draw_timeline(run).description


def test_events_are_no_picture_yet() -> None:
    _, trace, _ = served(num_requests=2)
    assert timeline(trace) == timeline(trace.events)
    for wrong in (trace, trace.events, {"a run": trace.events}, None):
        with pytest.raises(TypeError, match=r"make one with timeline\(events\)"):
            draw_timeline(wrong)


def test_static_batching_computes_for_those_that_have_finished() -> None:
    rng = random.Random(2)
    jobs = [Job(f"r{i}", rng.randint(1, 40), rng.randint(1, 30)) for i in range(11)]
    events = static_batches(jobs, batch_size=4, seconds=lambda pairs: 0.5)
    run = timeline(events, "seconds")
    batches = [jobs[i : i + 4] for i in range(0, 11, 4)]
    longest = [max(job.output_tokens for job in batch) for batch in batches]
    assert len(run.bars) == sum(longest)
    assert run.end == 0.5 * sum(longest)
    assert run.tokens == {
        "prefill": sum(job.prompt_tokens for job in jobs),
        "decode": sum(job.output_tokens - 1 for job in jobs),
        "padding": sum(
            most - job.output_tokens
            for batch, most in zip(batches, longest, strict=True)
            for job in batch
        ),
    }
    assert Trace(Header(16, 2), events).state_at(len(events)).steps == sum(longest)


def test_static_batching_waits_for_who_has_arrived() -> None:
    jobs = [Job("late", 2, 2, 10.0), Job("a", 2, 3), Job("b", 2, 1, 0.5)]
    events = static_batches(jobs, batch_size=8, seconds=lambda pairs: 1.0)
    run = timeline(events, "seconds")
    assert [
        (lane.name, lane.began, lane.length("waiting"), lane.finished) for lane in run.lanes
    ] == [
        ("a", 0.0, 0, 3.0),
        ("b", 0.5, 2.5, 4.0),
        ("late", 10.0, 0, 12.0),
    ]
    pairs = [row[1:3] for event in events if isinstance(event, Planned) for row in event.rows]
    assert pairs == [(2, 0), (1, 2), (1, 3), (2, 0), (2, 0), (1, 2)]
    with pytest.raises(ValueError, match="twice given: a"):
        static_batches([Job("a", 1, 1), Job("a", 2, 2)], 2, lambda pairs: 1.0)
    with pytest.raises(ValueError, match="batch_size"):
        static_batches(jobs, 0, lambda pairs: 1.0)
    assert static_batches([], 2, lambda pairs: 1.0) == []


def test_static_and_continuous_stand_on_one_scale() -> None:
    _, trace, requests = served()
    single = [r for r in requests if len(r.sequences) == 1]
    jobs = [Job(r.id, r.num_prompt_tokens, r.num_generated) for r in single]
    static = timeline(static_batches(jobs, 4, lambda pairs: 1.0), "seconds")
    continuous = timeline(trace.events, "seconds", budget=24)
    picture = draw_timeline({"static": static, "continuous": continuous}, "Two engines")
    root = parsed(picture)
    check_layout(root)
    assert "static: 13 sequences" in picture.description
    assert "continuous: 16 sequences" in picture.description
    ends = [
        max(float(e.get("d", "").split()[0][1:]) for e in paths)
        for paths in _ticks_by_timeline(root, [len(static.lanes), len(continuous.lanes)])
    ]
    plot = svg.WIDTH - 6 - 74
    longest = max(static.end, continuous.end)
    assert ends == pytest.approx(
        [74 + plot * run.end / longest for run in (static, continuous)], abs=0.01
    )
    with pytest.raises(ValueError, match="one unit"):
        draw_timeline({"a": static, "b": timeline(trace.events, "steps")})


def _ticks_by_timeline(root: ElementTree.Element, counts: list[int]) -> list[list]:
    lanes = [e for e in root.iter(f"{SVG}g") if e.get("class") == "lane"]
    paths = [[p for p in lane.iter(f"{SVG}path") if p.get("stroke")] for lane in lanes]
    flat = [path for found in paths for path in found]
    assert len(flat) == sum(counts)
    return [flat[: counts[0]], flat[counts[0] :]]


@pytest.mark.parametrize("num_requests", [0, 1, 30, 120, 450])
def test_any_number_of_lanes_fits(num_requests: int) -> None:
    jobs = [Job(f"request-{i}", 10 + i % 7, 1 + i % 13) for i in range(num_requests)]
    run = timeline(static_batches(jobs, 32, lambda pairs: 0.013), "seconds")
    root = parsed(draw_timeline(run))
    check_layout(root)
    lanes = [e for e in root.iter(f"{SVG}g") if e.get("class") == "lane"]
    assert len(lanes) == min(200, num_requests)
    if num_requests > 200:
        assert f"and {num_requests - 200} sequences more" in [t[4] for t in texts(root)]


def test_an_empty_timeline_and_an_unfinished_run_are_drawn() -> None:
    assert math.isclose(Timeline("steps", (), ()).end, 0)
    check_layout(parsed(draw_timeline(Timeline("steps", (), ()))))
    check_layout(parsed(draw_timeline({})))
    engine, trace = traced()
    for name in ("runs", "waits"):
        engine.add([1] * 20, SamplingParams(max_tokens=9, ignore_eos=True), request_id=name)
    engine.step()
    runs, waits = timeline(trace.events).lanes
    assert (runs.finished, waits.finished) == (None, None)
    assert [span.kind for span in waits.spans][:1] in (["waiting"], ["prefill"])
    check_layout(parsed(draw_timeline(timeline(trace.events))))
    with pytest.raises(ValueError, match="unit must be"):
        timeline(trace.events, "hours")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget must be at least 1, got -1"):
        timeline(trace.events, budget=-1)


def test_attributes_are_escaped_too() -> None:
    element = ElementTree.fromstring(markup.element("g", class_=HOSTILE[0], data_name='"\x00<&'))
    assert element.attrib == {"class": HOSTILE[0], "data-name": '"\ufffd<&'}


def test_a_picture_has_a_name() -> None:
    with pytest.raises(ValueError, match="needs a title"):
        draw_timeline({}, title=" ")


def test_a_picture_is_the_same_every_time() -> None:
    _, trace, _ = served()
    place = trace.ends[20]

    def picture() -> str:
        state = trace.state_at(place).device
        return draw_cache(state, 4, trace.names, trace.prefixes) + draw_timeline(
            timeline(trace.events)
        )

    assert picture() == picture()
    check_layout(parsed(draw_cache(trace.state_at(place).device, 4, trace.names, trace.prefixes)))
