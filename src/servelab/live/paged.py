"""The explorer of the paged cache: a run of the real engine, forwards and back, event by event.

Models: a place in a recorded run (`servelab.live.scenarios`), chosen by a slider, by single steps
or by the next event of a kind. From it follow the pool with its tables, free order and prefixes,
the same sequences under allocators that reserve one region, and who ran when. A block can be
chosen, by a list or by a click, for its history. On request a question comes before its answer.

Assumes: what a form sends is all there is to know: the panel keeps only what it can make again.

Ignores: runs of the reader's own: `servelab.live.pool` is for those.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache

from servelab.allocation.layouts import Occupancy
from servelab.explore import (
    Cursor,
    Fit,
    Load,
    Pointing,
    blocks_in,
    count_blocks,
    draw_cache,
    draw_pool,
    draw_timeline,
    draw_waste,
    next_of,
    occupancies,
    timeline,
)
from servelab.explore.pool import counted
from servelab.explore.state import RunState
from servelab.live.blocks import block_choice, block_options, chosen_block, list_html
from servelab.live.panel import Answer, Button, Choice, Panel, Slider, Switch, Values, among
from servelab.live.questions import Question, questions
from servelab.live.scenarios import KINDS, SCENARIOS, Recorded, recorded
from servelab.serving.events import Submitted

_NO_GUESS = ("", "choose")


def panel(scenario: str = "growing") -> Panel:
    """Return the explorer, opened at what is worth seeing in a scenario."""
    run = recorded(scenario)
    places = _places(run)
    return Panel(
        "paged",
        "A paged cache, event by event",
        {
            "Run": (
                Choice(
                    "scenario",
                    "Scenario",
                    tuple((name, each.title) for name, each in SCENARIOS.items()),
                    scenario,
                ),
            ),
            "Move": (
                Slider("place", "Events so far", places, str(run.opening)),
                Button("back", "Back"),
                Button("step", "Step"),
                Choice("kind", "Kind of event", _kinds(run), f"{scenario}/{run.scenario.wanted}"),
                Button("next", "Next of this kind"),
            ),
            "Look": (block_choice(run.trace.header.num_blocks),),
            "Predict": (
                Switch("ask", "Ask me before it happens"),
                Choice("guess", "My answer", (_NO_GUESS,), ""),
                Button("reveal", "Reveal"),
            ),
        },
        Explorer().answer,
    )


class Explorer:
    """Answers for one page; it remembers where the run was last looked at, to be fast."""

    def __init__(self) -> None:
        self._cursor: Cursor | None = None

    def answer(self, values: Values, action: str) -> Answer:
        """Return what the page shows after an action, for the values of its form."""
        run = recorded(among("scenario", values["scenario"], SCENARIOS))
        last = len(run.trace.events)
        # The kinds name their scenario: after another choice the form still has the one before.
        if values["kind"] in dict(_kinds(run)) and values["place"] in _places(run):
            place, kind = int(values["place"]), values["kind"].removeprefix(f"{run.name}/")
        else:
            place, kind = run.opening, run.scenario.wanted
        num_blocks = run.trace.header.num_blocks
        block = chosen_block(values["block"], action, num_blocks)
        asked = _questions(values["scenario"]) if values["ask"] else {}
        now, verdict = asked.get(place), ""
        if action == "back":
            place = max(0, place - 1)
        elif action == "step" and now is None:
            place = min(last, place + 1)
        elif action == "reveal" and now is not None:
            guess = dict(_answers(run, now)).get(values["guess"], "")
            place, verdict = now.until, _verdict(now, guess)
        elif action == "next" and now is None:
            place, verdict = _next(run, kind, place, asked)
        question = asked.get(place)
        answers = _answers(run, question)
        words = verdict or _where(run, place)
        if question is not None:
            words += f" Before it goes on: {question.text}"
        off = ["back"] if place == 0 else []
        off += ["step", "next"] if place == last or question is not None else []
        off += [] if question is not None else ["guess", "reveal"]
        return Answer(
            words,
            parts=self._parts(run, place, block, question),
            said={"place": _when(run, place)},
            values={
                "place": str(place),
                "kind": f"{run.name}/{kind}",
                "block": "" if block is None else str(block),
                "guess": values["guess"] if values["guess"] in dict(answers) else "",
            },
            stops={"place": _places(run)},
            options={
                "kind": _kinds(run),
                "block": block_options(num_blocks),
                "guess": (_NO_GUESS, *answers),
            },
            off=tuple(off),
        )

    def _parts(
        self, run: Recorded, place: int, chosen: int | None, question: Question | None
    ) -> dict[str, str]:
        header, events = run.trace.header, run.trace.events
        if self._cursor is None or self._cursor.trace is not run.trace:
            self._cursor = run.trace.cursor()
        state = self._cursor.move_to(place)
        touched = blocks_in(events[place - 1]) if place else frozenset()
        parts: dict[str, str] = {
            "cache": draw_cache(
                state.device,
                header.block_size,
                run.names,
                run.prefixes if run.scenario.prefix_caching else None,
                title=f"{run.scenario.title}, {_when(run, place)}",
                pointing=Pointing(chosen, touched, asks=True),
                free_order=question is None or not question.hides,
            )
        }
        if header.num_swap_blocks:
            parts["host"] = draw_pool(
                state.host, header.block_size, run.host_names, title="The pool on the CPU"
            )
        if chosen is not None:
            found = [at for at in run.trace.history(chosen) if at < place]
            lines = [_line(run, at) for at in found]
            parts["history"] = list_html(f"Block {chosen} so far", lines, most=20)
        start = max((end for end in run.trace.ends if end < place), default=0)
        since = [_line(run, at) for at in range(start, place)]
        parts["events"] = list_html("Since the step before" if start else "So far", since)
        parts["waste"] = _waste(run, state)
        parts["lanes"] = draw_timeline(timeline(events[:place]), "Who ran when")
        return parts


# --- where the run is ---------------------------------------------------------------------------


def _places(run: Recorded) -> tuple[str, ...]:
    return tuple(map(str, range(len(run.trace.events) + 1)))


def _kinds(run: Recorded) -> tuple[tuple[str, str], ...]:
    return tuple((f"{run.name}/{kind}", said) for kind, said in KINDS.items() if kind in run.kinds)


def _answers(run: Recorded, question: Question | None) -> tuple[tuple[str, str], ...]:
    """Return what a question can be answered; each names its question, as kinds their scenario."""
    if question is None:
        return ()
    return tuple((f"{run.name}/{question.at}/{each}", each) for each in question.options)


@lru_cache
def _questions(scenario: str) -> dict[int, Question]:
    return questions(recorded(scenario))


def _next(run: Recorded, kind: str, place: int, asked: Mapping[int, Question]) -> tuple[int, str]:
    """Return the place behind the next event of a kind, or before the question that it answers."""
    found = next_of(run.trace, kind, place)
    if found is None:
        return place, f"No event of this kind is left: {KINDS[kind]}."
    for question in asked.values():
        if place < question.at <= found < question.until:
            return question.at, ""
    return found + 1, ""


def _when(run: Recorded, place: int) -> str:
    return f"after event {place} of {len(run.trace.events)}" if place else "before the first event"


def _line(run: Recorded, at: int) -> str:
    return f"Event {at + 1}: {run.words[at]}."


def _where(run: Recorded, place: int) -> str:
    """Return where the run is, in words."""
    about = f"{run.scenario.about} " if place in (0, run.opening) else ""
    if place == 0:
        return f"{about}Nothing has happened yet: {len(run.trace.events)} events are to come."
    done = bisect_right(run.trace.ends, place)
    steps = f"{counted(done, 'step')} done" if done else "in the first step"
    end = " This is the end." if place == len(run.trace.events) else ""
    return (
        f"{about}Event {place} of {len(run.trace.events)} ({steps}): {run.words[place - 1]}.{end}"
    )


def _verdict(question: Question, guess: str) -> str:
    if not guess:
        return f"The answer: {question.answer}, because {question.why}."
    if guess == question.answer:
        return f"Right: {question.answer}. The reason: {question.why}."
    return f"Not {guess} but {question.answer}. The reason: {question.why}."


# --- what other allocators would do --------------------------------------------------------------


def _waste(run: Recorded, state: RunState) -> str:
    """Return the bars of the sequences that hold blocks now."""
    submitted = {e.request: e for e in run.trace.events if isinstance(e, Submitted)}
    loads = []
    for status in state.sequences.values():
        length = 0 if status.table is None else state.device.lengths.get(status.table, 0)
        if length:
            asked = submitted[status.request]
            loads.append(Load(len(asked.prompt_tokens), asked.max_tokens, length))
    size, blocks = run.trace.header.block_size, run.scenario.num_blocks
    fits = occupancies(loads, blocks, size, run.scenario.max_tokens)
    counts = count_blocks(state.device, size)
    if counts.table_tokens > counts.tokens:  # some are shared
        here = Occupancy(counts.tokens, 0, counts.unused_slots, 0, (blocks - counts.held) * size)
        fits = {**fits, "paged and shared, as here": Fit(len(loads), here)}
    return draw_waste(fits, len(loads), "The same sequences under other allocators, in slots")
