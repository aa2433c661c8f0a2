"""How fast the live pages answer: ``python benchmarks/live_pages.py``; needs the built book.

In a browser that has the page open: the time from the first click on Run to the first result, in
fresh contexts (nothing cached); then from a slider's move to the picture in place, for each panel.
Goals: a first result within 5 s (better 2.5), a slider's answer within 50 ms at the median.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, Locator

from servelab import units

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import browser  # noqa: E402

SITE = ROOT / "_build" / "html"
FIRST_RESULT_SECONDS, ANSWER_SECONDS = 5.0, 0.05
STARTS, MOVES = 5, 20
LIMIT = 60_000  # milliseconds
# Moves the slider as the keyboard does and tells how long the answer took.
MOVE = """async (slider) => {
  const panel = slider.closest("servelab-panel");
  const began = performance.now();
  slider.value = slider.valueAsNumber < slider.max ? slider.valueAsNumber + 1 : 0;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  while (panel.hasAttribute("aria-busy")) await new Promise((done) => setTimeout(done));
  return (performance.now() - began) / 1000;
}"""


def pages(mark: str) -> list[str]:
    """The pages of the book that hold something live of one kind."""
    found = sorted(SITE.glob("chapters/*.html"))
    return [str(p.relative_to(SITE)) for p in found if mark in p.read_text(encoding="utf-8")]


def first_result_seconds(chromium: Browser, address: str, page: str) -> float:
    """Open a page as for the first time, and run its first cell."""
    context = chromium.new_context()
    tab = context.new_page()
    tab.goto(f"{address}/{page}", wait_until="load")
    began = time.perf_counter()
    tab.locator(".live-run").first.click()
    tab.locator(".live-ran").first.wait_for(timeout=LIMIT)
    seconds = time.perf_counter() - began
    context.close()
    return seconds


def answer_seconds(panel: Locator) -> list[float]:
    """Move the first slider of a panel, after one move that is not counted."""
    slider = panel.locator("input[type=range]:enabled").first
    return [slider.evaluate(MOVE, timeout=LIMIT) for _ in range(MOVES + 1)][1:]


def row(what: str, samples: list[float], goal: float) -> list[object]:
    """One line of the table."""
    median = statistics.median(samples)
    shown = [units.format_seconds(value) for value in (median, max(samples), goal)]
    return [what, *shown, "reached" if median <= goal else "missed"]


def report() -> None:
    """Measure and print, or say why not."""
    if browser.path() is None:
        print(browser.MISSING)
        return
    if not (cells := pages("tag_live")):
        print("live pages left out: the book is not built (make book)")
        return
    rows = []
    with browser.opened() as chromium, browser.served(SITE) as address:
        starts = [first_result_seconds(chromium, address, cells[0]) for _ in range(STARTS)]
        rows.append(row("first result after the click", starts, FIRST_RESULT_SECONDS))
        for page in pages("<servelab-panel"):
            tab = chromium.new_page()
            tab.goto(f"{address}/{page}", wait_until="load")
            for panel in tab.locator("servelab-panel").all():
                name = panel.get_attribute("name")
                if panel.locator("input[type=range]").count():
                    seconds = answer_seconds(panel)
                    rows.append(row(f"{name}, a slider's answer", seconds, ANSWER_SECONDS))
            tab.close()
    print("live pages, in Chromium:")
    print(units.table(rows, ["what", "median", "longest", "goal", ""]))


if __name__ == "__main__":
    report()
