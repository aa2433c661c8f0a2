"""What a checker says: passed, failed or not attempted, and why, in words.

Models: a verdict as a value that a notebook shows as HTML, a terminal as a line, and a grader as
data: its mime type travels in the notebook beside the text.

Assumes: words end with a full stop; a picture is HTML of ours, made without ids or scripts.

Ignores: points. How many exercises make a grade is the teacher's business.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from servelab.markup import escaped

State = Literal["passed", "failed", "not attempted"]
#: The mime type under which a notebook stores a verdict; ``servelab check`` reads it.
MIME_TYPE = "application/vnd.servelab.verdict+json"
_SIGNS: dict[State, str] = {"passed": "✓", "failed": "✗", "not attempted": "○"}
# Each contrasts at 3:1 with white and with the book's dark background; the sign says it too.
_COLOURS: dict[State, str] = {"passed": "#008F68", "failed": "#D55E00", "not attempted": "#7D838A"}


@dataclass(frozen=True)
class Verdict:
    """The answer of a checker to an answer.

    Parameters: ``exercise`` its id, such as "4.1"; ``state``; ``words`` that say why; ``picture``
    HTML that shows it, or nothing.

    >>> Verdict("4.1", "passed", "Yes.")
    Exercise 4.1: passed. Yes.
    """

    exercise: str
    state: State
    words: str
    picture: str = ""

    @property
    def passed(self) -> bool:
        """Return whether the answer was right."""
        return self.state == "passed"

    def __repr__(self) -> str:
        return f"Exercise {self.exercise}: {self.state}. {self.words}"

    def _repr_html_(self) -> str:
        what = f"{_SIGNS[self.state]} Exercise {escaped(self.exercise)}: {self.state}."
        line = f'<p style="margin:0"><strong>{what}</strong> {escaped(self.words)}</p>'
        return (
            f'<div class="servelab-verdict" role="status" style="border-left:.3rem solid '
            f'{_COLOURS[self.state]};padding:.2rem .8rem">{line}{self.picture}</div>'
        )

    def data(self) -> dict[str, str]:
        """Return the verdict as plain values, without its picture."""
        return {"exercise": self.exercise, "state": self.state, "words": self.words}

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, object]:
        return {
            "text/plain": repr(self),
            "text/html": self._repr_html_(),
            MIME_TYPE: self.data(),
        }
