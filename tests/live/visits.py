"""A reader in a browser: a page that is open, what was done on it, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Dialog, Locator, Request
from playwright.sync_api import Page as Tab

LIMIT = 30_000  # milliseconds: a guard, not a measurement
START_LIMIT = 4 * LIMIT  # Python starts in seconds, on a busy machine in many
WIDE = {"width": 1280, "height": 900}

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
            self.tab.wait_for_function(fewer, arg=left, polling=50, timeout=START_LIMIT)

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


def opened_from(tab: Tab) -> Tab:
    """A further tab, in the same process: it finds compiled what that tab's Python compiled."""
    with tab.context.expect_page() as opened:
        tab.evaluate("() => { window.open() }")
    return opened.value


@contextmanager
def visiting(tab: Tab, address: str) -> Iterator[Visit]:
    """Make a tab a reader's, and watch its requests, its console and its errors."""
    context, visit = tab.context, Visit(tab)

    def on_request(request: Request) -> None:
        visit.fetched.append(request.url)
        if not request.url.startswith((address, "data:", "blob:", "file:")):  # of this machine
            visit.wrong.append(f"outside: {request.url}")

    def on_console(message: Any) -> None:
        if message.type == "error":
            visit.wrong.append(f"console: {message.text}")

    def on_failure(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # by the reader, who left the page
            visit.wrong.append(f"{request.failure}: {request.url}")

    def on_dialog(dialog: Dialog) -> None:  # no page of ours opens one
        visit.wrong.append(f"{dialog.type}: {dialog.message}")
        dialog.dismiss()

    context.on("request", on_request)  # a worker's too
    tab.on("dialog", on_dialog)
    tab.on("console", on_console)
    tab.on("pageerror", lambda error: visit.wrong.append(f"error: {error}"))
    tab.on("requestfailed", on_failure)
    tab.set_default_timeout(LIMIT)
    tab.set_viewport_size(WIDE)
    tab.emulate_media(color_scheme="light", reduced_motion="reduce")
    tab.add_init_script(RECORDER)
    yield visit
    context.remove_listener("request", on_request)
