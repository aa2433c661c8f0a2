"""The live pages in a browser: cells and panels used as a reader uses them, on the built book.

Whatever a page asks its worker is recorded with the answer, and asked again in CPython.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, expect
from playwright.sync_api import Page as Tab

from servelab import live
from servelab.live.asked import PASTED
from tests.live.stored import assert_as_stored
from tests.live.visits import WIDE, Visit, visiting
from tools import browser, live_assets

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
PAGES = sorted(
    str(path.relative_to(SITE))
    for path in SITE.rglob("*.html")
    if not any(part.startswith("_") for part in path.relative_to(SITE).parts)
)
LIVE_PAGES = [name for name in PAGES if "live/live.js" in (SITE / name).read_text("utf-8")]
PREFIX = "/some/where"
CONFIG = ROOT / "src" / "servelab" / "data" / "configs" / "llama-3-8b.json"
MAX_TRANSFER_BYTES = 1_500_000  # with gzip, figures and live Python apart
NARROW = {"width": 390, "height": 844}

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="THE BOOK IS NOT BUILT: run make book, or make test"),
    pytest.mark.skipif(browser.path() is None, reason=browser.MISSING),
]
each_live_page = pytest.mark.parametrize("name", LIVE_PAGES)

SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Icons that were cut out, and fonts that cannot be read.
WITHOUT_ICON = """() => [
  ...[...document.querySelectorAll("[class*='fa-']")]
    .filter((icon) => getComputedStyle(icon, "::before").content === "none")
    .map((icon) => icon.outerHTML),
  ...[...document.fonts].filter((font) => font.status === "error").map((font) => font.family),
]"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    axe = live_assets.PACKAGES / "node_modules" / "axe-core" / "axe.min.js"
    with browser.served(SITE, PREFIX, axe) as found:
        yield found


@pytest.fixture(scope="module")
def one_tab(reader: BrowserContext, address: str) -> Iterator[Visit]:
    """For pages without Python, one after the other: a new tab would compile their scripts anew."""
    with visiting(reader.new_page(), address) as found:
        yield found


def replayed(asked: list[tuple[str, str]]) -> None:
    """Ask the same in CPython and compare."""
    page = live.Page()
    for request, answer in asked:
        assert json.loads(answer) == json.loads(page.ask(request)), request


# ---- What every page owes everyone -------------------------------------------------------------

# Faults of the theme, by the rule of axe-core and what it is found on: text that a button hides
# from the eye, the logo outside the landmarks, arrows without a name; docutils' old role.
THEME_FAULTS = {
    "label-content-name-mismatch": r"search-button|theme-switch-button|Toggle hidden content",
    "region": r"logo__image",
    "summary-name": r"toctree-(l|toggle)|details\[open=\"open\"\] > summary",
    "aria-allowed-role": r"doc-biblioentry",
    "aria-deprecated-role": r"doc-biblioentry",
    "aria-required-children": r"citation-list",  # docutils: a list of doc-biblioentry
}
# axe-core's time is that of a page's elements, and most of them are written by generators, all
# alike: the entries of the API, of contents and of the index, the buttons of cells, the insides of
# formulas, the shapes of pictures and the coloured words of code. The first ones stand for the
# others.
SHORTEN = """() => {
  const alike = {
    "dl.py": 20, ".toc-entry": 30, ".indextable li": 30, "tr.cg-1": 30, ".headerlink": 10,
    ".live-bar": 5, ".live-note[hidden]": 5, ".copybtn": 5, "select > option": 5,
    "svg g.block": 10, "svg g.lane": 10,
  };
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
# What frames a page is much the same on all of them: an entry, a button or a line that an earlier
# page had too, but for where it leads, was judged there. Returns what the page adds.
DROP_KNOWN = """(seen) => {
  const known = new Set(seen);
  const frame = ".bd-docs-nav li, .sidebar-primary-item > :is(a, button), dialog > form," +
    ".bd-header-article :is(button, a, li), footer p";
  const said = (part) => part.outerHTML.replace(/ href="[^#"][^"]*"/g, ' href="elsewhere"');
  const parts = [...document.querySelectorAll(frame)].map((part) => [part, said(part)]);
  for (const [part, text] of parts) {
    if (known.has(text)) part.remove();
    known.add(text);
  }
  return [...known].slice(seen.length);
}"""
# The contrast of a text is that of its colour to what lies behind it, given its size: one text of
# each kind is judged, the first in the book. Returns the kinds that the page adds.
MARK_NEW_TEXTS = """(seen) => {
  const known = new Set(seen);
  document.querySelectorAll(".judged").forEach((element) => element.classList.remove("judged"));
  const backgrounds = new Map([[null, ""]]);
  const behind = (element) => {
    if (!backgrounds.has(element)) {
      const around = behind(element.parentElement);
      const { backgroundColor, backgroundImage, opacity } = getComputedStyle(element);
      const own = `${backgroundColor} ${backgroundImage} ${opacity};`;
      backgrounds.set(element, around.includes(own) ? around : own + around);
    }
    return backgrounds.get(element);
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility()) continue;
    const { color, fill, fontSize, fontWeight, textDecorationLine } = getComputedStyle(element);
    const look = [element.tagName, color, fill, fontSize, fontWeight, textDecorationLine];
    const kind = `${look} on ${behind(element)}`;
    if (!known.has(kind)) element.classList.add("judged");
    known.add(kind);
  }
  return [...known].slice(seen.length);
}"""
OF_CONTRAST = [
    {"id": "color-contrast", "selector": ".judged"},
    {"id": "link-in-text-block", "selector": "a[href].judged"},
]


@pytest.fixture(scope="module")
def judged() -> dict[str, list[str]]:
    """The kinds of text whose contrast was judged, by theme, and the parts of the pages' frame."""
    return {"light": [], "dark": [], "frame": []}


@functools.cache
def gzipped_bytes(file: str) -> int:
    return len(gzip.compress((SITE / file).read_bytes(), 6))


# Without noHtml it would write out every element that passes, a table with all that is in it.
CONFIGURE = "(rules) => axe.configure({ rules, noHtml: true })"
RUN = """async ([within, options]) => {
  const settings = { resultTypes: ["violations"], elementRef: true, ...options };
  const { violations } = await axe.run(within, settings);
  return violations.flatMap(({ id, nodes }) => nodes.map(({ target, element }) =>
    [id, `${target} ${element.outerHTML.slice(0, 120)}`]));
}"""


def violations(tab: Tab, within: str, **options: Any) -> list[str]:
    """What axe-core finds, the theme's faults apart: one line for each element."""
    return [
        f"{rule}: {element}"
        for rule, element in tab.evaluate(RUN, [within, options])
        if rule not in THEME_FAULTS or not re.search(THEME_FAULTS[rule], element)
    ]


def open_narrow(visit: Visit, address: str, name: str) -> None:
    """Open a page as on a telephone: no sideways scrolling, and a transfer within bounds."""
    visit.tab.set_viewport_size(NARROW)
    visit.tab.goto(f"{address}/{name}")
    visit.tab.evaluate("window.MathJax?.startup?.promise")
    assert visit.tab.evaluate(SIDEWAYS) <= 0
    assert not visit.tab.evaluate(WITHOUT_ICON)
    own = {url.split("?")[0].removeprefix(f"{address}/") for url in visit.fetched}
    text = [file for file in own if not file.startswith(("_images/", "data:"))]
    assert sum(map(gzipped_bytes, text)) < MAX_TRANSFER_BYTES


def serves_everyone(visit: Visit, judged: dict[str, list[str]], address: str) -> None:
    """In both themes nothing that axe-core objects to. The page is no longer whole afterwards."""
    tab = visit.tab
    tab.mouse.move(0, 0)  # what the pointer is on looks different
    tab.evaluate(SHORTEN)
    judged["frame"] += tab.evaluate(DROP_KNOWN, judged["frame"])
    tab.add_script_tag(url=f"{address}/axe.min.js")
    tab.evaluate(CONFIGURE, OF_CONTRAST)
    tab.add_style_tag(content="* { transition: none !important }")  # no colour in between is judged
    tab.set_viewport_size(WIDE)
    assert tab.evaluate(SIDEWAYS) <= 0
    is_first = not judged["light"]
    judged["light"] += tab.evaluate(MARK_NEW_TEXTS, judged["light"])
    found = violations(tab, "html", preload=is_first)  # style sheets: all pages have the same
    tab.emulate_media(color_scheme="dark")
    expect(tab.locator("html")).to_have_attribute("data-theme", "dark")
    if new := tab.evaluate(MARK_NEW_TEXTS, judged["dark"]):
        judged["dark"] += new
        rules = [rule["id"] for rule in OF_CONTRAST]
        found += [f"dark, {line}" for line in violations(tab, ".judged", runOnly=rules)]
    assert not found


# ---- The book's own pages --------------------------------------------------------------------


@each_live_page
def test_every_cell_and_panel_of_a_page_answers_as_cpython_does_and_serves_everyone(
    visit: Visit, judged: dict[str, list[str]], address: str, name: str
) -> None:
    open_narrow(visit, address, name)
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
        use(visit, panels.nth(index))
        write_into(visit, panels.nth(index))
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


HOSTILE = (  # a refusal quotes 40 characters
    "<img src=x onerror=alert(1)>'\"\u202e😀",
    "</textarea><script>alert(2)</script>",
    '{"a":' * 3000,  # one call of the parser for each would end Python
)


def use(visit: Visit, panel: Locator) -> None:
    """Move each control of a panel as a reader would, once with keys or text, once by pointer."""
    for choice in panel.locator("select").all():
        values = choice.locator("option").evaluate_all("all => all.map((o) => o.value)")
        if choice.is_enabled():
            choice.select_option(values[1 % len(values)])  # of the last, some refuse one another
            visit.settled()
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
    for box in panel.locator("input[type=checkbox]").all():
        if box.is_enabled():
            box.click()
    for text in panel.locator("input[type=text], textarea").all():
        if text.is_enabled():
            text.press_sequentially("7")
    for button in panel.locator("button[data-action]").all():
        if button.get_attribute("aria-disabled") != "true":
            button.press("Enter")
            visit.settled()
    picture = panel.locator(".panel-parts [data-action]")
    if picture.count():
        picture.first.click()
    visit.settled()


def write_into(visit: Visit, panel: Locator) -> None:
    """Whatever a reader writes into a field never becomes HTML; a configuration is read."""
    for choice in panel.locator(f"select:has(option[value={PASTED}])").all():
        choice.select_option(PASTED)
        visit.settled()
    for text in panel.locator("input[type=text], textarea").all():
        before = text.input_value()
        for hostile in HOSTILE:
            text.fill(hostile)
            visit.settled()
            assert not panel.locator("img, script").count()
        text.fill(CONFIG.read_text("utf-8") if text.get_attribute("name") == "config" else before)
        visit.settled()
    expect(panel.locator(".panel-words")).not_to_contain_text("config.json")


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
def without_scripts(reader: BrowserContext) -> Iterator[Tab]:
    tab = reader.new_page()
    tab.set_viewport_size({"width": NARROW["width"], "height": 100})  # there is little to paint
    protocol = reader.new_cdp_session(tab)
    protocol.send("Emulation.setScriptExecutionDisabled", {"value": True})
    yield tab
    tab.close()


# In one question: asked one by one, a page's answers cost as much as its loading.
STANDS_THERE = """() => {
  const count = (selector, within = document) => within.querySelectorAll(selector).length;
  return {
    bars: count(".live-bar"),
    notices: count("head script[src*='live/notice.js']"),
    panels: [...document.querySelectorAll("servelab-panel")].map((panel) => ({
      forms: count("form", panel),
      seen: [...panel.querySelectorAll("form")].filter((form) => form.checkVisibility()).length,
      words: [...panel.querySelectorAll(".panel-words")].map((words) => words.innerText.trim()),
      parts: count(".panel-part", panel),
    })),
    code: [...document.querySelectorAll(".tag_live .cell_input pre")].map((pre) => pre.innerText),
  };
}"""


@each_live_page
def test_without_scripts_picture_table_and_code_stand_there(
    without_scripts: Tab, address: str, name: str
) -> None:
    without_scripts.goto(f"{address}/{name}", wait_until="domcontentloaded")
    found = without_scripts.evaluate(STANDS_THERE)
    assert found["bars"] == 0
    assert found["notices"] == 1  # for old browsers
    for panel in found["panels"]:
        assert (panel["forms"], panel["seen"]) == (1, 0)
        assert len(panel["words"]) == 1
        assert all(panel["words"])
        assert panel["parts"]
    assert found["code"]
    assert all(text.strip() for text in found["code"])


@pytest.mark.parametrize("name", [name for name in PAGES if name not in LIVE_PAGES])
def test_a_page_without_live_parts_serves_everyone(
    one_tab: Visit, judged: dict[str, list[str]], address: str, name: str
) -> None:
    one_tab.tab.evaluate("document.body.replaceChildren()")  # no old page is laid out anew
    one_tab.fetched.clear()
    one_tab.wrong.clear()
    one_tab.tab.emulate_media(color_scheme="light")
    open_narrow(one_tab, address, name)
    serves_everyone(one_tab, judged, address)
    assert not one_tab.wrong
