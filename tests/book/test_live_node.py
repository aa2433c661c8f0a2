"""What the pages compute, in the browser's Python without a browser: the same as in CPython.

One Node process with Pyodide and the wheel answers everything that is asked below.
"""

from __future__ import annotations

import ast
import json
import random
import subprocess
from typing import Any

import pytest

from servelab import live
from servelab.live.panel import Button, Choice, Field, Slider
from tests.live.stored import assert_as_stored, stored_cells
from tools import live_assets, live_cells, notebooks

ROOT = notebooks.ROOT
HERE = ROOT / "tests" / "live"
PROGRAMS = ("vectors", "operations")
LIVE_STEMS = [
    stem for stem in notebooks.stems() if any(cell.is_live for cell in live_cells.of_page(stem))
]
QUESTIONS = 24  # to each panel


def requests_of_cells(stem: str) -> list[str]:
    return [
        json.dumps({"kind": "cell", "number": number, "source": cell.source})
        for number, cell in enumerate(stored_cells(stem), start=1)
    ]


def requests_of_panel(name: str) -> list[str]:
    """A grid of values: each control at its ends, then drawn; buttons pressed in between."""
    dice = random.Random(name)
    controls = live.get(name).controls
    buttons = [control.name for control in controls if isinstance(control, Button)]
    asked = []
    for turn in range(QUESTIONS):
        values = {}
        for control in controls:
            if isinstance(control, Slider):
                ends = (control.stops[0], control.stops[-1], control.value)
                values[control.name] = ends[turn] if turn < 3 else dice.choice(control.stops)
            elif isinstance(control, Choice):
                values[control.name] = dice.choice(control.options)[0] if turn else control.value
            elif isinstance(control, Field):
                values[control.name] = control.value if turn % 5 < 4 else "not a { number"
            elif not isinstance(control, Button):
                values[control.name] = dice.choice(["", "on"])
        action = dice.choice(buttons) if buttons and turn % 2 else ""
        asked.append({"kind": "panel", "name": name, "action": action, "values": values})
    return [json.dumps(request) for request in asked]


@pytest.fixture(scope="module")
def pages() -> dict[str, list[str]]:
    cells = {stem: requests_of_cells(stem) for stem in LIVE_STEMS}
    return cells | {name: requests_of_panel(name) for name in live.PANELS}


@pytest.fixture(scope="module")
def answers(pages: dict[str, list[str]]) -> dict[str, Any]:
    """What Node answers to each page and to each program."""
    assert live_assets.main() == 0
    jobs = {name: program(name) for name in PROGRAMS}
    jobs |= {name: {"requests": requests} for name, requests in pages.items()}
    # At the end the modules that all of them have imported.
    answers = answers_of_node(jobs | {"modules": program("modules")})
    return answers | {"modules": json.loads(answers["modules"])}


def program(name: str) -> dict[str, Any]:
    """One of the programs beside this file, as a job."""
    return {"program": (HERE / f"{name}.py").read_text()}


def answers_of_node(jobs: dict[str, Any]) -> dict[str, Any]:
    """Start Node and let it answer the jobs, one after the other."""
    node, _ = live_assets.bring_node()
    command = [
        node,
        HERE / "answers.mjs",
        live_assets.ASSETS,
        live_assets.ASSETS / live_assets.WHEEL,
    ]
    lines = "".join(json.dumps(job) + "\n" for job in jobs.values())
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    # Node shows the line of Pyodide's source too, which has a million characters.
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(jobs, map(json.loads, done.stdout.rstrip("\n").split("\n")), strict=True))


@pytest.mark.parametrize("stem", LIVE_STEMS)
def test_the_live_cells_of_a_page_show_what_is_stored(answers: dict[str, Any], stem: str) -> None:
    answered = [json.loads(text)["outputs"] for text in answers[stem]]
    assert_as_stored(stem, answered)


def in_cpython(name: str) -> str:
    """Run one of the programs here; the text of its last expression."""
    tree = ast.parse((HERE / f"{name}.py").read_text(), name)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(tree, name, "exec"), names)
    text: str = eval(compile(ast.Expression(last.value), name, "eval"), names)
    return text


def test_no_page_has_to_compile_what_it_imports(answers: dict[str, Any]) -> None:
    brought = answers["modules"]
    assert not [name for name, is_brought in brought.items() if not is_brought]
    assert any("/servelab/units" in name for name in brought)
    assert any("/json/" in name for name in brought)


def test_every_calculator_answers_the_same(answers: dict[str, Any]) -> None:
    expected = json.loads(in_cpython("vectors"))
    assert json.loads(answers["vectors"]) == expected
    calculated = [name for name, answer in expected.items() if "Error:" not in answer]
    kinds = {name.split()[0] for name in calculated}
    assert {"kv", "weights", "cost", "time", "capacity", "rows", "simulate", "log"} <= kinds
    assert {"format_bytes", "parse_bytes", "parse_tokens", "parse_seconds", "published"} <= kinds
    assert len(calculated) >= 200


def test_a_thousand_operations_on_a_pool_have_the_same_events(answers: dict[str, Any]) -> None:
    expected = json.loads(in_cpython("operations"))
    assert json.loads(answers["operations"]) == expected
    kinds = {event.split("(")[0] for event in expected}
    assert {"RefChanged", "EntryChanged", "LengthChanged", "CachedChanged"} <= kinds
    assert any(event.startswith("refused") for event in expected)
    assert len(expected) > 1000


@pytest.mark.parametrize("name", live.PANELS)
def test_a_panel_answers_the_same(
    answers: dict[str, Any], pages: dict[str, list[str]], name: str
) -> None:
    page = live.Page()
    answered = [json.loads(text) for text in answers[name]]
    assert answered == [json.loads(page.ask(request)) for request in pages[name]]
    assert len({answer.get("words") for answer in answered}) > 2
