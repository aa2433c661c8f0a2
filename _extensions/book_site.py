"""What the site needs beyond Jupyter Book's own settings.

Hooks, each for one thing that a setting in ``_config.yml`` cannot say:

- theme options are added one by one, because setting ``html_theme_options`` there would replace
  all that Jupyter Book derives (repository and launch links);
- scripts that the theme adds twice, and those that would be fetched from another host, are dropped;
- the scripts of the live pages are loaded only by pages that hold a panel or a live cell;
- a word of code stands in no more elements than its looks need;
- the parts of a docstring (Parameters, Raises, Source) become paragraphs of their own;
- a signature with a default made by a factory is written so that Sphinx can parse and link it;
- the copied MathJax is cut down to what an HTML page with TeX can load, the theme's two thousand
  icons to those that are used.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from fontTools.subset import Subsetter
from fontTools.ttLib import TTFont
from sphinx.application import Sphinx
from sphinx.config import Config

DOCSTRING_PART = re.compile(r"(Models|Assumes|Ignores|Parameters|Fields|Returns|Raises|Source):")
# Relative to the copied MathJax: TeX in, HTML and CSS out, the menu and its aids to accessibility.
MATHJAX_KEPT = ("tex-chtml.js", "input/tex", "output/chtml/fonts", "ui", "a11y", "sre")

# A rule of the theme's style sheet that shows an icon: the icon's names.
ICON = re.compile(r'((?:\.fa-[\w-]+:before,?)+)\{content:"[^"]*"\}')
ICON_CLASS = re.compile(r"\bfa-([\w-]+)")
ICON_LETTER = re.compile(r"\\([ef][0-9a-f]{3})\b|([\ue000-\uf8ff])")
# The theme's script that replaces icons by SVG. Its style sheet shows them too, with a font.
ICON_SCRIPT = re.compile(r"<script[^>]*/fontawesome\.js[^>]*></script>")

# Sphinx wraps every word of code in an element that no style sheet of the site tells apart: on the
# page of the API two thirds of all elements.
WORD = re.compile(r'<span class="(?:pre|w)">([^<]*)</span>')
SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.DOTALL)
SIGNATURE_WORD = re.compile(r'<span class="[np]">((?:[^<]|<a [^>]*>[^<]*</a>)*)</span>')

# In the HTML of a page whose reader can ask Python something.
LIVE_MARKS = ("<servelab-panel", "tag_live")


def set_theme_options(app: Sphinx, config: Config) -> None:
    """Add our theme options; without a repository address, no link may point to one.

    The edit button stays off: it would open the generated notebook, not its Markdown source.
    """
    options = config.html_theme_options
    options.setdefault("navbar_persistent", [])  # else this theme shows a second search field
    options.setdefault("show_toc_level", 2)
    has_address = bool(options.get("repository_url"))
    options["use_repository_button"] = has_address
    options["use_issues_button"] = has_address
    if not has_address:
        options["launch_buttons"] = {}
        options.pop("repository_url", None)


def add_live_scripts(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let a page load the live scripts if something on it is live.

    Jupyter Book adds every script below ``_static`` to every page, as a classic one.
    """
    scripts = context.get("script_files", [])
    scripts[:] = [s for s in scripts if "/live/" not in str(getattr(s, "filename", s) or "")]
    if any(mark in context.get("body", "") for mark in LIVE_MARKS):
        app.add_js_file("live/live.js", type="module")
        app.add_js_file("live/notice.js", loading_method="defer")


def unwrap_words(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Take code out of elements that look like their surroundings."""

    def slim(signature: re.Match[str]) -> str:
        # From the inside: a type may hold punctuation.
        return SIGNATURE_WORD.sub(r"\1", SIGNATURE_WORD.sub(r"\1", signature[0]))

    context["body"] = SIGNATURE.sub(slim, WORD.sub(r"\1", context.get("body", "")))


def clean_scripts(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Keep one copy of each script of a page, and none of another host or of thebe."""
    seen: set[str] = set()
    kept = []
    for script in context.get("script_files", []):
        name = str(getattr(script, "filename", script) or "")
        body = str(getattr(script, "attributes", {}).get("body", ""))
        if "://" in name or "thebe" in (name + body).lower() or name + body in seen:
            continue
        seen.add(name + body)
        kept.append(script)
    context["script_files"] = kept


def part_docstring(
    app: Sphinx, what: str, name: str, subject: Any, options: Any, lines: list[str]
) -> None:
    """Set each part of a docstring apart, under a bold name."""
    parted = []
    for line in lines:
        if start := DOCSTRING_PART.match(line):
            parted += ["", f"**{start[1]}:**{line[start.end() :]}"]
        else:
            parted.append(line)
    lines[:] = parted


def name_factory(
    app: Sphinx, what: str, name: str, subject: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Write "..." for a default that a factory makes: ``<factory>`` is no Python."""
    return (signature.replace("<factory>", "..."), returns) if signature else None


def prune_mathjax(app: Sphinx, error: Exception | None) -> None:
    """Delete the parts of the copied MathJax that no page can load."""
    root = Path(app.outdir, "_static", "mathjax")
    if error is not None or not root.is_dir():
        return
    kept = [root / name for name in MATHJAX_KEPT]
    for path in sorted(root.rglob("*")):
        needed = any(path == k or k in path.parents or path in k.parents for k in kept)
        if needed or not path.exists():
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def cut_icons(app: Sphinx, error: Exception | None) -> None:
    """Leave icons to the style sheet, and there only those that a page or a script names.

    Whole, the theme's script of icons and its fonts are 0.7 MB with gzip, and the script works
    through a chapter for a tenth of a second.
    """
    static = Path(app.outdir, "_static")
    sheet = static / "styles" / "pydata-sphinx-theme.css"
    if error is not None or not sheet.is_file():
        return
    (static / "scripts" / "fontawesome.js").unlink(missing_ok=True)
    used = set()
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text("utf-8")
        used.update(ICON_CLASS.findall(text))
        if (without := ICON_SCRIPT.sub("", text)) != text:
            page.write_text(without, "utf-8")
    for script in sheet.parent.with_name("scripts").glob("*theme.js"):
        used.update(ICON_CLASS.findall(script.read_text("utf-8")))

    def kept(icon: re.Match[str]) -> str:
        return icon[0] if used.intersection(ICON_CLASS.findall(icon[1])) else ""

    rules = ICON.sub(kept, sheet.read_text("utf-8"))
    # Beside each font in WOFF2 stands the same one in TrueType, for which no package is missing.
    sheet.write_text(re.sub(r'url\([^)]*\.woff2\) format\("woff2"\),', "", rules), "utf-8")
    texts = [path.read_text("utf-8") for path in static.rglob("*.css")]
    found = [pair for text in texts for pair in ICON_LETTER.findall(text)]
    letters = {int(code, 16) if code else ord(letter) for code, letter in found}
    fonts = static / "vendor" / "fontawesome" / "webfonts"
    for path in fonts.glob("*.woff2"):
        path.unlink()
    for path in fonts.glob("*.ttf"):
        font = TTFont(path)
        cut = Subsetter()
        cut.populate(unicodes=letters)
        cut.subset(font)
        font.save(path)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", set_theme_options, priority=100)  # before the theme reads them
    app.connect("html-page-context", add_live_scripts)
    app.connect("html-page-context", unwrap_words)
    app.connect("html-page-context", clean_scripts, priority=900)  # after every extension added its
    app.connect("autodoc-process-docstring", part_docstring)
    app.connect("autodoc-process-signature", name_factory)
    app.connect("build-finished", prune_mathjax, priority=900)  # after the copy
    app.connect("build-finished", cut_icons, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
