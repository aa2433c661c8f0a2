"""The room of the live pages: what cells show, what a page answers, which cells can be live."""

from __future__ import annotations

import io
import json
import linecache
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from nbformat.v4 import new_code_cell

from servelab import live
from servelab.live import cells
from servelab.live.cells import Output, run
from tests.test_rooms import ROOMS
from tools import live_assets, live_cells

# Chapters whose cells are tagged as far as they can be live.
LIVE_CHAPTERS = (
    "chapters/01_what_one_token_costs",
    "chapters/02_the_roofline",
    "chapters/03_prefill_and_decode",
    "chapters/04_kv_cache_memory",
    "chapters/05_paging_the_cache",
    "chapters/07_sharing_blocks",
    "chapters/08_continuous_batching",
)


def shown(source: str, **names: Any) -> list[tuple[str, str]]:
    return [(output.kind, output.content) for output in run(source, dict(names))]


# ---- Cells -------------------------------------------------------------------------------------


def test_text_and_a_last_value_are_two_outputs() -> None:
    assert shown("print('a')\n'b'") == [("text", "a\n"), ("text", "'b'")]
    assert shown("x = 1") == []
    assert shown("None") == []
    assert shown("") == []
    assert shown("# nothing") == []


def test_html_is_shown_of_values_that_offer_it() -> None:
    class Offers:
        def _repr_html_(self) -> str:
            return "<b>x</b>"

    class Declines:
        def _repr_html_(self) -> None:
            return None

        def __repr__(self) -> str:
            return "plain"

    assert shown("v", v=Offers()) == [("html", "<b>x</b>")]
    assert shown("v", v=Declines()) == [("text", "plain")]
    assert shown("v", v=Offers)[0][0] == "text"  # the class itself offers none


def test_what_is_printed_to_stderr_is_shown_in_its_place() -> None:
    source = "import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)"
    assert shown(source) == [("text", "1\n2\n3\n")]


def test_names_stay_and_an_error_keeps_what_came_before_it() -> None:
    page: dict[str, Any] = {}
    outputs = run("n = 2\nprint('before')\nn / 0", page)
    assert [o.kind for o in outputs] == ["text", "error"]
    assert page["n"] == 2


def test_an_error_says_the_readers_lines_only() -> None:
    page: dict[str, Any] = {}
    run("from servelab import models\ndef f(name):\n    return models.get(name)", page, 1)
    [error] = run("\nf('no-such')", page, 2)
    assert error.content.splitlines() == [
        "Line 2: f('no-such')",
        "Line 3 of cell 1 in f: return models.get(name)",
        *error.content.splitlines()[2:],
    ]
    assert error.content.splitlines()[-1].startswith("KeyError")
    assert "bundled.py" not in error.content


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("import torch_is_not_here", "servelab"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E"),
        ("class R:\n    def __repr__(self): 1 / 0\nR()", "ZeroDivisionError"),
        ("raise ValueError('x' * 10**6)", "…"),
    ],
)
def test_whatever_a_cell_raises_becomes_words(source: str, last: str) -> None:
    [error] = run(source, {})
    assert error.kind == "error"
    assert last in error.content.splitlines()[-1]
    assert len(error.content) < 5000


@pytest.mark.parametrize(
    "source",
    [
        "from unittest.mock import MagicMock\nMagicMock()",  # has every attribute
        "class A:\n    def _repr_html_(self): return b'x'\nA()",
        "raise SyntaxError('x', ('<cell 1>', 1, 2, 5))",
        "class M:\n    def __str__(self): 1 / 0\nraise SyntaxError(M(), ('<cell 1>', 1, 2, 'x'))",
        "class M:\n    def __repr__(self): 1 / 0\nraise ModuleNotFoundError('x', name=M())",
        "raise ModuleNotFoundError('x', name='y' * 10**6)",
        "x = '" + "y" * 10**5,
        "x = 1;" + " " * 10**5 + "1 / 0",
        "print(1)\0",
        "x = '\ud800'",
        "(" * 5000 + ")" * 5000,
        "import sys\nsys.stdout = sys.stderr = None\nprint(1)\n5",
        "print = None",
        "__builtins__ = {}",
    ],
)
def test_no_code_makes_a_page_raise(source: str) -> None:
    page = live.Page()
    answer = json.loads(page.ask(json.dumps({"kind": "cell", "source": source})))
    assert len(json.dumps(answer)) < 20_000
    assert json.loads(page.ask('{"kind": "cell", "source": "4"}')) == {
        "outputs": [{"kind": "text", "content": "4"}]
    }


def test_a_page_survives_modules_that_a_cell_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((json, "dumps"), (json, "loads"), (linecache, "cache")):
        monkeypatch.setattr(module, name, None)  # as a cell may do; here it is put back
    page = live.Page()
    assert page.ask('{"kind": "cell", "source": "4"}').startswith('{"outputs": [')


def test_output_is_cut_and_said_to_be() -> None:
    limit = cells.TEXT_LIMIT
    printed = run("for _ in range(10):\n    print('x' * 9999)", {})
    assert [o.kind for o in printed] == ["text", "note"]
    assert len(printed[0].content) == limit
    exact = run(f"print('x' * {limit - 1})", {})
    assert [o.kind for o in exact] == ["text"]
    value = run(f"'x' * {limit}", {})
    assert [o.kind for o in value] == ["text", "note"]
    assert len(value[0].content) == limit

    class Large:
        def _repr_html_(self) -> str:
            return "x" * (cells.HTML_LIMIT + 1)

    [note] = run("v", {"v": Large()})
    assert note == Output("note", note.content)
    assert f"{cells.HTML_LIMIT:,}" in note.content


# ---- Pages -------------------------------------------------------------------------------------


def asked(page: live.Page, **request: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(page.ask(json.dumps(request)))
    return answer


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel that counts what it is asked, known as "roofline"."""

    def build(name: str) -> live.Panel:
        counted = [0]

        def answer(values: Any, action: str) -> live.Answer:
            if values["n"] == "bad":
                raise ValueError("n: 'bad' is refused")
            counted[0] += 1
            return live.Answer(f"{counted[0]} {values['n']} {action}", {"a": "<b/>"}, off=("go",))

        return live.Panel(
            name, "T", {"": (live.Field("n", "N", "7"), live.Button("go", "G"))}, answer
        )

    monkeypatch.setattr("servelab.live.page.get", build)


@pytest.mark.usefixtures("counter")
def test_a_page_keeps_one_panel_of_each_name_and_each_page_its_own() -> None:
    page = live.Page()
    first = asked(page, kind="panel", name="a", action="", values={"n": "3"})
    assert first["words"] == "1 3 "
    assert first["parts"] == {"a": "<b/>"}
    assert first["off"] == ["go"]
    second = asked(page, kind="panel", name="a", action="go", values={})
    assert second["words"] == "2 7 go"  # a value that is not sent is the first one
    assert asked(page, kind="panel", name="b", action="", values={})["words"] == "1 7 "
    assert asked(live.Page(), kind="panel", name="a", action="", values={})["words"] == "1 7 "


@pytest.mark.parametrize("name", live.PANELS)
def test_before_anybody_moves_a_control_all_are_as_the_first_answer_leaves_them(name: str) -> None:
    panel = live.get(name)
    first, root = panel.first(), ElementTree.fromstring(panel.html())
    (form,) = root.iterfind(".//form")
    assert form.get("autocomplete") == "off"  # no browser brings the values of a visit before back
    controls = {c.get("name") or c.get("data-action"): c for c in form.iterfind(".//*[@id]")}
    assert set(controls) == {control.name for control in panel.controls}
    off = {
        name
        for name, control in controls.items()
        if "disabled" in control.attrib or control.get("aria-disabled") == "true"
    }
    assert off == set(first.off)
    said = {output.get("for"): output.text for output in root.iterfind(".//output")}
    for control in panel.controls:
        if isinstance(control, live.Slider):
            expected = first.said.get(control.name, control.value)
            assert said[f"{name}-{control.name}"] == expected
            assert controls[control.name].get("aria-valuetext") == expected
            assert first.stops.get(control.name, control.stops) == control.stops
        elif isinstance(control, live.Choice):
            assert first.options.get(control.name, control.options) == control.options
        if not isinstance(control, live.Button):
            assert first.values.get(control.name, control.value) == control.value


def test_every_kind_of_control_can_be_off_from_the_start() -> None:
    controls = (
        live.Choice("choice", "Choice", (("a", "a"),), "a"),
        live.Slider("slider", "Slider", ("1",), "1"),
        live.Field("line", "Line"),
        live.Field("lines", "Lines", lines=2),
        live.Switch("switch", "Switch"),
    )
    off = tuple(control.name for control in controls)
    for names in (off, ()):
        answer = live.Answer("Said.", off=names)
        panel = live.Panel("try", "Try", {"": controls}, lambda values, action, it=answer: it)
        assert panel.html().count('disabled="disabled"') == len(names)


@pytest.mark.usefixtures("counter")
def test_a_refusal_is_a_sentence_and_the_panel_lives_on() -> None:
    page = live.Page()
    refused = asked(page, kind="panel", name="a", action="", values={"n": "bad"})
    assert refused == {"error": "n: 'bad' is refused"}
    assert asked(page, kind="panel", name="a", action="", values={})["words"] == "1 7 "


def test_an_unknown_panel_is_refused() -> None:
    assert (
        "no panel 'x'" in asked(live.Page(), kind="panel", name="x", action="", values={})["error"]
    )


# ---- Which cells can be live -------------------------------------------------------------------


def examined(*sources: str, **tags: list[str]) -> list[str]:
    made = [
        new_code_cell(source, metadata={"tags": tags.get(f"cell{number}", [])})
        for number, source in enumerate(sources, start=1)
    ]
    return [cell.why for cell in live_cells.examine(made)]


def test_a_cell_can_be_live_on_calculators_and_live_cells_alone() -> None:
    assert examined("from servelab import units\nimport math", "x = math.pi", "x + 1") == [
        "",
        "",
        "",
    ]
    assert examined("import torch", "import math")[0] == "imports torch"
    assert examined("from servelab.decoder import TorchRunner")[0] == "imports servelab.decoder"
    assert examined("import subprocess")[0] == "imports subprocess"
    assert "x" in examined("import torch\nx = 1", "x + 1")[1]


def test_a_name_that_another_cell_has_bound_anew_is_not_the_live_one() -> None:
    assert examined("x = 1", "import torch\nx = 2", "x")[2].startswith("needs x")
    assert examined("x = 1", "x = 2", "x", cell2=["remove-cell"])[2].startswith("needs x")
    assert examined("x = 1", "import torch\nx = 2", "x = 3", "x")[2:] == ["", ""]


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("y = x + 1", {"x"}),
        ("x = x + 1", {"x"}),
        ("x += 1", {"x"}),
        ("[a for a in b]", {"b"}),
        ("for a in b:\n    c = a + d", {"b", "d"}),
        ("def f(a):\n    return a + g(a)", {"g"}),
        ("def f(a):\n    return f(a - 1)", set()),
        ("class A:\n    b = c\n    def d(self):\n        return e", {"c", "e"}),
        ("a = 1\nprint(a, len(b'x'))", set()),
        ("lambda a: a + b", {"b"}),
        ("import a.b\na.c", set()),
        ("[w for layer in x if (w := layer)]", {"x"}),
    ],
)
def test_the_names_that_a_cell_needs(source: str, needs: set[str]) -> None:
    assert live_cells.names(live_cells.ast.parse(source))[1] == needs


def test_a_wrong_tag_is_said() -> None:
    def state(*sources: str, tagged: tuple[int, ...]) -> list[str]:
        made = [
            new_code_cell(source, metadata={"tags": ["live"] if i in tagged else []})
            for i, source in enumerate(sources)
        ]
        return [live_cells.state(cell) for cell in live_cells.examine(made)]

    assert state("x = 1", "x", tagged=(0, 1)) == ["live", "live"]
    assert state("x = 1", "x", tagged=(1,))[1].startswith("LIVE, BUT needs x")
    assert state("x = 1", tagged=()) == ["CAN BE LIVE, tag missing"]
    assert "cell of their own" in state("import math\nx = 1", tagged=(0,))[0]
    assert "imports torch" in state("import torch", tagged=(0,))[0]


@pytest.mark.parametrize("stem", LIVE_CHAPTERS)
def test_every_cell_that_can_be_live_is_and_no_other(stem: str) -> None:
    wrong = [
        f"cell {cell.number}: {live_cells.state(cell)}"
        for cell in live_cells.of_page(stem)
        if cell.faults or (not cell.is_live and not cell.why)
    ]
    assert not wrong, f"see: python tools/live_cells.py {stem.split('/')[1][:2]}"
    assert any(cell.is_live for cell in live_cells.of_page(stem))


def test_a_tag_stands_only_in_chapters_that_are_held_to_it() -> None:
    """Exercises apart: those of the later chapters are live too."""
    tagged = {
        stem
        for stem in live_cells.notebooks.stems()
        if any(cell.is_live and "exercise" not in cell.tags for cell in live_cells.of_page(stem))
    }
    assert tagged == set(LIVE_CHAPTERS)


# ---- The wheel ---------------------------------------------------------------------------------


def test_the_wheel_has_the_rooms_that_need_the_standard_library_alone() -> None:
    alone = [room for room, needs in ROOMS.items() if not needs]
    # Of the exercises only chapter 6's need more, and they are loaded chapter by chapter.
    assert list(live_assets.ROOMS) == [*alone, "check"]
    wheel, again = (live_assets.archive(live_assets.wheel_contents()) for _ in range(2))
    assert wheel == again
    names = zipfile.ZipFile(io.BytesIO(wheel)).namelist()
    rooms = {
        name.split("/")[1].removesuffix(".py") for name in names if name.startswith("servelab/")
    }
    assert rooms == {*live_assets.ROOMS, "__init__", "data"}
    assert "servelab/data/checkpoint/config.json" in names
    assert not [name for name in names if name.endswith((".safetensors", ".md"))]


def test_the_lock_names_no_host() -> None:
    lock = (live_assets.ROOT / "package-lock.json").read_text()
    assert "://" not in lock
    packages = json.loads(lock)["packages"]
    package = json.loads((live_assets.ROOT / "package.json").read_text())
    for name, version in {**package["dependencies"], **package["devDependencies"]}.items():
        assert packages[f"node_modules/{name}"]["version"] == version
        assert packages[f"node_modules/{name}"]["integrity"]


def test_what_is_missing_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(live_assets, "PACKAGES", tmp_path)
    monkeypatch.setattr(live_assets, "bring_node", lambda: ("node", "/bin/false"))
    assert live_assets.main() == 1
    assert capsys.readouterr().err.startswith("Error: The live pages need Pyodide, and npm could")
