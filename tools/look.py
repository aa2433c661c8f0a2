"""Look at the built book as a reader does: ``python tools/look.py SITE OUT [PAGE ...]``.

Serves SITE on the loopback address and writes one PNG per page, width and colour scheme into OUT.
Reports what a screenshot does not show: errors in the browser's console, failed requests, requests
to another host, and pages that scroll sideways; any of them makes the exit code 1.
Needs Chromium: the one on the PATH, or the one of ``playwright install chromium``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import browser

WIDTHS = {"wide": 1280, "narrow": 390}
SCHEMES = ("light", "dark")
# Content wider than the page makes the whole page scroll; what scrolls in its own box does not.
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def look(
    chromium: Browser, address: str, page_name: str, width: int, scheme: str, out: Path
) -> list[str]:
    """Take one screenshot; return what went wrong on the page."""
    wrong: list[str] = []
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()

    def on_console(message: Any) -> None:
        if message.type == "error":
            wrong.append(f"console: {message.text}")

    def on_request(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            wrong.append(f"outside request: {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: wrong.append(f"page error: {error}"))
    page.on("request", on_request)
    page.on("requestfailed", lambda request: wrong.append(f"failed: {request.url}"))
    page.goto(f"{address}/{page_name}", wait_until="networkidle")
    page.evaluate("window.MathJax && MathJax.startup ? MathJax.startup.promise : null")
    if page.evaluate("document.documentElement.dataset.theme") != scheme:
        wrong.append(f"the page does not follow the {scheme} colour scheme")
    if (extra := page.evaluate(SIDEWAYS)) > 0:
        wrong.append(f"scrolls sideways by {extra} pixels")
    name = page_name.removesuffix(".html").replace("/", "-")
    page.screenshot(path=str(out / f"{name}-{width}-{scheme}.png"), full_page=True)
    context.close()
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("pages", nargs="*", help="as chapters/02_the_roofline.html; all by default")
    options = parser.parse_args(arguments)
    pages = options.pages or sorted(
        str(path.relative_to(options.site))
        for path in options.site.rglob("*.html")
        if not any(part.startswith("_") for part in path.relative_to(options.site).parts)
    )
    options.out.mkdir(parents=True, exist_ok=True)
    found = 0
    with browser.opened() as chromium, browser.served(options.site) as address:
        for page_name in pages:
            for label, width in WIDTHS.items():
                for scheme in SCHEMES:
                    for wrong in look(chromium, address, page_name, width, scheme, options.out):
                        print(f"{page_name} ({label}, {scheme}): {wrong}", flush=True)
                        found += 1
    print(f"{len(pages)} pages, {len(pages) * 4} screenshots in {options.out}, {found} complaints")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
