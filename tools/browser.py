"""The browser that looks at the book: the system's Chromium, else Playwright's own."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "NO CHROMIUM ON THIS MACHINE, so the live pages were not tried in a browser: install it "
    "(apt-get install chromium, or playwright install chromium)"
)


@functools.cache
def path() -> str | None:
    """The program, or None where there is none."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


def program() -> dict[str, Any]:
    """How the browser is launched; ``FileNotFoundError`` where there is none."""
    if path() is None:
        raise FileNotFoundError(MISSING)
    # Containers have no user namespaces and a small /dev/shm; the pages are our own.
    return {"executable_path": path(), "args": ["--no-sandbox", "--disable-dev-shm-usage"]}


@contextmanager
def opened() -> Iterator[Browser]:
    """Start the browser and close it at the end."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**program())
        yield browser
        browser.close()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, below ``prefix`` if one is set, and files beside it; says nothing."""

    prefix = ""
    beside: Mapping[str, Path] = {}

    def translate_path(self, path: str) -> str:
        """The file of an address; one that is outside the prefix has none."""
        if not path.startswith(self.prefix + "/"):
            return str(Path(self.directory) / "no-such-file")
        path = path.removeprefix(self.prefix)
        if more := self.beside.get(urlsplit(path).path.removeprefix("/")):
            return str(more)
        return super().translate_path(path)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the requests that matter are reported by the browser."""


@contextmanager
def served(site: Path, prefix: str = "", *beside: Path) -> Iterator[str]:
    """Serve a folder on a free port of the loopback address; yields its address.

    Files ``beside`` it stand at its top. (A page put there by Playwright's ``route`` would cost the
    whole context the browser's cache.)
    """
    named = {path.name: path for path in beside}
    handler = type("Handler", (QuietHandler,), {"prefix": prefix, "beside": named})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}{prefix}"
    server.shutdown()
    server.server_close()
