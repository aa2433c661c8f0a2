"""The built pages: every link inside the book resolves, and nothing is fetched from outside."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup, Tag
from fontTools.ttLib import TTFont

from tools import pdf

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html"
PAGES = sorted(
    path
    for path in SITE.rglob("*.html")
    if not {"_static", "_sources"} & set(path.relative_to(SITE).parts)
)
# What the browser fetches when a page opens: attributes by tag.
LOADED = {
    "script": ("src",),
    "link": ("href",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src",),
    "object": ("data",),
}
CODE = {"pre", "code", "script", "style"}
OUTSIDE = re.compile(r"^(https?:)?//")
ADDRESS = re.compile(r"https?://[^\s\"'<>{}\\]+[^\s\"'<>{}\\.,;)]")
ADDRESSES_ALLOWED = {
    "https://creativecommons.org/licenses/by/4.0/",
    "https://docs.flashinfer.ai/api/cascade.html",
    "https://docs.vllm.ai/en/latest/design/prefix_caching/",
}
# A change to an engine is its own source.
CHANGES = re.compile(r"https://github\.com/[\w-]+/[\w-]+/(?:pull|issues)/\d+")

pytestmark = pytest.mark.skipif(
    not PAGES, reason="THE BOOK IS NOT BUILT, so no page was checked: run make book, or make test"
)
# All tests of a page in one worker, which reads it once.
NAMED = {str(path.relative_to(SITE)): path for path in PAGES}
each_page = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=pytest.mark.xdist_group(name))
        for name, path in NAMED.items()
    ],
)


@functools.cache
def soup(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    found = soup(path).find_all(lambda tag: tag.has_attr("id") or tag.has_attr("name"))
    return frozenset(str(tag[key]) for tag in found for key in ("id", "name") if tag.has_attr(key))


def addresses(path: Path, attributes: Mapping[str, tuple[str, ...]]) -> set[str]:
    """What stands on a page in attributes, by tag."""
    return {
        str(tag[key])
        for tag in soup(path).find_all(list(attributes))
        for key in attributes[tag.name]
        if tag.has_attr(key)
    }


def dead(path: Path, reference: str) -> str:
    """Why a reference inside the book leads nowhere; empty if it leads somewhere."""
    parts = urlsplit(reference)
    if parts.scheme or parts.netloc or not reference:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target = target / "index.html"
    if not target.is_file():
        return f"{reference}: no such file"
    fragment = unquote(parts.fragment)
    if fragment and target.suffix == ".html" and fragment not in anchors(target):
        return f"{reference}: no such anchor"
    return ""


@functools.cache
def sources() -> frozenset[str]:
    """Outside addresses a page may link to: the bibliography's, and those beside the data."""
    bibliography = (ROOT / "references.bib").read_text()
    found = set(ADDRESS.findall(bibliography)) | ADDRESSES_ALLOWED
    found |= {
        f"https://doi.org/{doi}" for doi in re.findall(r"doi\s*=\s*\{([^}]+)\}", bibliography)
    }
    for data in (ROOT / "src" / "servelab" / "data").rglob("*.*"):
        if data.suffix in {".json", ".md"}:
            found |= set(ADDRESS.findall(data.read_text(encoding="utf-8")))
    return frozenset(found)


def repository() -> str:
    return yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]


def allowed(address: str) -> bool:
    launches = repository() and address.startswith(
        (repository(), "https://colab.research.google.com")
    )
    return bool(launches or CHANGES.fullmatch(address)) or address in sources()


@pytest.mark.xdist_group("index.html")  # so the largest group, which xdist starts first
def test_every_link_and_picture_of_the_printed_book_is_found() -> None:
    texts = pdf.articles(SITE, yaml.safe_load((ROOT / "_toc.yml").read_text()))
    tags = [tag for text in texts.values() for tag in (text, *text.find_all(True))]
    ids = Counter(str(tag["id"]) for tag in tags if tag.has_attr("id"))
    links = [str(tag["href"]) for tag in tags if tag.name == "a" and tag.has_attr("href")]
    inside = {link[1:] for link in links if link.startswith("#")}
    assert len(inside) > 100
    inside.update(map(pdf.anchor, texts))  # the contents lead there
    assert not [name for name in inside if ids[name] != 1]
    assert not [link for link in links if not re.match("#|https?:", link)]
    pictures = [str(tag["src"]) for tag in tags if tag.name == "img"]
    assert not [picture for picture in pictures if not (SITE / picture).is_file()]


@each_page
def test_every_reference_inside_the_book_resolves(path: Path) -> None:
    followed = addresses(path, {**LOADED, "a": ("href",)})
    assert not [why for reference in followed if (why := dead(path, reference))]


@each_page
def test_nothing_is_loaded_from_another_host(path: Path) -> None:
    assert not [address for address in addresses(path, LOADED) if OUTSIDE.match(address)]
    styles = " ".join(tag.get_text() for tag in soup(path).find_all("style"))
    assert not re.search(r"url\(\s*['\"]?(https?:)?//", styles)


def test_no_stylesheet_loads_from_another_host() -> None:
    sheets = list(SITE.rglob("*.css"))
    assert sheets
    outside = re.compile(r"(?:url\(\s*|@import\s+)['\"]?(?:https?:)?//")
    assert not [sheet.name for sheet in sheets if outside.search(sheet.read_text(encoding="utf-8"))]


def test_every_icon_of_a_style_sheet_has_a_letter_in_a_font() -> None:
    rules = "".join(sheet.read_text("utf-8") for sheet in (SITE / "_static").rglob("*.css"))
    wanted = {int(code, 16) for code in re.findall(r"\\(f[0-9a-f]{3})\b", rules)}
    wanted |= {ord(letter) for letter in rules if "\ue000" <= letter <= "\uf8ff"}
    assert {0xF019, 0xF065, 0xF09B, 0xF0EB, 0xF186} <= wanted  # also by themselves, and our own
    fonts = (SITE / "_static" / "vendor" / "fontawesome" / "webfonts").glob("*.ttf")
    assert wanted <= {code for path in fonts for code in TTFont(path).getBestCmap() or ()}


@each_page
def test_outside_links_lead_only_to_named_sources(path: Path) -> None:
    linked = addresses(path, {"a": ("href",)})
    assert not [link for link in linked if OUTSIDE.match(link) and not allowed(link)]


@each_page
def test_every_image_has_a_text_alternative(path: Path) -> None:
    assert not [
        str(tag) for tag in soup(path).find_all("img") if not str(tag.get("alt", "")).strip()
    ]


def prose(tag: Tag) -> Iterator[str]:
    """The text below a tag, apart from code, and from what MathJax turns into formulas."""
    for child in tag.children:
        if not isinstance(child, Tag):
            yield str(child)
        elif child.name not in CODE and "math" not in child.get_attribute_list("class"):
            yield from prose(child)


@each_page
def test_no_formula_is_left_as_source(path: Path) -> None:
    article = soup(path).find("article")
    if not isinstance(article, Tag):
        return
    left = re.findall(r".{0,30}(?:\$[^\s$]|\\\(|\\\[).{0,30}", " ".join(prose(article)))
    assert not left


@each_page
def test_no_page_names_the_folder_it_was_built_in(path: Path) -> None:
    assert str(ROOT) not in path.read_text(encoding="utf-8")


@each_page
def test_a_page_has_one_title(path: Path) -> None:
    # The theme repeats the title in a block that only a printer sees.
    titles = [tag for tag in soup(path).find_all("h1") if not tag.find_parent(class_="onlyprint")]
    assert len(titles) == 1


@each_page
def test_no_link_to_a_repository_before_there_is_one(path: Path) -> None:
    if repository():
        return
    links = soup(path).select("[class*=repository], [class*=btn-source], [class*=launch]")
    assert not [str(tag) for tag in links if tag.name == "a"]


def test_search_finds_a_word_of_the_first_chapter() -> None:
    text = (SITE / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert "chapters/01_what_one_token_costs" in index["docnames"]
    assert "rooflin" in index["terms"]  # as the stemmer leaves it
