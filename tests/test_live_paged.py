"""The explorers of the paged cache: a recorded run in both directions, and a pool of one's own."""

from __future__ import annotations

import random
from collections import Counter
from xml.etree import ElementTree

import pytest

from servelab.allocation.layouts import Occupancy
from servelab.explore import Load, blocks_in, count_blocks, occupancies
from servelab.explore.pool import blocks_of
from servelab.live import paged, pool
from servelab.live.panel import Answer, Panel
from servelab.live.playground import Operation, Playground, Refused
from servelab.live.pool import OPENING, Play, Setup
from servelab.live.questions import questions
from servelab.live.scenarios import KINDS, SCENARIOS, Recorded, recorded
from servelab.paging import NULL_BLOCK, BlockPool, BlockTable, OutOfBlocks, PoolState, PrefixCache
from servelab.serving.events import Admitted, Finished, Forked, Planned, Preempted
from tests.paged_world import verify_pool

each_scenario = pytest.mark.parametrize("name", SCENARIOS)


class Page:
    """A page as its script keeps it: a form, and the answers that change it."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self.values = panel.values()
        self.options = {c.name: c.options for c in panel.controls if hasattr(c, "options")}
        self.shown = self.ask("")
        self.check_html()

    def ask(self, action: str, **changes: str) -> Answer:
        self.values.update(changes)
        self.shown = self.panel.answer(dict(self.values), action)
        assert set(self.shown.values) <= set(self.values)
        self.values.update(self.shown.values)
        self.options.update(self.shown.options)
        for name, options in self.options.items():
            assert self.values[name] in dict(options), (name, self.values[name])
        return self.shown

    def guess(self, said: str) -> None:
        (value,) = (value for value, text in self.options["guess"] if text == said)
        self.ask("", guess=value)

    def check_html(self) -> None:
        for html in self.shown.parts.values():
            for drawn in ElementTree.fromstring(f"<div>{html}</div>").iter():
                assert not drawn.get("width", "0").startswith("-"), html


# --- recorded runs ------------------------------------------------------------------------------


@each_scenario
def test_a_scenario_is_recorded_twice_alike_and_plays_back(name: str) -> None:
    run = recorded(name)
    again = recorded.__wrapped__(name)
    assert again is not run
    assert again.trace.to_json() == run.trace.to_json()
    assert set(run.kinds) <= set(KINDS)
    assert run.trace.state_at(len(run.words)).device.refs == [0] * (run.scenario.num_blocks + 1)


def test_scenarios_show_what_they_promise() -> None:
    kinds = {name: Counter(recorded(name).kinds) for name in SCENARIOS}
    events = {name: recorded(name).trace.events for name in SCENARIOS}
    assert sum(isinstance(event, Admitted) for event in events["growing"]) == 2
    assert not {"fork", "hit", "copy", "preempt"}.intersection(kinds["growing"])
    # Three samples of one prompt share its blocks, and all but the last writer copy.
    assert sum(isinstance(event, Forked) for event in events["sampling"]) == 2
    assert [len(e.copies) for e in events["sampling"] if isinstance(e, Planned)][1] == 2
    assert max(max(recorded("sampling").trace.state_at(i).device.refs) for i in range(40)) == 3
    # One hit while the blocks are held, one after they were released, and evictions between them.
    assert kinds["prefix"]["hit"] == 4
    held = [e.old for e in events["prefix"] if getattr(e, "reason", "") == "hit"]
    assert held == [1, 1, 0, 0]
    places = [i for i, kind in enumerate(recorded("prefix").kinds) if kind in ("hit", "evict")]
    assert [recorded("prefix").kinds[i] for i in places[1:4]] == ["hit", "evict", "evict"]
    for name, mode in (("preempt", "recompute"), ("swap", "swap")):
        assert [e.mode for e in events[name] if isinstance(e, Preempted)] == [mode]
        assert [e.back_from for e in events[name] if isinstance(e, Admitted)][-1] == mode
        assert sum(isinstance(event, Finished) for event in events[name]) == 3


@pytest.mark.parametrize("name", ["sampling", "prefix", "swap"])  # each kind of event
def test_steps_forward_and_back_return_the_same_pictures(name: str) -> None:
    page = Page(paged.panel(name))
    page.ask("", place="0")
    answers = [page.shown]
    while "step" not in page.shown.off:
        answers.append(page.ask("step"))
        page.check_html()
    run = recorded(name)
    assert len(answers) == len(run.words) + 1
    assert all(words in answers[i + 1].words for i, words in enumerate(run.words))
    for expected in reversed(answers[:-1]):
        assert page.ask("back") == expected
    assert "back" in page.shown.off
    middle = len(answers) // 2
    assert Page(paged.panel(name)).ask("", place=str(middle)) == answers[middle]


@each_scenario
def test_every_next_event_of_every_kind_is_found(name: str) -> None:
    page, run = Page(paged.panel(name)), recorded(name)
    assert [kind for kind, _ in page.options["kind"]] == [
        f"{name}/{kind}" for kind in KINDS if kind in run.kinds
    ]
    for kind in set(run.kinds):
        page.ask("", place="0")
        for place in [i for i, each in enumerate(run.kinds) if each == kind][:3]:
            page.ask("next", kind=f"{name}/{kind}")
            assert page.values["place"] == str(place + 1)
        last = max(i for i, each in enumerate(run.kinds) if each == kind)
        page.ask("next", place=str(last + 1))
        assert page.values["place"] == str(last + 1)
        assert "No event of this kind is left" in page.shown.words


@each_scenario
def test_a_click_and_the_choice_show_the_same_history(name: str) -> None:
    page, run = Page(paged.panel(name)), recorded(name)
    last = len(run.words)
    for block in range(1, run.scenario.num_blocks + 1):
        clicked = page.ask(f"block:{block}", place=str(last), block="")
        assert page.values["block"] == str(block)
        assert page.ask("", block=str(block)) == clicked
        told = run.trace.history(block)
        assert told == [i for i, event in enumerate(run.trace.events) if block in blocks_in(event)]
        lines = [
            line.text or ""
            for line in ElementTree.fromstring(f"<div>{clicked.parts['history']}</div>").iter("li")
        ]
        expected = [f"Event {i + 1}: {run.words[i]}." for i in told] or ["Nothing yet."]
        assert lines[-len(expected[-20:]) :] == expected[-20:]
        assert f'data-action="block:{block}"' in clicked.parts["cache"]
    assert 'data-action="block:0"' not in page.shown.parts["cache"]
    assert page.ask("block:999").values["block"] == page.values["block"]


def test_another_scenario_opens_at_its_own_place() -> None:
    form = paged.panel("sampling").values() | {"place": "3"}
    assert paged.panel().answer(form, "").values["place"] == "3"
    form["scenario"] = "swap"
    assert paged.panel().answer(form, "").values["place"] == str(recorded("swap").opening)
    page = Page(paged.panel())
    for name in [*SCENARIOS, *reversed(SCENARIOS)]:
        page.ask("", scenario=name, block="9", ask="")
        assert page.values["place"] == str(recorded(name).opening)
        assert page.values["kind"] == f"{name}/{SCENARIOS[name].wanted}"
        assert page.shown.stops["place"][-1] == str(len(recorded(name).words))
        assert ("host" in page.shown.parts) == (name == "swap")


# --- questions ----------------------------------------------------------------------------------


@each_scenario
def test_each_question_is_answered_by_what_follows(name: str) -> None:
    run = recorded(name)
    asked = questions(run)
    assert asked
    for question in asked.values():
        assert question.answer in question.options
        assert len(question.options) > 1
        until = run.trace.events[question.until - 1]
        kinds = run.kinds[question.at : question.until]
        if isinstance(until, Planned) and until.copies:
            assert question.answer == str(len(until.copies)) == str(kinds.count("copy"))
        elif isinstance(until, Planned):
            assert question.answer == str(kinds.count("allocate"))
        elif isinstance(until, Admitted):
            assert question.answer == str(kinds.count("hit"))
            assert kinds.count("add") == kinds.count("hit") + kinds.count("allocate")
        elif isinstance(until, Preempted):
            assert question.answer == until.sequence
            assert not run.trace.state_at(question.at).device.free
        else:
            assert {int(question.answer)} == blocks_in(until)
            assert kinds in (("allocate",), ("evict",))


@each_scenario
def test_the_reader_is_asked_before_it_happens(name: str) -> None:
    page, run = Page(paged.panel(name)), recorded(name)
    asked, told, turns = questions(run), [], 0
    page.ask("", place="0", ask="on")
    page.check_html()
    while page.values["place"] != str(len(run.words)):
        question = asked.get(int(page.values["place"]))
        if question is None:
            assert {"guess", "reveal"} <= set(page.shown.off)
            page.ask("step")
            continue
        assert question.text in page.shown.words
        assert {"step", "next"} <= set(page.shown.off)
        assert [said for _, said in page.options["guess"]] == ["choose", *question.options]
        assert ("Free blocks" in page.shown.parts["cache"]) == (not question.hides)
        assert page.ask("step").values["place"] == str(question.at)
        wrong = next(option for option in question.options if option != question.answer)
        guess = ("choose", question.answer, wrong)[turns % 3]
        page.guess(guess)
        assert dict(page.options["guess"])[page.values["guess"]] == guess
        words = page.ask("reveal").words
        assert words.startswith(("The answer", "Right", "Not")[turns % 3])
        assert question.answer in words
        assert question.why in words
        assert page.values["place"] == str(question.until)
        told.append(question.at)
        turns += 1
    assert told == [at for at in asked if not any(asked[b].at < at < asked[b].until for b in told)]


def test_the_next_event_of_a_kind_stops_at_its_question() -> None:
    page = Page(paged.panel("preempt"))
    page.ask("next", place="0", kind="preempt/preempt", ask="on")
    assert "Who gives its blocks up?" in page.shown.words
    page.guess("C/0")
    assert page.ask("reveal").words.startswith("Right: C/0.")


def test_a_guess_is_forgotten_where_its_question_is_left() -> None:
    """Two questions of a run may offer the same answers; a guess at one is none at the other."""
    first, second, *_ = questions(recorded("growing"))
    for change in ({"place": str(second)}, {"place": "0"}, {"ask": ""}, {"scenario": "swap"}):
        page = Page(paged.panel())
        page.ask("", place=str(first), ask="on")
        page.guess("2")
        page.ask("block:1")  # to look at a block leaves the guess
        assert dict(page.options["guess"])[page.values["guess"]] == "2"
        page.ask("", **change)
        assert page.values["guess"] == ""


# --- bars ---------------------------------------------------------------------------------------


@each_scenario
def test_bars_hold_the_same_sequences(name: str) -> None:
    page, run = Page(paged.panel(name)), recorded(name)
    slots = run.scenario.num_blocks * run.scenario.block_size
    for place in range(0, len(run.words) + 1, 7):
        said = str(page.ask("", place=str(place)).parts["waste"].description)  # type: ignore[attr-defined]
        bars = [bar.split(": ")[1] for bar in said.rstrip(".").split("; ") if ": " in bar]
        assert len(bars) == 4 + ("as here" in said)
        for bar in bars:
            assert sum(int(part.split()[0]) for part in bar.split(", ")) == slots, said
        state = run.trace.state_at(place).device
        assert ("no sequence to hold" in said) == (not state.lengths)
        counts = count_blocks(state, run.scenario.block_size)
        if counts.tokens == counts.table_tokens and len(state.lengths) == len(state.tables):
            assert counts.tokens == sum(state.lengths.values())


def test_bars_are_those_of_the_layouts() -> None:
    fits = occupancies([Load(7, 9, 12), Load(5, 12, 6)], num_blocks=16, block_size=4, max_tokens=32)
    assert {name: fit.occupancy for name, fit in fits.items()} == {
        "max": Occupancy(held=18, reserved=15, internal=31, rounding=0, free=0),
        "power-of-two": Occupancy(held=18, reserved=15, internal=11, rounding=20, free=0),
        "oracle": Occupancy(held=18, reserved=15, internal=0, rounding=15, free=16),
        "paged": Occupancy(held=18, reserved=0, internal=2, rounding=0, free=44),
    }


def test_a_load_is_checked() -> None:
    with pytest.raises(ValueError, match="from 5 to 8, got 9"):
        Load(5, 3, 9)
    assert occupancies([Load(30, 10, 30)], 4, 4, max_tokens=64)["paged"].fit == 0


# --- a pool of one's own ------------------------------------------------------------------------


def checked(play: Playground) -> None:
    """What is told of the pool is the pool."""
    tables = [sequence.table for sequence in play.sequences.values()]
    verify_pool(play.pool, tables)
    assert play.state.device == PoolState.of(play.pool, tables)
    for sequence in play.sequences.values():
        assert len(sequence.words) == sequence.table.num_tokens


def random_action(page: Page, draw: random.Random) -> str:
    prompts = ["", "0", "-4", "1", "3", "9", "700", "to be or not to be", "to be or else", "a"]
    page.values["prompt"] = draw.choice(prompts)
    page.values["tokens"] = draw.choice(["1", "1", "2", "5", "32"])
    page.values["sequence"] = draw.choice(page.options["sequence"])[0]
    return draw.choice(["add", "add", "append", "append", "append", "fork", "abort", "block:1"])


@pytest.mark.parametrize("seed", range(8))
def test_free_play_keeps_its_pool_whole_and_can_be_taken_back(seed: int) -> None:
    draw = random.Random(seed)
    page = Page(pool.panel())
    play: Play = page.panel.answer.__self__  # type: ignore[attr-defined]
    size = {"blocks": draw.choice(pool._POOLS), "size": draw.choice(pool._SIZES)}
    page.ask("", **size)
    seen = [(page.shown.parts["cache"], play.play.state.copy())]
    for _ in range(40):
        before = play.play.state.copy(), play.setups[-1], len(play.play.told)
        page.ask(random_action(page, draw))
        checked(play.play)
        page.check_html()
        if play.setups[-1] == before[1]:
            assert (play.play.state, play.setups[-1], len(play.play.told)) == before
        else:
            assert not page.shown.words.startswith("Refused")
            seen.append((page.shown.parts["cache"], play.play.state.copy()))
    page.ask("", block="")
    for picture, state in reversed(seen[:-1]):
        page.ask("back")
        checked(play.play)
        assert play.play.state == state
        if page.values["block"] == "" and 'stroke-width="1.4"' not in picture:
            assert page.shown.parts["cache"] == picture
    while "back" not in page.shown.off:
        page.ask("back")
    assert play.setups == [Setup(12, 4)]
    assert page.ask("back").words == "An empty pool of 12 blocks."


@pytest.mark.parametrize("seed", range(6))
def test_free_play_equals_a_direct_driver(seed: int) -> None:
    draw = random.Random(seed)
    play, events = Playground(10, 4), []
    blocks = BlockPool(11, 4, sink=events.append)
    cache, tables = PrefixCache(blocks), {}
    ids: dict[str, int] = {}

    def numbers(words: list[str]) -> list[int]:
        return [ids.setdefault(word, len(ids)) for word in words]

    BlockTable(blocks)  # the playground keeps one, to ask
    for turn in range(80):
        names = list(play.sequences)
        kind = draw.choice(["add", "append", "fork", "abort"]) if names else "add"
        name, tokens = (draw.choice(names) if names else ""), draw.randint(1, 6)
        prompt = " ".join(draw.choice("aaaaaaab") for _ in range(draw.randint(1, 12)))
        told = len(play.told)
        try:
            play.do(Operation(kind, name, tokens, prompt))
        except Refused:
            assert len(play.told) == told == len(events)
            if kind == "append":
                with pytest.raises(OutOfBlocks):
                    tables[name][0].append(tokens)
            continue
        if kind == "add":
            words = prompt.split()
            hit = cache.lookup(numbers(words))
            table = BlockTable(blocks)
            table.append(len(words) - hit.num_tokens, hit)
            cache.publish(table, numbers(words))
            tables[list(play.sequences)[-1]] = table, words
        elif kind == "append":
            table, words = tables[name]
            table.append(tokens)
            words += [f"{name}{len(words) + 1 + i}" for i in range(tokens)]
            cache.publish(table, numbers(words))
        elif kind == "fork":
            table, words = tables[name]
            tables[list(play.sequences)[-1]] = table.fork(), list(words)
        else:
            tables.pop(name)[0].free()
        assert [event for event, _ in play.told] == events, turn
    assert {"hit", "release"} <= {getattr(event, "reason", "") for event in events}


@pytest.mark.parametrize(
    ("size", "prompt", "said"),
    [
        (("1", "1"), "1", "A begins with 1 token: 1 block is taken."),
        (("1", "1"), "2", "2 tokens need 2 blocks of 1 slot, the whole pool has 1"),
        (("1", "4"), "5", "5 tokens need 2 blocks of 4 slots, the whole pool has 1"),
        (("32", "16"), "513", "513 tokens need 33 blocks of 16 slots, the whole pool has 32"),
        (("32", "16"), "9" * 4000, "9 tokens need"),
        (("4", "4"), "word " * 17, "17 tokens need 5 blocks"),
        (("4", "4"), "", "type a number or some words"),
        (("4", "4"), "  \n ", "type a number or some words"),
        (("4", "4"), "0", "at least one token, not 0"),
        (("4", "4"), "-7", "at least one token, not -7"),
        (("4", "4"), "1.5", "A begins with 1 token: 1 block is taken."),
        (("4", "4"), '<b>&"\x00\ud800', "A begins with 1 token: 1 block is taken."),
    ],
)
def test_odd_sizes_give_sentences(size: tuple[str, str], prompt: str, said: str) -> None:
    page = Page(pool.panel())
    page.ask("", blocks=size[0], size=size[1])
    assert {"append", "fork", "abort"} <= set(page.shown.off)
    words = page.ask("add", prompt=prompt).words
    assert said in words
    assert words.startswith("Refused: ") == ("begins with" not in said)
    assert words.endswith("Nothing has changed.") == words.startswith("Refused: ")


def test_a_full_pool_refuses_and_says_what_it_lacks() -> None:
    page = Page(pool.panel())
    page.ask("", blocks="2", size="4")
    page.ask("add", prompt="7")
    assert page.ask("append", tokens="2").words == (
        "Refused: 1 free block would be needed, the pool has 0. Nothing has changed."
    )
    page.ask("append", tokens="1")
    page.ask("fork")
    assert "1 free block would be needed" in page.ask("append", tokens="1").words
    for action in ("append", "fork", "abort"):
        refused = page.ask(action, sequence="Z").words
        assert refused == "Refused: no such sequence is there: add one first. Nothing has changed."
        page.values["sequence"] = "A"


def test_the_opening_shows_a_copy_and_a_hit() -> None:
    play, said = Setup(12, 4, OPENING).play()
    assert said == "C begins with 8 tokens: the prefix cache has 1 block of it, 1 block is taken."
    assert play.pool.refs[1] == 3
    assert [words for _, words in play.told if "copied" in words] == [
        "B writes into block 2, shared by 2: copied to block 3"
    ]
    assert play.prefixes.popitem()[1][1] == ("days", "ago", "we", "met")


def test_a_pool_in_which_nothing_was_done_cannot_be_emptied() -> None:
    page = Page(pool.panel())
    assert "clear" not in page.shown.off
    emptied = page.ask("clear")
    assert "clear" in emptied.off
    assert page.ask("clear") == emptied  # pressed twice, before the page could know
    assert page.ask("back").words.startswith("C begins")  # each "Take back" takes something back
    page.ask("", blocks="2")
    assert "clear" in page.shown.off
    page.ask("add", prompt="3")
    page.ask("abort")
    assert "clear" not in page.shown.off  # what was published would be found


def test_there_is_an_end_to_names_and_operations() -> None:
    page = Page(pool.panel())
    page.ask("clear")
    page.ask("add", prompt="3")
    for _ in range(25):
        page.ask("fork")
    assert "26 sequences are enough" in page.ask("fork").words
    page.ask("abort", sequence="B")
    assert page.ask("fork", sequence="A").words.startswith("A1 begins as a copy of A")
    page.ask("clear")
    for _ in range(100):
        page.ask("add", prompt="3")
        page.ask("abort", sequence=page.values["sequence"])
    assert "200 operations are enough" in page.ask("add").words


def test_a_run_is_what_its_type_says() -> None:
    assert isinstance(recorded("growing"), Recorded)
    with pytest.raises(KeyError):
        recorded("nothing")


@each_scenario
def test_after_each_event_every_block_is_held_free_or_between(name: str) -> None:
    run = recorded(name)
    cursor, size = run.trace.cursor(), run.trace.header.block_size
    for place in range(len(run.trace.events) + 1):
        device = cursor.move_to(place).device
        counts = count_blocks(device, size)
        assert counts.held + counts.between + counts.free == counts.blocks
        free = {view.block for view in blocks_of(device, size) if view.is_free}
        assert free - {NULL_BLOCK} == set(device.free)


def test_a_block_that_was_just_taken_is_not_called_free() -> None:
    """The first picture of the chapter: the event takes block 7, no table has it yet."""
    answer = paged.panel().first()
    assert "block 7, the first of the free ones, is taken" in answer.words
    picture = answer.parts["cache"]
    assert "block 7: in no table, 0 of 4 slots written; reference count 1" in picture
    assert "block 7: free" not in picture
    assert "6 held, 1 in no table, 9 free" in picture
