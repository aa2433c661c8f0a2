"""Elements of HTML and SVG as text: what a picture, a table and a control are written with.

Models: markup as strings, put together from the inside out.

Assumes: what is given as ``content`` is markup already; all other text is escaped here.

Ignores: which elements and attributes there are.
"""

from __future__ import annotations

from functools import lru_cache

# Not xml.sax.saxutils: it brings urllib, and a page that starts would wait for that.
from html import escape as _escape


def clean(value: str) -> str:
    """Return ``value`` with each character that XML forbids replaced by a visible one.

    >>> clean("a\\x00b")
    'a�b'
    """
    if value.isprintable():  # nearly always, and quickly known
        return value
    return "".join(c if _allowed(ord(c)) else "\N{REPLACEMENT CHARACTER}" for c in value)


def _allowed(code: int) -> bool:
    if code < 0x20:
        return code in (0x9, 0xA, 0xD)
    return not (0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in (0xFFFE, 0xFFFF))


@lru_cache(maxsize=8192)  # a picture is mostly coordinates, and the next one has the same
def number(value: float) -> str:
    """Return a coordinate with at most two decimals.

    >>> number(3.0), number(1 / 3), number(-0.001)
    ('3', '0.33', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def element(tag: str, content: str = "", **attributes: str | float | None) -> str:
    """Return an element; ``content`` is markup, attributes are escaped, None leaves one out.

    An underscore in an attribute's name becomes a hyphen, one at its end is dropped.

    >>> element("g", "x", class_="block", data_block=7.0)
    '<g class="block" data-block="7">x</g>'
    """
    said = ""
    for name, value in attributes.items():
        if value is not None:
            quoted = _quoted(value) if isinstance(value, str) else f'"{number(value)}"'
            said += f" {_attribute(name)}={quoted}"
    return f"<{tag}{said}>{content}</{tag}>" if content else f"<{tag}{said}/>"


@lru_cache(maxsize=256)
def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


@lru_cache(maxsize=1024)  # classes and colours mostly
def _quoted(value: str) -> str:
    value = escaped(value)
    if '"' in value and "'" not in value:
        return f"'{value}'"
    return '"' + value.replace('"', "&quot;") + '"'


def escaped(value: str) -> str:
    """Return text as it stands between tags."""
    return _escape(clean(value), quote=False)
