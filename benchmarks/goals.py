"""A goal, what was reached, and the table of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servelab import units


@dataclass(frozen=True)
class Goal:
    """One figure with the bound that it should keep.

    Parameters: ``what`` is measured; ``goal`` the bound; ``reached`` what was measured;
    ``at_least`` whether the bound is a least value, else it is a largest one; ``unit`` of both.
    """

    what: str
    goal: float
    reached: float
    at_least: bool = True
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Return whether the figure keeps its bound."""
        return self.reached >= self.goal if self.at_least else self.reached <= self.goal


def table(goals: Sequence[Goal]) -> str:
    """Return goals as lines of text."""
    rows: list[list[object]] = [
        [
            goal.what,
            f"{'at least' if goal.at_least else 'at most'} {goal.goal:.2f} {goal.unit}",
            f"{goal.reached:.2f} {goal.unit}",
            "met" if goal.met else "not met",
        ]
        for goal in goals
    ]
    return units.table(rows, ["", "goal", "reached", ""])
