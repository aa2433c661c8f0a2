"""What the explorers of a pool share: a block to look at, and lists of events in words.

Models: the choice of a block, the name of a click on one, and a list with a heading.

Assumes: pictures name their clicks as `servelab.explore.Pointing` does.

Ignores: where the events come from.
"""

from __future__ import annotations

from collections.abc import Sequence

from servelab.live.panel import Choice
from servelab.markup import element, escaped


def block_options(num_blocks: int) -> tuple[tuple[str, str], ...]:
    """Return the blocks that can be looked at, as a choice has them; the null block is none.

    >>> block_options(num_blocks=3)
    (('', 'none'), ('1', 'block 1'), ('2', 'block 2'))
    """
    return (("", "none"), *((str(b), f"block {b}") for b in range(1, num_blocks)))


def block_choice(num_blocks: int) -> Choice:
    """Return the control that chooses a block; at first none is chosen."""
    return Choice("block", "Block to look at", block_options(num_blocks), "")


def chosen_block(chosen: str, action: str, num_blocks: int) -> int | None:
    """Return the block to look at: the one clicked, else the one chosen, if the pool has it.

    >>> chosen_block("2", "block:7", 9), chosen_block("2", "step", 9), chosen_block("12", "", 9)
    (7, 2, None)
    """
    text = action.removeprefix("block:") if action.startswith("block:") else chosen
    return int(text) if text in dict(block_options(num_blocks)) and text else None


def list_html(heading: str, lines: Sequence[str], most: int = 8) -> str:
    """Return sentences under a heading, the last ``most`` of them.

    >>> list_html("Two", ["a < b", "c"])
    '<p><strong>Two</strong></p><ul><li>a &lt; b</li><li>c</li></ul>'
    """
    left_out = len(lines) - most
    shown = [f"({left_out:,} before)", *lines[left_out:]] if left_out > 0 else list(lines)
    items = "".join(element("li", escaped(line)) for line in shown or ["Nothing yet."])
    return element("p", element("strong", escaped(heading))) + element("ul", items)
