"""A panel: a few controls, and the answer that Python gives for their values, as HTML.

Models: a panel is a name, its controls and one function from their values (text, as a form sends
them) to an `Answer`. The same function draws the stored output of a notebook and, in a page whose
reader moves a control, the new one: the page's script carries values and HTML, and computes
nothing. Until that script has taken the panel over, its controls are hidden: a page without
scripts, a notebook and a print show the answer to the first values.

Assumes: the name of a panel stands once on a page.

Ignores: how a page calls it (``servelab.live.page``), and what the pictures look like
(``servelab.explore``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from servelab.markup import element, escaped
from servelab.units import check_count

# What a form sends: the text of each control, by the control's name.
Values = Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What a panel shows for the values of its controls.

    Parameters: ``words``, the answer in a sentence or two, read aloud by a screen reader;
    ``parts``, HTML by name in the order in which the page shows it (an element with
    ``data-action="NAME"`` in it acts like a button when it is clicked, so a picture can be a
    control; give the same thing a real control too, for those without a pointer); ``said``, what
    stands beside a slider, by its name; ``values``, controls that the answer sets; ``stops``,
    sliders that it gives new stops; ``options``, choices that it gives new options; ``off``, the
    names of controls that can do nothing now.
    """

    words: str
    parts: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    stops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    off: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One of several: ``options`` as (value, text); ``value`` is chosen first."""

    name: str
    label: str
    options: tuple[tuple[str, str], ...]
    value: str

    def __post_init__(self) -> None:
        among(self.name, self.value, self.known)

    @property
    def known(self) -> tuple[str, ...]:
        """All that it can say."""
        return tuple(value for value, _ in self.options)

    def html(self, where: str, shown: Answer) -> str:
        """Return the control's HTML, its id ``where``, as the answer that is shown leaves it."""
        options = "".join(
            element(
                "option",
                escaped(text),
                value=value,
                selected="selected" if value == self.value else None,
            )
            for value, text in self.options
        )
        select = element(
            "select", options, id=where, name=self.name, disabled=_disabled(self.name, shown)
        )
        return _labelled(self.label, where, select)


@dataclass(frozen=True)
class Slider:
    """One of ``stops`` in a row; a form sends the stop itself, ``value`` is the first one."""

    name: str
    label: str
    stops: tuple[str, ...]
    value: str

    def __post_init__(self) -> None:
        among(self.name, self.value, self.known)

    @property
    def known(self) -> tuple[str, ...]:
        """All that it can say."""
        return self.stops

    def html(self, where: str, shown: Answer) -> str:
        """Return the control's HTML, its id ``where``, as the answer that is shown leaves it."""
        said = shown.said.get(self.name, self.value)
        # The page's script looks the stop up in the list; it knows no scale.
        slider = element(
            "input",
            id=where,
            name=self.name,
            type="range",
            min=0,
            max=len(self.stops) - 1,
            step=1,
            value=str(self.stops.index(self.value)),
            data_stops=" ".join(self.stops),
            aria_valuetext=said,
            disabled=_disabled(self.name, shown),
        )
        beside = element("output", escaped(said), for_=where)
        return _labelled(self.label, where, slider + beside)


@dataclass(frozen=True)
class Field:
    """Text that the reader types: one line, or ``lines`` of them."""

    name: str
    label: str
    value: str = ""
    lines: int = 1
    placeholder: str | None = None

    def __post_init__(self) -> None:
        check_count("lines", self.lines)

    def html(self, where: str, shown: Answer) -> str:
        """Return the control's HTML, its id ``where``, as the answer that is shown leaves it."""
        if self.lines == 1:
            body = element(
                "input",
                id=where,
                name=self.name,
                type="text",
                value=self.value,
                placeholder=self.placeholder,
                disabled=_disabled(self.name, shown),
            )
        else:
            opening = element(
                "textarea",
                id=where,
                name=self.name,
                rows=self.lines,
                placeholder=self.placeholder,
                spellcheck="false",
                disabled=_disabled(self.name, shown),
            ).removesuffix("/>")  # an empty text area needs its end tag too
            body = f"{opening}>{escaped(self.value)}</textarea>"
        return _labelled(self.label, where, body)


@dataclass(frozen=True)
class Switch:
    """On or off; a form sends "on" or "", ``value`` is the first of them."""

    name: str
    label: str
    value: str = ""

    def __post_init__(self) -> None:
        among(self.name, self.value, ["", "on"])

    def html(self, where: str, shown: Answer) -> str:
        """Return the control's HTML, its id ``where``, as the answer that is shown leaves it."""
        box = element(
            "input",
            id=where,
            name=self.name,
            type="checkbox",
            checked="checked" if self.value else None,
            disabled=_disabled(self.name, shown),
        )
        return _labelled(self.label, where, box)


@dataclass(frozen=True)
class Button:
    """Something to do: a press sends ``name`` as the action, beside all values."""

    name: str
    label: str

    value = ""

    def html(self, where: str, shown: Answer) -> str:
        """Return the control's HTML, its id ``where``, as the answer that is shown leaves it."""
        return element(
            "button",
            escaped(self.label),
            id=where,
            type="button",
            data_action=self.name,
            aria_disabled="true" if self.name in shown.off else None,  # it keeps the focus
        )


Control = Choice | Slider | Field | Switch | Button


@dataclass(frozen=True)
class Panel:
    """A panel: ``answer`` takes the values of all controls and the name of the action, if any.

    Parameters: ``groups``, the controls under the heading of their group, in order.

    Raises: ``ValueError`` if two controls have one name.

    >>> def double(values, action):
    ...     return Answer(f"Twice {values['n']} is {2 * int(values['n'])}.")
    >>> number = Slider("n", "Number", ("1", "2", "4"), "2")
    >>> panel = Panel("twice", "Doubling", {"": (number,)}, double)
    >>> panel
    Doubling. Twice 2 is 4.
    >>> panel.answer({"n": "4"}, "").words
    'Twice 4 is 8.'
    """

    name: str
    title: str
    groups: Mapping[str, tuple[Control, ...]]
    answer: Callable[[Values, str], Answer]

    def __post_init__(self) -> None:
        names = [control.name for control in self.controls]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"panel {self.name}: more than one control named {', '.join(twice)}")

    @property
    def controls(self) -> tuple[Control, ...]:
        """All controls, in order."""
        return tuple(control for group in self.groups.values() for control in group)

    def values(self) -> dict[str, str]:
        """Return the first values of all controls but the buttons."""
        return {c.name: c.value for c in self.controls if not isinstance(c, Button)}

    def first(self) -> Answer:
        """Return the answer to the first values."""
        return self.answer(self.values(), "")

    def __repr__(self) -> str:
        return f"{self.title}. {self.first().words}"

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """Return the panel with the answer to its first values."""
        answer = self.first()
        form = element(
            "form",
            "".join(_group(self.name, *item, answer) for item in self.groups.items()),
            class_="panel-controls",
            # Else a browser that comes back to a page moves the controls, and not the picture.
            autocomplete="off",
            hidden="hidden",
        )
        return element(
            "servelab-panel",
            element("p", escaped(self.title), class_="panel-title", id=f"{self.name}-title")
            + form
            + element("p", escaped(answer.words), class_="panel-words", role="status")
            + f'<div class="panel-parts">{parts_html(answer)}</div>',
            name=self.name,
            role="group",
            aria_labelledby=f"{self.name}-title",
        )


def parts_html(answer: Answer) -> str:
    """Return the parts of an answer, each in an element of its own."""
    return "".join(
        f'<div class="panel-part" data-part="{escaped(name)}">{html}</div>'
        for name, html in answer.parts.items()
    )


def table_html(caption: str, header: list[str], rows: list[list[str]]) -> str:
    """Return a table that a narrow page can scroll by itself; the first column names the rows.

    >>> table_html("Two", ["a", "b"], [["x", "1"]]).count("<th ")
    3
    """
    # A corner without words is no header: to a screen reader it would be one without a name.
    head = "".join(
        element("th", escaped(name), scope="col") if name else "<td></td>" for name in header
    )
    body = "".join(
        "<tr>"
        + element("th", escaped(first), scope="row")
        + "".join(f"<td>{escaped(value)}</td>" for value in rest)
        + "</tr>"
        for first, *rest in rows
    )
    table = (
        f'<table class="table"><caption>{escaped(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
    return element(
        "div", table, class_="panel-table", tabindex=0, role="region", aria_label=caption
    )


def _group(panel: str, heading: str, controls: tuple[Control, ...], shown: Answer) -> str:
    body = "".join(control.html(f"{panel}-{control.name}", shown) for control in controls)
    if heading:
        return element("fieldset", element("legend", escaped(heading)) + body)
    return element("div", body, class_="panel-group")


def _disabled(name: str, shown: Answer) -> str | None:
    return "disabled" if name in shown.off else None


def _labelled(label: str, where: str, control: str) -> str:
    return element(
        "div", element("label", escaped(label), for_=where) + control, class_="panel-control"
    )


def among(name: str, value: str, known: Collection[str]) -> str:
    """Return what a control says, if it is one of what the control offers.

    Raises: ``ValueError`` otherwise: a form that is not the page's own may send anything.

    >>> among("rows", "10**9", ["1", "2"])
    Traceback (most recent call last):
    ...
    ValueError: rows: '10**9' is none of '1', '2'
    """
    if value not in known:
        raise ValueError(f"{name}: {value[:40]!r} is none of {', '.join(map(repr, known))}")
    return value
