"""Figures of prefill and decode: intensity by rows, time of a decode step, speed against latency.

Models: nothing of its own: every point is a `step_cost`, every time a `time_bound`.

Assumes: one chip; all sequences of a step have the same length; the cache may take what
`memory.budget` leaves of the chip's memory, to the byte.

Ignores: block rounding, activations in the budget, everything the bounds ignore.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from servelab import memory
from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.plots.style import COLORS, CYCLE, MARKERS, new_figure, styled
from servelab.roofline import Cost, step_cost, time_bound
from servelab.units import format_tokens, size_bytes

_DTYPE = "bf16"  # of weights, cache and arithmetic in every figure here


def intensity_over_rows(
    spec: ModelSpec, chip: Accelerator, contexts: Sequence[int], most_rows: int = 4096
) -> Figure:
    """Return the intensity of a step over its rows: one prompt, or that many decoding sequences.

    Parameters: ``contexts`` of the decoding sequences, in tokens, ascending; ``most_rows`` where
    the lines end. A decode line turns dotted where its caches no longer fit the chip's memory.
    Raises: ``TypeError``, ``ValueError`` for bad counts, a chip without a bf16 rate.

    >>> from servelab import hardware, models
    >>> chip, spec = hardware.get("h100-sxm-80gb"), models.get("qwen3-8b")
    >>> figure = intensity_over_rows(spec, chip, [8192], most_rows=64)
    >>> figure.axes[0].get_ylabel()
    'intensity (FLOP per byte)'
    """
    rows = _doublings(most_rows, per_octave=4)
    ridge = chip.ridge(_DTYPE)
    with styled():
        figure, (axes,) = new_figure(height_inches=4.3, width_inches=6.4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        prefill = [step_cost(spec, [(r, 0)]).intensity for r in rows]
        axes.plot(rows, prefill, color=COLORS["compute"], linewidth=2.8)
        _label(axes, rows[-1], prefill[-1], "prefill")
        for context, colour, marker in zip(contexts, CYCLE[2:] + CYCLE[:1], MARKERS, strict=False):
            decode = [_decode(spec, r, context).intensity for r in rows]
            fits = min(_fitting_sequences(spec, chip, context), most_rows)
            inside = [r for r in rows if r < fits] + [fits]
            solid = [*decode[: len(inside) - 1], _decode(spec, fits, context).intensity]
            axes.plot(rows, decode, ":", color=colour, linewidth=1.6)
            axes.plot(inside, solid, color=colour)
            axes.plot(fits, solid[-1], marker, color=colour, markersize=8)
            _label(axes, rows[-1], decode[-1], f"decode at {format_tokens(context)}")
        axes.axhline(ridge, color=COLORS["black"], linestyle="--", linewidth=1.4)
        axes.text(1.1, ridge * 1.1, f"ridge of {chip.label}", va="bottom")
        axes.set_xlim(1, most_rows * 13)  # room for the labels
        axes.set_ylim(0.8, prefill[-1] * 2.2)
        axes.set_xticks([4**i for i in range(7) if 4**i <= most_rows])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda r, _: f"{r:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda i, _: f"{i:,g}"))
        axes.minorticks_off()
        axes.set_xlabel("rows in the step: prompt tokens, or decoding sequences")
        axes.set_ylabel("intensity (FLOP per byte)")
    return figure


def decode_step_time(
    spec: ModelSpec, chip: Accelerator, contexts: Sequence[int], most_sequences: int = 1024
) -> Figure:
    """Return the least time of a decode step over its sequences, by what is moved, per context.

    Parameters: ``contexts`` one panel each, in tokens; ``most_sequences`` where the axes end.
    The stack is the memory time; the dashed line is the compute time, which overlaps with it.
    Hatched: batches whose caches do not fit the chip's memory.
    Raises: ``TypeError``, ``ValueError`` for bad counts, a chip without a bf16 rate.

    >>> from servelab import hardware, models
    >>> chip, spec = hardware.get("h100-sxm-80gb"), models.get("qwen3-8b")
    >>> [axes.get_title() for axes in decode_step_time(spec, chip, [128, 8192], 64).axes]
    ['context 128', 'context 8K']
    """
    batches = _doublings(most_sequences, per_octave=4)
    bandwidth = chip.bandwidth_bytes_per_second
    weights = size_bytes(spec.matmul_params, _DTYPE)
    with styled():
        figure, panels = new_figure(len(contexts), height_inches=3.7, width_inches=6.4)
        for axes, context in zip(panels, contexts, strict=True):
            costs = [_decode(spec, batch, context) for batch in batches]
            kv = [batch * spec.sequence_bytes(context, _DTYPE) for batch in batches]
            rest = [c.bytes - k - weights for c, k in zip(costs, kv, strict=True)]
            stack = [
                [1e3 * b / bandwidth for b in part] for part in ([weights] * len(kv), kv, rest)
            ]
            axes.stackplot(
                batches,
                *stack,
                colors=[COLORS["weights"], COLORS["kv"], COLORS["activations"]],
                labels=["weights", "keys and values", "activations"],
                edgecolor="white",
                linewidth=0.6,
            )
            axes.plot(
                batches,
                [1e3 * c.flop / chip.peak(_DTYPE) for c in costs],
                "--",
                color=COLORS["black"],
                label="arithmetic",
            )
            fits = _fitting_sequences(spec, chip, context)
            longest = time_bound(_decode(spec, min(fits, most_sequences), context), chip, _DTYPE)
            axes.set_xscale("log", base=2)
            axes.set_xlim(1, most_sequences)
            axes.set_ylim(0, 1.3e3 * longest.seconds)
            _shade_beyond_memory(axes, fits, most_sequences)
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.set_xticks([8**i for i in range(4) if 8**i <= most_sequences])
            axes.xaxis.set_major_formatter(FuncFormatter(lambda b, _: f"{b:,.0f}"))
            axes.minorticks_off()
            axes.set_title(f"context {format_tokens(context)}")
        panels[0].set_ylabel("time of a step (ms)")
        panels[len(panels) // 2].set_xlabel("sequences in the step")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def speed_over_latency(spec: ModelSpec, chip: Accelerator, contexts: Sequence[int]) -> Figure:
    """Return tokens per second of a chip over TPOT as the batch grows, a line per context.

    Parameters: ``contexts`` in tokens, ascending. Each line ends where the caches fill the chip's
    memory; its marks are batches of 1, 4, 16, 64, 256.
    Raises: ``TypeError``, ``ValueError`` for bad counts, a chip without a bf16 rate.

    >>> from servelab import hardware, models
    >>> chip, spec = hardware.get("h100-sxm-80gb"), models.get("qwen3-8b")
    >>> [text.get_text() for text in speed_over_latency(spec, chip, [8192]).axes[0].texts]
    ['8K: full at 49']
    """
    with styled():
        figure, (axes,) = new_figure(height_inches=4.0, width_inches=6.4)
        for context, colour, marker in zip(contexts, CYCLE, MARKERS, strict=False):
            fits = _fitting_sequences(spec, chip, context)
            batches = [b for b in _doublings(fits, per_octave=4) if b < fits] + [fits]
            tpot = [time_bound(_decode(spec, b, context), chip, _DTYPE).seconds for b in batches]
            speed = [batch / seconds for batch, seconds in zip(batches, tpot, strict=True)]
            axes.plot([1e3 * t for t in tpot], speed, color=colour)
            for power in range(5):
                if 4**power in batches:
                    at = batches.index(4**power)
                    axes.plot(1e3 * tpot[at], speed[at], marker, color=colour)
            axes.plot(
                1e3 * tpot[-1], speed[-1], "|", color=colour, markersize=14, markeredgewidth=2.5
            )
            _label(axes, 1e3 * tpot[-1], speed[-1], f"{format_tokens(context)}: full at {fits:,}")
        axes.set_yscale("log")
        axes.set_xlim(0, 1.4 * axes.get_xlim()[1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s:,.0f}"))
        axes.set_xlabel("TPOT bound (ms)")
        axes.set_ylabel("tokens per second, all sequences")
    return figure


def _decode(spec: ModelSpec, sequences: int, context: int) -> Cost:
    """Return the cost of a decode step: one new token behind ``context - 1`` cached ones, each."""
    return step_cost(spec, [(1, context - 1)] * sequences)


def _fitting_sequences(spec: ModelSpec, chip: Accelerator, context: int) -> int:
    return memory.max_sequences(spec, memory.budget(spec, chip).available_bytes, context)


def _doublings(largest: int, per_octave: int = 1) -> list[int]:
    """Return whole numbers from 1 to ``largest``, about evenly spaced on a logarithmic axis."""
    octaves = largest.bit_length() * per_octave
    return sorted({min(round(2 ** (i / per_octave)), largest) for i in range(octaves + 1)})


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    """Write beside the end of a line; in black, for some line colours are too light for text."""
    axes.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", va="center")


def _shade_beyond_memory(axes: Axes, fits: int, most: int) -> None:
    if fits >= most:
        return
    axes.axvspan(
        fits, most, facecolor="white", alpha=0.62, hatch="///", edgecolor=COLORS["neutral"]
    )
    axes.axvline(fits, color=COLORS["neutral"], linewidth=1.2)
    axes.text(fits * 0.88, axes.get_ylim()[1] * 0.98, f"full at {fits:,}", ha="right", va="top")
