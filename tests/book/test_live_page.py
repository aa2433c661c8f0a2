"""Cells and panels in a browser, on a page made by hand: also where a reader errs, or a file fails.

The page stands beside the sources of the live pages, so that no book has to be built for it.
"""

from __future__ import annotations

import gzip
import json
import mimetypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Locator, expect

from servelab.live.cells import TEXT_LIMIT
from tests.live.visits import LIMIT, Visit, opened_from, visiting
from tools import browser, live_assets

ROOT = Path(__file__).resolve().parents[2]
HAND_MADE = ROOT / "tests" / "data" / "live.html"
PREFIX = "/some/where"

pytestmark = pytest.mark.skipif(browser.path() is None, reason=browser.MISSING)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page and what it loads."""
    folder = tmp_path_factory.mktemp("site")
    (folder / HAND_MADE.name).symlink_to(HAND_MADE)
    (folder / "_static").symlink_to(ROOT / "_static")
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with browser.served(site, PREFIX) as found:
        yield found


@pytest.fixture(scope="module")
def kept_open(reader: BrowserContext, address: str) -> Iterator[Visit]:
    """The page made by hand, opened once: a start of Python takes seconds."""
    with visiting(reader.new_page(), address) as found:
        found.tab.goto(f"{address}/{HAND_MADE.name}?code=print(1)#print(2)")
        yield found


@pytest.fixture
def another(kept_open: Visit, address: str) -> Iterator[Visit]:
    """A further tab, in which files fail."""
    tab = opened_from(kept_open.tab)
    with visiting(tab, address) as found:
        yield found
    tab.close()


def numbers_asked(visit: Visit) -> list[int]:
    return [json.loads(request)["number"] for request, _ in visit.asked()]


@pytest.fixture
def hand_made(kept_open: Visit) -> Iterator[Visit]:
    yield kept_open
    kept_open.settled()
    while (resets := kept_open.tab.locator(".live-reset:enabled")).count():
        resets.first.click()
    kept_open.tab.evaluate("window.asked = []")
    wrong, kept_open.wrong = kept_open.wrong, []
    assert not wrong


# ---- Cells, on a page made by hand -----------------------------------------------------------


def test_the_first_run_fetches_python_and_runs_the_cells_above_first(hand_made: Visit) -> None:
    """The first test of this page: later ones find Python started."""
    hand_made.tab.wait_for_load_state("networkidle")
    assert not [url for url in hand_made.fetched if "pyodide" in url or "worker.js" in url]
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("42", timeout=LIMIT)
    expect(hand_made.output(2)).to_have_attribute("role", "status")
    assert numbers_asked(hand_made) == [1, 2]  # nothing in the address is run
    assert all("print(" not in request for request, _ in hand_made.asked())
    loaded = {url.split("/")[-1] for url in hand_made.fetched}
    assert {*live_assets.PYODIDE_FILES, live_assets.WHEEL} <= loaded


def test_the_page_says_how_large_python_is() -> None:
    assets = (*live_assets.PYODIDE_FILES, live_assets.WHEEL)
    files = [(live_assets.ASSETS / file).read_bytes() for file in assets]
    zipped, plain = sum(len(gzip.compress(file, 6)) for file in files), sum(map(len, files))
    said = f"({zipped / 1e6:.0f} MB the first time, {plain / 1e6:.0f} where the server does not"
    assert said in (ROOT / "chapters/00_how_to_read.md").read_text("utf-8")
    assert f"({zipped / 1e6:.0f} MB, once)" in (ROOT / "_static" / "live" / "live.js").read_text(
        "utf-8"
    )


def test_edited_code_runs_and_reset_brings_code_and_stored_output_back(hand_made: Visit) -> None:
    stored = hand_made.output(1).inner_html()
    hand_made.write(1, "n = 5\nprint('n is', n)")
    hand_made.tab.keyboard.press("Control+Enter")
    hand_made.settled()
    expect(hand_made.output(1)).to_have_text("n is 5", timeout=LIMIT)
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("10", timeout=LIMIT)
    hand_made.press(1, "Reset")
    assert hand_made.output(1).inner_html() == stored
    expect(hand_made.tab.get_by_label("Code of cell 1")).to_have_count(0)
    hand_made.run(2)  # the names are those of the code that stands there again
    expect(hand_made.output(2)).to_have_text("42", timeout=LIMIT)


def test_run_all_above_runs_the_cells_above_once_more(hand_made: Visit) -> None:
    hand_made.run(3)
    hand_made.press(3, "Run all above")
    hand_made.settled()
    assert numbers_asked(hand_made) == [1, 2, 3, 1, 2]
    expect(hand_made.cell(1).get_by_role("button", name="Run all above cell 1")).to_be_disabled()


def test_an_error_shows_its_message_and_the_line(hand_made: Visit) -> None:
    hand_made.write(1, "def f(x):\n    return 1 / x\n\nf(0)")
    hand_made.run(1)
    shown = hand_made.output(1).locator(".live-error")
    expect(shown).to_contain_text("ZeroDivisionError: division by zero", timeout=LIMIT)
    expect(shown).to_contain_text("Line 4: f(0)")
    expect(shown).to_contain_text("Line 2 in f: return 1 / x")
    assert "pyodide" not in shown.inner_text().lower()
    hand_made.run(2)  # n was never made
    expect(hand_made.cell(2)).to_contain_text("cell 1 above did not get through", timeout=LIMIT)


def test_stop_ends_all_that_was_asked_for_and_python_starts_again(hand_made: Visit) -> None:
    hand_made.run(2)
    hand_made.write(1, "while True:\n    pass")
    hand_made.press(2, "Run")
    hand_made.press(3, "Run")
    expect(hand_made.cell(1).get_by_role("button", name="Reset cell 1")).to_be_disabled()
    hand_made.press(1, "Stop")
    hand_made.settled()
    assert numbers_asked(hand_made)[-1] == 1
    expect(hand_made.cell(1)).to_contain_text("Python was stopped")
    expect(hand_made.cell(1)).to_contain_text("the names of this page are gone")
    expect(hand_made.cell(2)).to_contain_text("cell 1 above did not get through")
    expect(hand_made.cell(3)).to_contain_text("Python was stopped")
    hand_made.press(1, "Reset")
    hand_made.press(2, "Run")
    hand_made.press(1, "Stop")  # before Python has started
    hand_made.settled()
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("42", timeout=LIMIT)


def test_output_is_capped_and_said_to_be(hand_made: Visit) -> None:
    hand_made.write(1, "for _ in range(200_000):\n    print('x' * 9)")
    hand_made.run(1)
    expect(hand_made.output(1)).to_contain_text("Cut here", timeout=LIMIT)
    assert len(hand_made.output(1).locator("pre").inner_text()) <= TEXT_LIMIT


def test_where_the_module_does_not_run_a_sentence_says_so(
    another: Visit, site: Path, address: str
) -> None:
    tab = another.tab
    tab.route("**/live.js", lambda route: route.abort())
    tab.goto(f"{address}/{HAND_MADE.name}")
    expect(tab.locator(".live-note")).to_contain_text("too old for it, or blocks the page's script")
    tab.goto((site / HAND_MADE.name).as_uri())
    expect(tab.locator(".live-note")).to_contain_text("opened as a file")


@pytest.mark.parametrize("way", ["blocked", "spoilt"])
@pytest.mark.parametrize("file", ["worker.js", "servelab.whl", "pyodide.asm.wasm"])
def test_where_a_file_does_not_come_whole_a_sentence_says_so(
    another: Visit, address: str, file: str, way: str
) -> None:
    visit = another
    if way == "blocked":
        visit.tab.route(f"**/{file}", lambda route: route.abort())
    else:
        kind = mimetypes.guess_type(file)[0] or "application/octet-stream"
        spoilt = {"body": b"\x00garbage\xff" * 99, "content_type": kind}
        visit.tab.route(f"**/{file}", lambda route: route.fulfill(**spoilt))
    visit.tab.goto(f"{address}/{HAND_MADE.name}")
    stored = visit.output(1).inner_html()
    visit.run(1)
    expect(visit.cell(1)).to_contain_text("Python could not run here", timeout=LIMIT)
    expect(visit.cell(1)).to_contain_text("The stored output stays.")
    assert visit.output(1).inner_html() == stored


# ---- Panels, on the same page ----------------------------------------------------------------


@pytest.fixture
def panel(hand_made: Visit) -> Locator:
    hand_made.run(4)  # the last cell makes the panel known to the page's Python, at its start
    found = hand_made.tab.locator("servelab-panel[name=try]")
    found.evaluate("(panel) => panel.restore('')")
    return found


def test_every_kind_of_control_is_sent_and_answered(panel: Locator) -> None:
    words = panel.locator(".panel-words")
    panel.get_by_label("Unit").select_option("GiB")
    expect(words).to_contain_text("unit=GiB")
    panel.get_by_label("Note").fill("a & <b>")
    expect(words).to_contain_text("note=a & <b>")
    panel.get_by_label("Exact").check()
    expect(words).to_contain_text("exact=on")
    slider = panel.get_by_label("Size")
    slider.focus()
    for _ in range(2):
        slider.press("ArrowRight")
    expect(words).to_contain_text("size=16")
    expect(panel.locator("output")).to_have_text("16 tokens")
    expect(slider).to_have_attribute("aria-valuetext", "16 tokens")
    expect(slider).to_be_focused()
    box = slider.bounding_box()
    assert box is not None
    slider.page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    expect(words).to_contain_text("size=64")


def test_an_answer_sets_values_stops_options_and_what_is_off(panel: Locator) -> None:
    panel.get_by_role("button", name="Grow").click()
    expect(panel.get_by_label("Size")).to_have_attribute("data-stops", "4 8 16 32 64 128")
    expect(panel.locator("output")).to_have_text("128 tokens")
    expect(panel.get_by_label("Unit").locator("option")).to_have_text(["GB", "GiB", "MiB"])
    grow = panel.get_by_role("button", name="Grow")
    expect(grow).to_have_attribute("aria-disabled", "true")
    expect(grow).to_be_focused()
    grow.press("Enter")  # off: nothing is asked
    panel.get_by_role("button", name="Count", exact=True).click()
    expect(panel.locator(".panel-words")).to_contain_text("1 times")


def test_no_press_is_lost_and_part_of_a_picture_is_a_control(panel: Locator) -> None:
    for _ in range(3):
        panel.get_by_role("button", name="Count", exact=True).click()
    expect(panel.locator(".panel-words")).to_contain_text("3 times")
    picture = panel.locator("[data-action='count'][tabindex]")
    picture.click()
    expect(panel.locator(".panel-words")).to_contain_text("4 times")
    picture.press("Enter")
    expect(panel.locator(".panel-words")).to_contain_text("5 times")
    expect(picture).to_be_focused()  # though the picture was drawn again


def test_a_refusal_stands_in_the_words_and_the_picture_stays(panel: Locator) -> None:
    before = panel.locator(".panel-parts").inner_html()
    panel.get_by_label("Note").fill("refuse")
    expect(panel.locator(".panel-words.live-error")).to_have_text("note: 'refuse' is refused")
    assert panel.locator(".panel-parts").inner_html() == before
    panel.get_by_label("Note").fill("fine")
    expect(panel.locator(".panel-words")).to_contain_text("note=fine")
    expect(panel.locator(".live-error")).to_have_count(0)


def test_a_panel_waits_for_a_cell_and_a_stop_brings_it_back_to_its_start(panel: Locator) -> None:
    tab = panel.page
    start = panel.locator(".panel-words").inner_text()
    panel.get_by_role("button", name="Count", exact=True).click()
    expect(panel.locator(".panel-words")).to_contain_text("1 times")
    tab.get_by_role("button", name="Edit cell 3").click()
    tab.get_by_label("Code of cell 3").fill("while True: pass")
    tab.get_by_role("button", name="Run cell 3").click()
    slider = panel.get_by_label("Size")
    for _ in range(3):
        slider.press("ArrowRight")
    expect(panel.locator(".live-note")).to_have_text("Waiting for cell 3 …")
    tab.get_by_role("button", name="Stop cell 3").dispatch_event("click")  # the focus stays
    expect(panel.locator(".live-note")).to_contain_text("Python was stopped")
    expect(panel.locator(".panel-words")).to_have_text(start)
    expect(panel.locator("output")).to_have_text("4")
    expect(slider).to_be_focused()


def test_back_to_a_page_the_controls_fit_the_picture(panel: Locator) -> None:
    tab, words = panel.page, panel.locator(".panel-words")
    start = words.inner_text()

    def move() -> None:
        panel.get_by_label("Unit").select_option("GiB")
        panel.get_by_label("Size").press("End")
        panel.get_by_label("Note").fill("moved")
        panel.get_by_label("Exact").check()

    def is_at_its_start() -> None:
        expect(panel.locator("form")).to_be_visible()
        expect(words).to_have_text(start)
        expect(panel.get_by_label("Unit")).to_have_value("GB")
        expect(panel.get_by_label("Size")).to_have_value("0")
        expect(panel.get_by_label("Note")).to_have_value("")
        expect(panel.get_by_label("Exact")).not_to_be_checked()

    move()
    expect(words).to_contain_text("unit=GiB size=64 note=moved exact=on")
    here = tab.url
    tab.goto(here.split("?")[0] + "?another")
    tab.go_back()
    assert tab.url == here
    is_at_its_start()
    move()
    tab.reload()
    is_at_its_start()


# ---- Readers who press what they should not --------------------------------------------------


def test_a_run_asked_for_during_another_waits_its_turn(hand_made: Visit) -> None:
    hand_made.press(3, "Run")
    hand_made.press(4, "Run")  # cells 1 to 3 are still to run
    hand_made.settled()
    assert numbers_asked(hand_made) == [1, 2, 3, 4]


def test_a_cell_that_was_edited_runs_again_before_those_below(hand_made: Visit) -> None:
    hand_made.run(2)
    hand_made.write(1, "n = 4")
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("8", timeout=LIMIT)


def test_the_focus_stays_with_the_cell_whose_run_was_pressed(hand_made: Visit) -> None:
    run = hand_made.cell(3).get_by_role("button", name="Run cell 3", exact=True)
    run.press("Enter")
    hand_made.settled()
    expect(run).to_be_focused()


@pytest.mark.parametrize(
    "ending",
    ["import os\nos._exit(3)", "import builtins\nbuiltins.len = builtins.isinstance = None"],
)
def test_code_that_ends_python_is_said_in_a_sentence(hand_made: Visit, ending: str) -> None:
    hand_made.write(1, ending)
    hand_made.write(2, "1 / 0")  # Python ends now at the latest
    hand_made.run(2)
    # A panel that was used says so too.
    shown = hand_made.tab.locator(".cell .live-note", has_text="Python broke down")
    expect(shown).to_contain_text("the names of this page are gone")
    assert "Traceback" not in shown.inner_text()
    hand_made.press(1, "Reset")
    hand_made.write(2, "n + 1")
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("22", timeout=LIMIT)


def test_an_exercise_is_checked_without_the_cells_above(hand_made: Visit) -> None:
    hand_made.run(6)
    expect(hand_made.output(6)).to_contain_text("not attempted", timeout=LIMIT)
    hand_made.write(6, 'check("4.1", 2 * 40 * 40 * 128 * 2)')
    hand_made.run(6)
    expect(hand_made.output(6)).to_contain_text("passed")
    assert numbers_asked(hand_made) == [5, 6, 6]  # the import of its section, and itself


def test_messages_and_promises_of_a_cell_do_not_disturb_the_page(hand_made: Visit) -> None:
    hand_made.write(1, "import js\nfor odd in (None, 'x', 5): js.postMessage(odd)\nn = 3")
    hand_made.run(1)
    hand_made.write(3, "js.Promise.reject('odd')")
    hand_made.run(3)
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("6", timeout=LIMIT)
    assert numbers_asked(hand_made)[-1] == 2
