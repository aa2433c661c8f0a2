"""What the site needs beyond Jupyter Book's own settings.

Hooks, each for one thing that a setting in ``_config.yml`` cannot say:

- theme options are added one by one, because setting ``html_theme_options`` there would replace
  all that Jupyter Book derives (repository and launch links);
- scripts that the theme adds twice, and those that would be fetched from another host, are dropped;
- the scripts of the live pages are loaded only by pages that hold a panel or a live cell;
- the parts of a docstring (Parameters, Raises, Source) become paragraphs of their own;
- a signature with a default made by a factory is written so that Sphinx can parse and link it;
- the copied MathJax is cut down to what an HTML page with TeX can load, the theme's script of two
  thousand icons to those that are used.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

DOCSTRING_PART = re.compile(r"(Models|Assumes|Ignores|Parameters|Fields|Returns|Raises|Source):")
# Relative to the copied MathJax: TeX in, HTML and CSS out, the menu and its aids to accessibility.
MATHJAX_KEPT = ("tex-chtml.js", "input/tex", "output/chtml/fonts", "ui", "a11y", "sre")

# An icon in the theme's script: name, width, height, other names, code point, outline.
ICON = re.compile(r'"?([\w-]+)"?:\[\d+,\d+,(\[[^]]*\]),"[0-9a-f]+",(?:"[^"]*"|\[[^]]*\])\],?')
ICON_CLASS = re.compile(r"\bfa-([\w-]+)")

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
    """Leave out of the theme's icons those that neither a page nor another script names.

    Whole, their script is 0.5 MB with gzip: half of what a page transfers.
    """
    script = Path(app.outdir, "_static", "scripts", "fontawesome.js")
    if error is not None or not script.is_file():
        return
    naming = [*Path(app.outdir).rglob("*.html"), *script.parent.glob("*theme.js")]
    used = {name for path in naming for name in ICON_CLASS.findall(path.read_text("utf-8"))}

    def kept(icon: re.Match[str]) -> str:
        return icon[0] if used & {icon[1], *re.findall(r"[\w-]+", icon[2])} else ""

    script.write_text(ICON.sub(kept, script.read_text("utf-8")), "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", set_theme_options, priority=100)  # before the theme reads them
    app.connect("html-page-context", add_live_scripts)
    app.connect("html-page-context", clean_scripts, priority=900)  # after every extension added its
    app.connect("autodoc-process-docstring", part_docstring)
    app.connect("autodoc-process-signature", name_factory)
    app.connect("build-finished", prune_mathjax, priority=900)  # after the copy
    app.connect("build-finished", cut_icons, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
