"""Print the whole book as one PDF: ``python tools/pdf.py [SITE] [OUT]``, or ``make pdf``.

The articles of all pages are put into one document, in the order of the contents, each under a
page of its own; their ids get the page's name as a prefix, so that a link from one chapter to
another leads to its place in the PDF. Chromium prints it, with the book's own styles: live cells
and panels stand there as their stored pictures, without controls. Links to pages that are no part
of the book's text (sources, indexes, downloads) lose their target and keep their words.
"""

from __future__ import annotations

import argparse
import posixpath
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from bs4 import BeautifulSoup, Tag
from bs4.filter import SoupStrainer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import browser  # noqa: E402

REFERENCES = {"id", "for", "aria-labelledby", "aria-describedby"}
ADDRESSES = {"img": "src", "source": "srcset", "object": "data"}
# What only a screen needs, by its class.
SCREEN_ONLY = {
    "headerlink",
    "live-bar",
    "copybtn",
    "panel-controls",
    "onlyprint",
    "prev-next-area",
}
MINUTE = 60_000
STYLE = """
@page { size: A4; margin: 18mm 16mm 20mm; }
html { font-size: 10.5px; }
body { display: block; background: #fff; }
.book-title, .book-page:not(:last-child) { break-after: page; }
.book-title { text-align: center; padding-top: 30vh; }
.book-contents li { list-style: none; margin: 0.2rem 0; }
.book-contents .part { font-weight: 600; margin-top: 1rem; }
article { max-width: none !important; padding: 0 !important; }
pre { white-space: pre-wrap !important; overflow-wrap: anywhere; }
table { font-size: 0.9em; max-width: 100%; }
figure, img, .servelab-picture, .admonition, tr, pre { break-inside: avoid; }
h1, h2, h3, h4, figcaption { break-after: avoid; }
.servelab-picture { max-width: 420px !important; }
.bd-article img { max-height: 22cm; }
div.math, .output, .text_html, .panel-table { overflow: visible !important; }
"""


def contents(toc: Any) -> list[tuple[str, list[str]]]:
    """The parts of the book, each with its pages in order."""
    parts = [("", [toc["root"]])]
    for part in toc["parts"]:
        pages = []
        for chapter in part["chapters"]:
            pages += [chapter["file"], *(s["file"] for s in chapter.get("sections", []))]
        parts.append((part["caption"], pages))
    return parts


def anchor(page: str, fragment: str = "") -> str:
    """The id that a place of a page has in the one document."""
    name = page.replace("/", "-")
    return f"{name}--{fragment}" if fragment else name


def article(site: Path, page: str, pages: set[str]) -> Tag:
    """The text of one page, its ids and addresses as the one document needs them."""
    text = (site / f"{page}.html").read_text(encoding="utf-8")
    found = BeautifulSoup(text, "html.parser", parse_only=SoupStrainer("article")).find("article")
    if not isinstance(found, Tag):
        raise ValueError(f"{page}.html has no article")
    folder = posixpath.dirname(page)
    for tag in found.find_all(True):
        if tag.decomposed:  # with the tag around it
            continue
        if tag.name == "script" or SCREEN_ONLY.intersection(tag.get_attribute_list("class")):
            tag.decompose()
            continue
        if tag.name == "details":
            tag["open"] = ""
        for name in REFERENCES & tag.attrs.keys():
            tag[name] = anchor(page, str(tag[name]))
        source = ADDRESSES.get(tag.name, "")
        if source in tag.attrs and not urlsplit(str(tag[source])).scheme:
            tag[source] = posixpath.normpath(posixpath.join(folder, str(tag[source])))
        if tag.name == "a" and "href" in tag.attrs:
            retarget(tag, page, pages)
    found["class"] = "bd-article"
    found["id"] = anchor(page)
    return found


def retarget(link: Tag, page: str, pages: set[str]) -> None:
    """Let a link inside the book lead to its place in the one document."""
    parts = urlsplit(str(link["href"]))
    if parts.scheme:
        return
    target = page
    if parts.path:
        path = posixpath.join(posixpath.dirname(page), unquote(parts.path))
        target = posixpath.normpath(path).removesuffix(".html")
    if target in pages:
        link["href"] = "#" + anchor(target, unquote(parts.fragment))
    else:
        del link["href"]


def title(text: Tag) -> str:
    """The title of a page, with its number."""
    heading = text.find("h1")
    return " ".join(heading.get_text(" ").split()) if isinstance(heading, Tag) else ""


def articles(site: Path, toc: Any) -> dict[str, Tag]:
    """The texts of all pages, by page."""
    pages = [page for _, names in contents(toc) for page in names]
    return {page: article(site, page, set(pages)) for page in pages}


def assemble(site: Path, config: Any, toc: Any) -> str:
    """One HTML document of the whole book; it stands in the site's root."""
    texts = articles(site, toc)
    head = BeautifulSoup((site / "index.html").read_text(encoding="utf-8"), "html.parser").head
    if head is None:
        raise ValueError("index.html has no head")
    styles = "".join(str(tag) for tag in head.find_all("link", rel="stylesheet"))
    math = "".join(
        str(t) for t in head.find_all("script") if "MathJax" in str(t) or "mathjax" in str(t)
    )
    listed, bodies = [], []
    for caption, names in contents(toc):
        if caption:
            listed.append(f'<li class="part">{caption}</li>')
        for page in names:
            listed.append(f'<li><a href="#{anchor(page)}">{title(texts[page])}</a></li>')
            bodies.append(f'<div class="book-page">{texts[page]}</div>')
    return (
        f'<!DOCTYPE html><html lang="en" data-theme="light" data-mode="light"><head>'
        f'<meta charset="utf-8"><title>{config["title"]}</title>{styles}{math}'
        f"<style>{STYLE}</style></head><body>"
        f'<div class="book-title"><h1>{config["title"]}</h1><p>{config["author"]}</p></div>'
        f'<div class="book-page bd-article"><h1>Contents</h1><ul class="book-contents">'
        f"{''.join(listed)}</ul></div>{''.join(bodies)}</body></html>"
    )


def main(arguments: list[str] | None = None) -> int:
    """Write the PDF."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("site", type=Path, nargs="?", default=ROOT / "_build" / "html")
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "_build" / "book.pdf")
    options = parser.parse_args(arguments)
    if browser.path() is None:
        print(f"Error: {browser.MISSING}", file=sys.stderr)
        return 1
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    whole = options.site / "_whole_book.html"
    whole.write_text(assemble(options.site, config, toc), encoding="utf-8")
    try:
        with browser.opened() as chromium, browser.served(options.site) as address:
            tab = chromium.new_page()
            tab.set_default_timeout(5 * MINUTE)
            tab.goto(f"{address}/{whole.name}", wait_until="load")
            tab.evaluate("window.MathJax?.startup?.promise")
            number = '<span style="font-size:8px;width:100%;text-align:center" class="pageNumber">'
            tab.pdf(
                path=options.out,
                prefer_css_page_size=True,
                print_background=True,
                display_header_footer=True,
                header_template="<span></span>",
                footer_template=f"{number}</span>",
                tagged=True,
                outline=True,  # the bookmarks, from the headings
            )
    finally:
        whole.unlink()
    print(f"==> {options.out}, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
