"""Pictures for verdicts: where an answer went, beside where it should have gone.

Models: a pool of slots as a grid, one row per block, and what of it an answer names.

Assumes: few enough blocks to be drawn; a checker shows its table where this raises.

Ignores: colour as the only sign: what is right has a frame, what was named is filled.
"""

from collections.abc import Sequence
from typing import cast

from servelab.explore.svg import OWNERS, Drawing, box, fill, paragraph, picture, text

_MOST_BLOCKS, _MOST_SLOTS = 24, 16


def slot_grid(arguments: tuple[object, ...], returned: object, right: object) -> str:
    """Return the pool as a grid: filled what was returned, framed what is right.

    Parameters: ``arguments`` that begin with a block table and a block size.
    Raises: ``ValueError`` for a pool too large to draw; ``TypeError`` for what is no list of slots.

    >>> slot_grid(([2, 1], 2, 0, 3), [2, 3, 4], [4, 5, 2])[:4]
    '<svg'
    """
    table, size = cast(Sequence[int], arguments[0]), cast(int, arguments[1])
    if not isinstance(returned, (list, tuple)) and not hasattr(returned, "tolist"):
        raise TypeError(f"{type(returned).__name__} is no list of slots")
    got, wanted = ({int(s) for s in cast(Sequence[int], slots)} for slots in (returned, right))
    blocks = max(*table, *(slot // size for slot in got | wanted)) + 1
    if blocks > _MOST_BLOCKS or size > _MOST_SLOTS or min(got | wanted) < 0:
        raise ValueError(f"{blocks} blocks of {size} slots are too many to draw")
    width, height, left = 300 / size, 14.0, 60.0
    body = ""
    for block in range(blocks):
        y = block * (height + 3)
        body += text(left - 6, y + 11, f"block {block}", 9, anchor="end")
        for offset in range(size):
            slot, x = block * size + offset, left + offset * width
            if slot in got:
                body += fill(x + 1, y + 1, width - 4, height - 2, [OWNERS[0]])
            body += box(x, y, width - 2, height, heavy=slot in wanted)
    words = f"Returned {sorted(got)}, right {sorted(wanted)}."
    grid = Drawing(body, blocks * (height + 3), words)
    key = paragraph("Filled: the slots that you return. Heavy frame: the slots that are right.")
    return str(picture("The pool, one row per block", [grid, key]))
