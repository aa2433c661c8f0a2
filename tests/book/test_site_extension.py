"""The local Sphinx extension, in both states: with and without a public address."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pydata_sphinx_theme
import pytest
from fontTools.ttLib import TTFont

ROOT = Path(__file__).resolve().parents[2]
COLAB = {"colab_url": "https://colab.research.google.com"}


@pytest.fixture(scope="module")
def extension() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "book_site", ROOT / "_extensions" / "book_site.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options_for(extension: ModuleType, address: str) -> dict[str, object]:
    config = SimpleNamespace(
        html_theme_options={"repository_url": address, "launch_buttons": dict(COLAB)}
    )
    extension.set_theme_options(SimpleNamespace(), config)
    return config.html_theme_options


def test_without_an_address_no_button_leads_anywhere(extension: ModuleType) -> None:
    options = options_for(extension, "")
    assert options["launch_buttons"] == {}
    assert "repository_url" not in options
    assert not options["use_repository_button"]
    assert not options["use_issues_button"]


def test_with_an_address_the_buttons_appear(extension: ModuleType) -> None:
    options = options_for(extension, "https://example.org/team/book")
    assert options["launch_buttons"] == COLAB
    assert options["repository_url"] == "https://example.org/team/book"
    assert options["use_repository_button"]
    assert options["use_issues_button"]


def test_a_script_is_kept_once_and_an_outside_one_never(extension: ModuleType) -> None:
    names = ["a.js", "https://example.org/b.js", "a.js", "sphinx-thebe.js", "c.js"]
    context = {"script_files": names}
    extension.clean_scripts(SimpleNamespace(), "page", "page.html", context, None)
    assert context["script_files"] == ["a.js", "c.js"]


def test_a_signature_with_a_factory_can_be_parsed(extension: ModuleType) -> None:
    # A dataclass prints such a default so; Sphinx then gives up and shows the raw text, links lost.
    signature = "(name: str, rates: Mapping = <factory>)"
    written, _ = extension.name_factory(None, "class", "Chip", None, None, signature, "")
    ast.parse(f"def chip{written}: ...")
    assert extension.name_factory(None, "module", "chips", None, None, "", "") is None


def test_mathjax_loses_what_no_page_loads(extension: ModuleType, tmp_path: Path) -> None:
    root = tmp_path / "_static" / "mathjax"
    for name in ("tex-chtml.js", "tex-svg.js", "output/chtml/fonts/a.woff", "output/svg/b.js"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    extension.prune_mathjax(SimpleNamespace(outdir=str(tmp_path)), None)
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert left == {"tex-chtml.js", "output/chtml/fonts/a.woff"}


def test_of_the_icons_those_stay_that_a_page_or_a_sheet_names(
    extension: ModuleType, tmp_path: Path
) -> None:
    theme = Path(pydata_sphinx_theme.__file__).parent / "theme" / "pydata_sphinx_theme" / "static"
    static = shutil.copytree(theme, tmp_path / "_static")
    page = tmp_path / "page.html"
    script = '<script defer src="_static/scripts/fontawesome.js?digest=1"></script>'
    page.write_text(f'{script}<i class="fa-solid fa-bars"></i><script src="a.js"></script>')
    (static / "own.css").write_text('.insight::after { content: "\\f0eb"; }')
    extension.cut_icons(SimpleNamespace(outdir=str(tmp_path)), None)
    assert page.read_text() == '<i class="fa-solid fa-bars"></i><script src="a.js"></script>'
    assert not (static / "scripts" / "fontawesome.js").exists()
    rules = (static / "styles" / "pydata-sphinx-theme.css").read_text()
    assert r'.fa-bars:before,.fa-navicon:before{content:"\f0c9"}' in rules
    assert ".fa-bars-staggered" not in rules
    fonts = static / "vendor" / "fontawesome" / "webfonts"
    assert "woff2" not in rules
    assert not list(fonts.glob("*.woff2"))
    letters = TTFont(fonts / "fa-solid-900.ttf").getBestCmap()
    assert {0xF0C9, 0xF0EB, 0xF0F3} <= set(letters)  # the bell stands in the theme's sheet as it is
    assert len(letters) < 100
    # Once more, as where only one page is built again.
    extension.cut_icons(SimpleNamespace(outdir=str(tmp_path)), None)
    assert set(TTFont(fonts / "fa-solid-900.ttf").getBestCmap()) == set(letters)


def test_a_word_of_code_stands_in_no_element_that_looks_like_its_surroundings(
    extension: ModuleType,
) -> None:
    link = '<a class="reference internal" href="#T" title="T"><span class="pre">T</span></a>'
    bar = '<span class="w"> </span><span class="p"><span class="pre">|</span></span> '
    signature = (
        '<dt class="sig sig-object py" id="f">\n'
        '<span class="sig-name descname"><span class="pre">f</span></span>'
        '<em><span class="n"><span class="pre">x</span></span><span class="p">:</span> '
        f'<span class="n">{link}{bar}<span class="pre">None</span></span></em></dt>'
    )
    code = '<code><span class="pre">a</span> <span class="pre">b</span></code>'
    coloured = '<pre><span class="n">x</span><span class="p">:</span></pre>'
    context = {"body": f"{signature}<dd>{code}{coloured}</dd>"}
    extension.unwrap_words(SimpleNamespace(), "page", "page.html", context, None)
    slim_link = '<a class="reference internal" href="#T" title="T">T</a>'
    assert context["body"] == (
        '<dt class="sig sig-object py" id="f">\n<span class="sig-name descname">f</span>'
        f"<em>x: {slim_link} | None</em></dt><dd><code>a b</code>{coloured}</dd>"
    )
