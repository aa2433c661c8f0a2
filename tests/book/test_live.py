"""The live pages in a browser: cells and panels used as a reader uses them, on the built book.

Whatever a page asks its worker is recorded with the answer, and asked again in CPython.
"""

from __future__ import annotations

import functools
import gzip
import json
import mimetypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Locator,
    Playwright,
    Request,
    expect,
    sync_playwright,
)
from playwright.sync_api import Page as Tab

from servelab import live
from servelab.live.cells import TEXT_LIMIT
from tests.live.stored import assert_as_stored
from tools import browser, live_assets

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
HAND_MADE = ROOT / "tests" / "data" / "live.html"
PAGES = sorted(
    str(path.relative_to(SITE))
    for path in SITE.rglob("*.html")
    if not any(part.startswith("_") for part in path.relative_to(SITE).parts)
)
LIVE_PAGES = [name for name in PAGES if "live/live.js" in (SITE / name).read_text("utf-8")]
PREFIX = "/some/where"
MAX_TRANSFER_BYTES = 1_500_000  # with gzip, figures and live Python apart
LIMIT = 30_000  # milliseconds: a guard, not a measurement
START_LIMIT = 4 * LIMIT  # Python starts in seconds, on a busy machine in many
NARROW, WIDE = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="THE BOOK IS NOT BUILT: run make book, or make test"),
    pytest.mark.skipif(browser.path() is None, reason=browser.MISSING),
]
each_live_page = pytest.mark.parametrize("name", LIVE_PAGES)

# Keeps what goes to the worker and what comes back.
RECORDER = """
window.asked = [];
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message) {
  const entry = { request: message.request };
  window.asked.push(entry);
  this.addEventListener("message", ({ data }) => {
    if (data?.id === message.id) entry.answer = data.answer;
  });
  return post.call(this, message);
};
"""
BUSY = ".live-busy, [aria-busy=true]"
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Visit:
    """A page that a reader has open, and what went wrong on it."""

    tab: Tab
    wrong: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def cell(self, number: int) -> Locator:
        return self.tab.locator(".cell.tag_live").nth(number - 1)

    def press(self, number: int, button: str) -> None:
        self.cell(number).get_by_role("button", name=f"{button} cell {number}", exact=True).click()

    def settled(self) -> None:
        """Wait until nothing runs; the limit is that of one cell."""
        while left := self.tab.locator(BUSY).count():
            fewer = f"(left) => document.querySelectorAll('{BUSY}').length < left"
            self.tab.wait_for_function(fewer, arg=left, timeout=START_LIMIT)

    def run(self, number: int) -> None:
        self.press(number, "Run")
        self.settled()

    def write(self, number: int, source: str) -> None:
        self.press(number, "Edit")
        self.tab.get_by_label(f"Code of cell {number}").fill(source)

    def output(self, number: int) -> Locator:
        return self.cell(number).locator(".cell_output")

    def asked(self) -> list[tuple[str, str]]:
        """Requests and answers, in order, since the page opened."""
        kept = self.tab.evaluate("window.asked")
        return [(entry["request"], entry.get("answer", "")) for entry in kept]


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    """For contexts of their own, in which everything is new."""
    with playwright.chromium.launch(**browser.program()) as started:
        yield started


@pytest.fixture(scope="module")
def reader(
    playwright: Playwright, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrowserContext]:
    """Somebody who has read other pages before: what those compiled is kept, nothing else."""
    profile = tmp_path_factory.mktemp("profile")
    with playwright.chromium.launch_persistent_context(profile, **browser.program()) as started:
        started.add_init_script("localStorage.clear()")
        yield started


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    axe = live_assets.PACKAGES / "node_modules" / "axe-core" / "axe.min.js"
    with browser.served(SITE, PREFIX, HAND_MADE, axe) as found:
        yield found


@contextmanager
def visiting(context: BrowserContext, address: str) -> Iterator[Visit]:
    """A new tab whose requests, console and errors are watched."""
    tab = context.new_page()
    visit = Visit(tab)

    def on_request(request: Request) -> None:
        visit.fetched.append(request.url)
        if not request.url.startswith((address, "data:", "blob:")):
            visit.wrong.append(f"outside: {request.url}")

    def on_console(message: Any) -> None:
        if message.type == "error":
            visit.wrong.append(f"console: {message.text}")

    def on_failure(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # by the reader, who left the page
            visit.wrong.append(f"{request.failure}: {request.url}")

    context.on("request", on_request)  # a worker's too
    tab.on("console", on_console)
    tab.on("pageerror", lambda error: visit.wrong.append(f"error: {error}"))
    tab.on("requestfailed", on_failure)
    tab.set_default_timeout(LIMIT)
    tab.set_viewport_size(WIDE)
    tab.emulate_media(color_scheme="light", reduced_motion="reduce")
    tab.add_init_script(RECORDER)
    yield visit
    context.remove_listener("request", on_request)
    tab.close()


@pytest.fixture
def visit(reader: BrowserContext, address: str) -> Iterator[Visit]:
    with visiting(reader, address) as found:
        yield found
    assert not found.wrong


@pytest.fixture(scope="module")
def one_tab(reader: BrowserContext, address: str) -> Iterator[Visit]:
    """For pages without Python, one after the other: a new tab would compile their scripts anew."""
    with visiting(reader, address) as found:
        yield found


@pytest.fixture
def first_visit(chromium: Browser, address: str) -> Iterator[Visit]:
    context = chromium.new_context()
    with visiting(context, address) as found:
        yield found
    context.close()


@pytest.fixture(scope="module")
def kept_open(reader: BrowserContext, address: str) -> Iterator[Visit]:
    """The page made by hand, opened once: a start of Python takes seconds."""
    with visiting(reader, address) as found:
        found.tab.goto(f"{address}/{HAND_MADE.name}")
        yield found


@pytest.fixture
def hand_made(kept_open: Visit) -> Iterator[Visit]:
    yield kept_open
    kept_open.settled()
    while (resets := kept_open.tab.locator(".live-reset:enabled")).count():
        resets.first.click()
    kept_open.tab.evaluate("window.asked = []")
    wrong, kept_open.wrong = kept_open.wrong, []
    assert not wrong


@pytest.fixture(scope="module")
def chapter_4(reader: BrowserContext, address: str) -> Iterator[Visit]:
    with visiting(reader, address) as found:
        found.tab.goto(f"{address}/chapters/04_kv_cache_memory.html")
        yield found
    assert not found.wrong


def replayed(asked: list[tuple[str, str]]) -> None:
    """Ask the same in CPython and compare."""
    page = live.Page()
    for request, answer in asked:
        assert json.loads(answer) == json.loads(page.ask(request)), request


# ---- Cells, on a page made by hand -----------------------------------------------------------


def test_a_cell_runs_those_above_it_first_and_all_share_their_names(hand_made: Visit) -> None:
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("42", timeout=LIMIT)
    hand_made.settled()
    assert [json.loads(request)["number"] for request, _ in hand_made.asked()] == [1, 2]
    expect(hand_made.output(2)).to_have_attribute("role", "status")


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
    assert [json.loads(r)["number"] for r, _ in hand_made.asked()] == [1, 2, 3, 1, 2]
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


def test_a_loop_without_end_is_stopped_and_python_starts_again(hand_made: Visit) -> None:
    hand_made.run(2)
    hand_made.write(3, "while True:\n    pass")
    hand_made.press(3, "Run")
    hand_made.press(3, "Stop")
    expect(hand_made.cell(3)).to_contain_text("the names of this page are gone", timeout=LIMIT)
    hand_made.press(2, "Run")
    hand_made.press(2, "Stop")  # before Python has started
    hand_made.settled()
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("42", timeout=LIMIT)


def test_output_is_capped_and_said_to_be(hand_made: Visit) -> None:
    hand_made.write(1, "for _ in range(200_000):\n    print('x' * 9)")
    hand_made.run(1)
    expect(hand_made.output(1)).to_contain_text("Cut here", timeout=LIMIT)
    assert len(hand_made.output(1).locator("pre").inner_text()) <= TEXT_LIMIT


def test_nothing_of_python_is_fetched_before_its_first_use(
    first_visit: Visit, address: str
) -> None:
    visit = first_visit
    visit.tab.goto(f"{address}/{HAND_MADE.name}?code=print(1)#print(2)")
    visit.tab.wait_for_load_state("networkidle")
    assert not [url for url in visit.fetched if "pyodide" in url or "worker.js" in url]
    visit.run(2)
    expect(visit.output(2)).to_have_text("42", timeout=LIMIT)
    loaded = {url.split("/")[-1] for url in visit.fetched}
    assets = {*live_assets.PYODIDE_FILES, live_assets.WHEEL}
    assert assets <= loaded
    files = [f"_static/live/assets/{file}" for file in assets]
    zipped, plain = sum(map(gzipped_bytes, files)), sum((SITE / f).stat().st_size for f in files)
    said = f"({zipped / 1e6:.0f} MB the first time, {plain / 1e6:.0f} where the server does not"
    assert said in (SITE / "chapters/00_how_to_read.html").read_text("utf-8")
    assert f"({zipped / 1e6:.0f} MB, once)" in (SITE / "_static/live/live.js").read_text("utf-8")
    assert numbers_asked(visit) == [1, 2]  # nothing in the address is run
    assert all("print(" not in request for request, _ in visit.asked())
    assert not visit.wrong


@pytest.mark.parametrize("way", ["blocked", "spoilt"])
@pytest.mark.parametrize("file", ["worker.js", "servelab.whl", "pyodide.asm.wasm"])
def test_where_a_file_does_not_come_whole_a_sentence_says_so(
    first_visit: Visit, address: str, file: str, way: str
) -> None:
    visit = first_visit
    if way == "blocked":
        visit.tab.context.route(f"**/{file}", lambda route: route.abort())
    else:
        kind = mimetypes.guess_type(file)[0] or "application/octet-stream"
        spoilt = {"body": b"\x00garbage\xff" * 99, "content_type": kind}
        visit.tab.context.route(f"**/{file}", lambda route: route.fulfill(**spoilt))
    visit.tab.goto(f"{address}/{HAND_MADE.name}")
    stored = visit.output(1).inner_html()
    visit.run(1)
    expect(visit.cell(1)).to_contain_text("Python could not run here", timeout=LIMIT)
    expect(visit.cell(1)).to_contain_text("The stored output stays.")
    assert visit.output(1).inner_html() == stored


def test_where_the_module_does_not_run_a_sentence_says_so(first_visit: Visit, address: str) -> None:
    tab = first_visit.tab
    tab.context.route("**/live.js*", lambda route: route.abort())
    tab.goto(f"{address}/{LIVE_PAGES[0]}")
    expect(tab.locator(".live-note")).to_contain_text("too old for it, or blocks the page's script")
    tab.goto((SITE / LIVE_PAGES[0]).as_uri())
    expect(tab.locator(".live-note")).to_contain_text("opened as a file")


# ---- Panels, on the same page ----------------------------------------------------------------


@pytest.fixture
def panel(hand_made: Visit) -> Locator:
    hand_made.run(
        4
    )  # the page's last cell makes the panel known to the page's Python, at its start
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


def test_a_restart_brings_a_used_panel_back_to_its_start(panel: Locator) -> None:
    tab = panel.page
    start = panel.locator(".panel-words").inner_text()
    panel.get_by_role("button", name="Count", exact=True).click()
    expect(panel.locator(".panel-words")).to_contain_text("1 times")
    tab.get_by_role("button", name="Edit cell 3").click()
    tab.get_by_label("Code of cell 3").fill("while True: pass")
    tab.get_by_role("button", name="Run cell 3").click()
    tab.get_by_role("button", name="Stop cell 3").click()
    expect(panel.locator(".panel-words")).to_have_text(start)
    expect(panel).to_contain_text("Python was stopped")


# ---- Readers who press what they should not --------------------------------------------------


def numbers_asked(visit: Visit) -> list[int]:
    return [json.loads(request)["number"] for request, _ in visit.asked()]


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


def test_stop_stops_all_that_was_asked_for(hand_made: Visit) -> None:
    hand_made.write(1, "while True: pass")
    hand_made.press(2, "Run")
    hand_made.press(3, "Run")
    expect(hand_made.cell(1).get_by_role("button", name="Reset cell 1")).to_be_disabled()
    hand_made.cell(1).get_by_role("button", name="Stop cell 1").click()
    hand_made.settled()
    assert numbers_asked(hand_made) == [1]
    expect(hand_made.cell(1)).to_contain_text("Python was stopped")
    expect(hand_made.cell(2)).to_contain_text("cell 1 above did not get through")
    expect(hand_made.cell(3)).to_contain_text("Python was stopped")


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


def test_messages_and_promises_of_a_cell_do_not_disturb_the_page(hand_made: Visit) -> None:
    hand_made.write(1, "import js\nfor odd in (None, 'x', 5): js.postMessage(odd)\nn = 3")
    hand_made.run(1)
    hand_made.write(3, "js.Promise.reject('odd')")
    hand_made.run(3)
    hand_made.run(2)
    expect(hand_made.output(2)).to_have_text("6", timeout=LIMIT)
    assert numbers_asked(hand_made)[-1] == 2


def test_a_panel_says_that_it_waits_for_a_cell(panel: Locator) -> None:
    tab = panel.page
    tab.get_by_role("button", name="Edit cell 3").click()
    tab.get_by_label("Code of cell 3").fill("while True: pass")
    tab.get_by_role("button", name="Run cell 3").click()
    slider = panel.get_by_label("Size")
    for _ in range(3):
        slider.press("ArrowRight")
    expect(panel.locator(".live-note")).to_have_text("Waiting for cell 3 …")
    tab.get_by_role("button", name="Stop cell 3").dispatch_event("click")  # the focus stays
    expect(panel.locator(".live-note")).to_contain_text("Python was stopped")
    expect(slider).to_be_focused()
    expect(panel.locator("output")).to_have_text("4")


def test_back_to_a_page_the_controls_fit_the_picture(visit: Visit, address: str) -> None:
    visit.tab.goto(f"{address}/{HAND_MADE.name}")
    visit.run(4)
    panel = visit.tab.locator("servelab-panel[name=try]")
    panel.get_by_label("Size").press("End")
    panel.get_by_label("Note").fill("moved")
    expect(panel.locator(".panel-words")).to_contain_text("size=64 note=moved")
    visit.tab.reload()
    visit.tab.goto(f"{address}/index.html")
    visit.tab.go_back()
    said = panel.locator(".panel-words").inner_text()
    note = panel.get_by_label("Note").input_value()
    size = panel.get_by_label("Size").get_attribute("aria-valuetext")
    assert f"size={size} note={note} " in said
    stops = (panel.get_by_label("Size").get_attribute("data-stops") or "").split()
    assert stops[int(panel.get_by_label("Size").input_value())] == size


HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</textarea><script>alert(1)</script>",
    '{"model_type": "<img src=x onerror=alert(1)>"}',
    '{"a":' * 3000,  # one call of the parser for each would end Python
    '{"a": "\'\\"\u202e\u200f\x00😀"}',
)


def test_text_of_a_form_never_becomes_html(chapter_4: Visit) -> None:
    chapter_4.tab.evaluate("() => { window.alert = () => { window.broken = true } }")
    panel = chapter_4.tab.locator("servelab-panel[name=memory]")
    panel.get_by_label("Model", exact=True).select_option("pasted")
    for hostile in HOSTILE:
        panel.get_by_label("config.json").fill(hostile)
        chapter_4.settled()
        expect(panel.locator(".panel-words.live-error")).to_be_visible(timeout=START_LIMIT)
    assert not panel.locator("img, script").count()
    assert not chapter_4.tab.evaluate("window.broken")


# ---- What every page owes everyone -------------------------------------------------------------

# Faults of the theme, by the rule of axe-core and what it is found on: text that a button hides
# from the eye, the logo outside the landmarks, arrows without a name; docutils' old role.
THEME_FAULTS = {
    "label-content-name-mismatch": r"search-button|theme-switch-button|Toggle hidden content",
    "region": r"logo__image",
    "summary-name": r"toctree-l|details\[open=\"open\"\] > summary",
    "aria-allowed-role": r"doc-biblioentry",
    "aria-deprecated-role": r"doc-biblioentry",
    "aria-required-children": r"citation-list",  # docutils: a list of doc-biblioentry
}
# axe-core's time is that of a page's elements, and most of them are written by generators, all
# alike: the entries of the API, of its contents and of the index, the insides of formulas, the
# shapes of pictures and the coloured words of code. The first ones stand for the others.
SHORTEN = """() => {
  const alike = { "dl.py": 20, ".toc-entry": 30, ".indextable li": 30 };
  for (const [selector, kept] of Object.entries(alike))
    document.querySelectorAll(selector).forEach((entry, i) => i < kept || entry.remove());
  const formulas = [...document.querySelectorAll("mjx-container")].slice(3);
  formulas.forEach((formula) => formula.replaceChildren());
  const seen = new Set();
  const isFirst = (...kind) => !seen.has(kind.join()) && seen.add(kind.join());
  for (const shape of document.querySelectorAll("svg :is(path, line, rect, circle, text):empty")) {
    if (shape.hasAttribute("tabindex") || shape.hasAttribute("role")) continue;
    const look = ["class", "fill", "style"].map((name) => shape.getAttribute(name));
    isFirst(shape.tagName, shape.parentElement.getAttribute("class"), ...look) || shape.remove();
  }
  for (const word of document.querySelectorAll("pre span")) {
    if (word.getAttributeNames().some((name) => name !== "class")) continue;
    const block = word.closest("[class*=highlight-], .output")?.className;
    if (!isFirst(word.parentElement.className, word.className, block))
      word.replaceWith(...word.childNodes);
  }
  document.normalize();
}"""
# The contrast of a text is that of its colour to what lies behind it, given its size: one text of
# each kind is judged, the first in the book. Returns the kinds that the page adds.
MARK_NEW_TEXTS = """(seen) => {
  const known = new Set(seen);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
    const { color, fill, fontSize, fontWeight, textDecorationLine } = getComputedStyle(element);
    const look = [element.tagName, color, fill, fontSize, fontWeight, textDecorationLine];
    const behind = new Set();
    for (let around = element; around; around = around.parentElement) {
      const { backgroundColor, backgroundImage, opacity } = getComputedStyle(around);
      behind.add(`${backgroundColor} ${backgroundImage} ${opacity}`);
    }
    const kind = [...look, ...behind].join();
    if (!known.has(kind)) element.classList.add("judged");
    known.add(kind);
  }
  return [...known].filter((kind) => !seen.includes(kind));
}"""
OF_CONTRAST = ["color-contrast", "link-in-text-block"]


@pytest.fixture(scope="module")
def judged() -> dict[str, list[str]]:
    """The kinds of text whose contrast was judged, by theme."""
    return {"light": [], "dark": []}


@functools.cache
def gzipped_bytes(file: str) -> int:
    return len(gzip.compress((SITE / file).read_bytes(), 6))


def violations(tab: Tab, within: str, **options: Any) -> list[str]:
    """What axe-core finds, the theme's faults apart: one line for each element."""
    options["resultTypes"] = ["violations"]  # else it describes what passes, too
    found = tab.evaluate("([within, options]) => axe.run(within, options)", [within, options])
    return [
        f"{rule['id']}: {node['target']} {node['html'][:120]}"
        for rule in found["violations"]
        for node in rule["nodes"]
        if not is_of_the_theme(rule["id"], str(node))
    ]


def is_of_the_theme(rule: str, node: str) -> bool:
    return rule in THEME_FAULTS and re.search(THEME_FAULTS[rule], node) is not None


def fits_a_telephone(visit: Visit, address: str) -> None:
    """A page just opened: no sideways scrolling, and a transfer within bounds."""
    visit.tab.evaluate("window.MathJax?.startup?.promise")
    visit.tab.set_viewport_size(NARROW)
    assert visit.tab.evaluate(SIDEWAYS) <= 0
    own = {url.split("?")[0].removeprefix(f"{address}/") for url in visit.fetched}
    text = [file for file in own if not file.startswith(("_images/", "data:"))]
    assert sum(map(gzipped_bytes, text)) < MAX_TRANSFER_BYTES


def serves_everyone(visit: Visit, judged: dict[str, list[str]], address: str) -> None:
    """In both themes nothing that axe-core objects to. The page is no longer whole afterwards."""
    tab = visit.tab
    tab.mouse.move(0, 0)  # what the pointer is on looks different
    tab.evaluate(SHORTEN)
    tab.set_viewport_size(WIDE)
    assert tab.evaluate(SIDEWAYS) <= 0
    tab.add_script_tag(url=f"{address}/axe.min.js")
    tab.add_style_tag(content="* { transition: none !important }")  # no colour in between is judged
    found = violations(tab, "html", rules={rule: {"enabled": False} for rule in OF_CONTRAST})
    for theme, kinds in judged.items():
        tab.emulate_media(color_scheme=theme)
        expect(tab.locator("html")).to_have_attribute("data-theme", theme)
        if new := tab.evaluate(MARK_NEW_TEXTS, kinds):
            lines = violations(tab, ".judged", runOnly=OF_CONTRAST)
            found += [f"{theme}, {line}" for line in lines]
            kinds += new
    assert not found


# ---- The book's own pages --------------------------------------------------------------------


@each_live_page
def test_every_cell_and_panel_of_a_page_answers_as_cpython_does_and_serves_everyone(
    visit: Visit, judged: dict[str, list[str]], address: str, name: str
) -> None:
    visit.tab.goto(f"{address}/{name}")
    fits_a_telephone(visit, address)
    cells = visit.tab.locator(".cell.tag_live")
    if count := cells.count():
        if count > 1:
            visit.press(count, "Run all above")  # an exercise, the last of a chapter, runs alone
            visit.settled()
        visit.run(count)
        expect(visit.tab.locator(".live-error")).to_have_count(0)
        expect(visit.tab.locator(".live-ran")).to_have_count(count)
    panels = visit.tab.locator("servelab-panel")
    for index in range(panels.count()):
        use(panels.nth(index))
        visit.settled()
    asked = visit.asked()
    assert len(asked) >= count + panels.count()
    of_cells = [answer for request, answer in asked if json.loads(request)["kind"] == "cell"]
    # What is stored came from CPython: nbval runs every cell again.
    assert_as_stored(name.removesuffix(".html"), [json.loads(a)["outputs"] for a in of_cells])
    replayed([pair for pair in asked if json.loads(pair[0])["kind"] != "cell"])
    for index in range(panels.count()):
        shows_its_last_answer(panels.nth(index), asked)
    assert visit.tab.evaluate(SIDEWAYS) <= 0
    serves_everyone(visit, judged, address)


def test_an_exercise_is_checked_in_the_page_without_the_cells_above(chapter_4: Visit) -> None:
    live_cells = chapter_4.tab.locator(".cell.tag_live")
    classes = live_cells.evaluate_all("all => all.map((cell) => cell.className)")
    first = next(i for i, names in enumerate(classes, start=1) if "tag_exercise" in names)
    chapter_4.run(first + 1)
    expect(chapter_4.output(first + 1)).to_contain_text("not attempted")
    chapter_4.write(first + 1, 'check("4.1", 2 * 40 * 40 * 128 * 2)')
    chapter_4.run(first + 1)
    expect(chapter_4.output(first + 1)).to_contain_text("passed")
    expect(chapter_4.tab.locator(".live-ran")).to_have_count(2)  # it, and the import of its section


def use(panel: Locator) -> None:
    """Move each control of a panel as a reader would, once with keys or text, once by pointer."""
    for slider in panel.locator("input[type=range]").all():
        if slider.is_enabled():
            slider.focus()
            slider.press("ArrowRight")
            box = slider.bounding_box()
            assert box is not None
            panel.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            panel.page.mouse.down()
            panel.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
            panel.page.mouse.up()
    for choice in panel.locator("select").all():
        values = choice.locator("option").evaluate_all("all => all.map((o) => o.value)")
        if choice.is_enabled():
            choice.select_option(values[-1])
            panel.page.wait_for_function("!document.querySelector('[aria-busy=true]')")
    for box in panel.locator("input[type=checkbox]").all():
        if box.is_enabled():
            box.click()
    for text in panel.locator("input[type=text], textarea").all():
        if text.is_enabled():
            text.press_sequentially("7")
    for button in panel.locator("button[data-action]").all():
        if button.get_attribute("aria-disabled") != "true":
            button.press("Enter")
            panel.page.wait_for_function("!document.querySelector('[aria-busy=true]')")
    picture = panel.locator(".panel-parts [data-action]")
    if picture.count():
        picture.first.click()


def shows_its_last_answer(panel: Locator, asked: list[tuple[str, str]]) -> None:
    name = panel.get_attribute("name")
    answers = [
        json.loads(answer) for request, answer in asked if json.loads(request).get("name") == name
    ]
    last = answers[-1]
    expect(panel.locator(".panel-words")).to_have_text(last.get("error") or last["words"])
    drawn = [answer["parts"] for answer in answers if "parts" in answer][-1]
    for part, html in drawn.items():
        shown = panel.locator(f"[data-part='{part}']").inner_text()
        plain = panel.page.evaluate(
            "(html) => { const box = document.createElement('div'); box.innerHTML = html;"
            " return box.textContent; }",
            html,
        )
        # What is shown may be broken into lines; the letters are the same.
        squeezed = re.sub(r"\s+", "", plain)
        for word in shown.split():
            assert word.lower() in squeezed.lower()


@pytest.fixture(scope="module")
def without_scripts(chromium: Browser) -> Iterator[Tab]:
    context = chromium.new_context(java_script_enabled=False, viewport=WIDE)
    yield context.new_page()
    context.close()


@each_live_page
def test_without_scripts_picture_table_and_code_stand_there(
    without_scripts: Tab, address: str, name: str
) -> None:
    tab = without_scripts
    tab.goto(f"{address}/{name}")
    assert tab.locator(".live-bar").count() == 0
    for panel in tab.locator("servelab-panel").all():
        expect(panel.locator("form")).to_be_hidden()
        assert panel.locator(".panel-words").inner_text().strip()
        assert panel.locator(".panel-part").count()
    code = tab.locator(".tag_live .cell_input pre").all_inner_texts()
    assert code
    assert all(text.strip() for text in code)


@pytest.mark.parametrize("name", [name for name in PAGES if name not in LIVE_PAGES])
def test_a_page_without_live_parts_serves_everyone(
    one_tab: Visit, judged: dict[str, list[str]], address: str, name: str
) -> None:
    one_tab.fetched.clear()
    one_tab.wrong.clear()
    one_tab.tab.set_viewport_size(WIDE)
    one_tab.tab.emulate_media(color_scheme="light")
    one_tab.tab.goto(f"{address}/{name}")
    fits_a_telephone(one_tab, address)
    serves_everyone(one_tab, judged, address)
    assert not one_tab.wrong
