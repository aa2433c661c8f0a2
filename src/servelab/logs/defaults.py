"""What a log does not state: the engines' defaults, and what else it may have been.

Models: blocks in tokens, the swap space of vLLM V0.

Assumes: a default that explains a number does so; what would have to be guessed proves nothing.

Ignores: ranks and formats of the cache (`servelab.logs.setups`).
"""

import math
from collections.abc import Iterator

from servelab.logs.readings import Reading
from servelab.logs.run import Run
from servelab.units import GiB

#: Sizes of blocks that engines use; vLLM's default on a GPU is the first.
BLOCK_SIZES = (16, 32, 64, 128, 256, 8, 1)
#: vLLM V0's ``swap_space`` where none is given.
SWAP_SPACE_GIB = 4


def unstated(what: str) -> str:
    """Return the doubt that comes with a guess."""
    return f"it would follow with {what}, which the log does not state"


def block_sizes(run: Run) -> Iterator[tuple[int, str]]:
    """Yield the tokens of a block with the doubt in it: stated, else the default and larger."""
    stated = run.setting("block_size")
    if stated is not None and stated.value >= 1:
        yield int(stated.value), ""
        return
    yield BLOCK_SIZES[0], ""
    for size in BLOCK_SIZES:
        if size > BLOCK_SIZES[0]:  # none has a smaller one by default
            yield size, unstated(f"blocks of {size} tokens")


def swap_spaces(
    target: Reading, run: Run, low_bytes: float, high_bytes: float
) -> Iterator[tuple[float, str, str]]:
    """Yield the swap space in bytes, what it is, and the doubt in it.

    That which the log states, else the default and whole GiB that hold as many CPU blocks as
    ``target`` says, of ``low_bytes`` to ``high_bytes`` each.
    """
    stated = run.setting("swap_space")
    if stated is not None:
        yield stated.value * GiB, f"a swap space of {stated.text}", ""
        return
    yield SWAP_SPACE_GIB * GiB, f"a swap space of {SWAP_SPACE_GIB} GiB, the default,", ""
    likely = math.ceil(target.low * low_bytes / GiB)
    if likely * GiB <= (target.high + 1) * high_bytes:
        what = f"a swap space of {likely} GiB"
        yield likely * GiB, what, unstated(what)
