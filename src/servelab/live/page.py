"""What a page asks while it is read: the answer of a panel, or the run of a cell.

Models: a page has one namespace for its cells, and one panel of each name. A request and its answer
are JSON text, so that a worker passes them on without a look inside:

- ``{"kind": "panel", "name", "action", "values"}`` is answered by the fields of `Answer`, its parts
  as HTML, or by ``{"error"}``;
- ``{"kind": "cell", "number", "source"}`` by ``{"outputs": [{"kind", "content"}, ...]}``.

Assumes: one request at a time.

Ignores: where the page stands. A test asks the same way.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from json import dumps, loads  # by name: a cell may overwrite what the module holds
from typing import Any

from servelab.live import cells
from servelab.live.panel import Panel
from servelab.units import near_names

#: The panels of the book; each is built by the function ``panel`` of the module of its name.
PANELS = ("roofline", "phases", "memory", "paged", "pool", "batching")


def get(name: str) -> Panel:
    """Return a fresh panel, as a page shows it before anybody has touched it.

    Raises: ``KeyError`` for an unknown name.

    >>> get("rooflin")
    Traceback (most recent call last):
    ...
    KeyError: "no panel 'rooflin'; near: roofline"
    """
    if name not in PANELS:
        raise KeyError(f"no panel {name!r}; near: {near_names(name, PANELS)}")
    module = import_module(f"servelab.live.{name}")
    made: Panel = module.panel()
    return made


class Page:
    """The state of one page: the names that its cells made, and its panels.

    >>> page = Page()
    >>> page.ask('{"kind": "cell", "source": "n = 2"}')
    '{"outputs": []}'
    >>> page.ask('{"kind": "cell", "source": "n + 1"}')
    '{"outputs": [{"kind": "text", "content": "3"}]}'
    >>> page.ask('{"kind": "tea"}')
    '{"error": "no request of kind \\'tea\\'; known are panel, cell"}'
    """

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.panels: dict[str, Panel] = {}

    def ask(self, request: str) -> str:
        """Answer one request, JSON for JSON; never raises for what a page can send."""
        asked = loads(request)
        kinds = {"panel": self._panel, "cell": self._cell}
        if asked["kind"] not in kinds:
            known = ", ".join(kinds)
            return dumps({"error": f"no request of kind {asked['kind']!r}; known are {known}"})
        return dumps(kinds[asked["kind"]](asked))

    def _cell(self, asked: dict[str, Any]) -> dict[str, Any]:
        outputs = cells.run(asked["source"], self.namespace, asked.get("number", 1))
        return {"outputs": [asdict(output) for output in outputs]}

    def _panel(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["name"]
        try:
            if name not in self.panels:
                self.panels[name] = get(name)
            asked_panel = self.panels[name]
            answer = asked_panel.answer(asked_panel.values() | asked["values"], asked["action"])
        except Exception as error:  # a page shows the sentence and keeps its picture
            return {"error": str(error.args[0] if error.args else type(error).__name__)}
        return vars(answer)
