"""The look of every figure: colours, type, size, and the closing touches.

Models: nothing. A figure has an opaque white face, so that it reads the same on a light and on a
dark page; colours are Okabe and Ito's, told apart by readers with any colour vision, and never the
only sign: lines differ in marker or dash, bars in label.

Assumes: about 7 inches of page width; text of at least 9 points.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: Okabe and Ito (2008), by the part a colour plays in the book.
COLORS = {
    "compute": "#D55E00",
    "memory": "#0072B2",
    "weights": "#0072B2",
    "kv": "#009E73",
    "activations": "#CC79A7",
    "attention": "#E69F00",
    "accent": "#D55E00",
    "neutral": "#5F6368",
    "light": "#B8BDC4",
    "black": "#000000",
}
#: For series without a part of their own, in this order.
CYCLE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]

_RC = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 160,  # 1,152 pixels for 7.2 inches: sharp on a dense screen
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.labelsize": 10.5,
    "legend.fontsize": 9.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E6EA",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.edgecolor": "#5F6368",
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "legend.frameon": False,
    "axes.prop_cycle": plt.cycler(color=CYCLE),
    "svg.hashsalt": "servelab",
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside the ``with`` block in the book's style; global settings stay as they are."""
    with plt.rc_context(_RC):
        yield


def new_figure(
    columns: int = 1, height_inches: float = 3.9, width_inches: float = 7.2
) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``columns`` axes side by side, for use inside ``styled()``."""
    figure, axes = plt.subplots(
        1, columns, figsize=(width_inches, height_inches), layout="constrained", squeeze=False
    )
    return figure, list(axes[0])
