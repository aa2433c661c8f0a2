"""The figure of how attention reads its cache: in place, or through a gathered copy.

Models: nothing of its own: the bars are the traffic of a `step_cost` over the bandwidth; a copy of
the keys and values adds two passes over them.

Assumes: one chip, a decode step of sequences of one length, everything in bf16; a step that the
memory limits, so that its bytes are its time.

Ignores: caches on the chip, which may catch a part of the copy.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.plots.style import COLORS, new_figure, styled
from servelab.roofline import step_cost
from servelab.units import check_count, format_tokens

_DTYPE = "bf16"
_PARTS = {
    "weights and activations": COLORS["light"],
    "keys and values, read": COLORS["kv"],
    "copy, written": COLORS["accent"],
    "copy, read": COLORS["attention"],
}


def memory_time(
    spec: ModelSpec, chip: Accelerator, sequences: int, contexts: Sequence[int]
) -> Figure:
    """Return the memory time of a decode step by what is moved, in place and with a copy.

    Parameters: ``sequences`` in the step; ``contexts`` one pair of bars each, in tokens.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> from servelab import hardware, models
    >>> chip, spec = hardware.get("h100-sxm-80gb"), models.get("qwen3-8b")
    >>> figure = memory_time(spec, chip, 64, [512, 2048])
    >>> [label.get_text().replace("\\n", " ") for label in figure.axes[0].get_yticklabels()]
    ['512, in place', '512, copied', '2K, in place', '2K, copied']
    """
    check_count("sequences", sequences)
    per_millisecond = chip.bandwidth_bytes_per_second / 1e3
    with styled():
        figure, (axes,) = new_figure(height_inches=0.9 + 0.72 * len(contexts), width_inches=6.4)
        labels: list[str] = []
        for context in contexts:
            step = [(1, context - 1)] * sequences
            whole = step_cost(spec, step, kv_dtype=_DTYPE).bytes
            kv = sequences * spec.sequence_bytes(context, _DTYPE)
            for name, copies in (("in place", 0), ("copied", kv)):
                parts = (whole - kv, kv, copies, copies)
                left = 0.0
                for part, colour in zip(parts, _PARTS.values(), strict=True):
                    width = part / per_millisecond
                    axes.barh(
                        len(labels), width, left=left, color=colour, edgecolor="white", height=0.8
                    )
                    left += width
                axes.text(left, len(labels), f"  {left:.1f} ms", va="center", fontsize=9.5)
                labels.append(f"{format_tokens(context)}, {name}")
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xlim(0, 1.16 * axes.get_xlim()[1])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"memory time of a step of {sequences} sequences, {chip.label} (ms)")
        handles = [Patch(color=colour) for colour in _PARTS.values()]
        figure.legend(handles, _PARTS, loc="outside lower center", ncols=2)
    return figure
