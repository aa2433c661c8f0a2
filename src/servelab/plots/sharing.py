"""Figures of the chapter on sharing: what samples of one prompt save, what a prefix hit saves.

Models: nothing of its own. Savings come from the chapter, times from `servelab.roofline`.

Assumes: full attention, weights and cache in bf16.

Ignores: queueing, and the time to look a prefix up.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from servelab.hardware import Accelerator
from servelab.models import ModelSpec
from servelab.plots.style import COLORS, CYCLE, MARKERS, new_figure, styled
from servelab.roofline import step_cost, time_bound
from servelab.units import check_count, format_tokens

_DTYPE = "bf16"
_POINTS = 64  # of a line of times


def saving_over_output(outputs: Sequence[int], savings: Mapping[int, Sequence[float]]) -> Figure:
    """Draw the share of blocks that sharing saves over the output's length, a line per S.

    Parameters: ``outputs`` in tokens, ascending; ``savings`` fractions at each of them, by S, the
    number of samples.
    Returns: the figure. Raises: ``ValueError`` where a line has more or fewer points.

    >>> figure = saving_over_output([16, 256], {2: [0.5, 0.4], 8: [0.85, 0.7]})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['S = 2', 'S = 8']
    """
    with styled():
        figure, (axes,) = new_figure(height_inches=3.7, width_inches=6.4)
        series = zip(savings.items(), CYCLE, MARKERS, strict=False)
        for (samples, fractions), colour, marker in series:
            if len(fractions) != len(outputs):
                raise ValueError(f"{len(outputs)} outputs need as many savings, got {fractions}")
            axes.plot(outputs, fractions, color=colour, marker=marker, markevery=0.2)
            axes.annotate(
                f"S = {samples}", (outputs[0], fractions[0]), xytext=(-6, 0),
                textcoords="offset points", ha="right", va="center",
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xlim(outputs[0] / 2.6, outputs[-1])
        axes.set_ylim(0, 1)
        axes.set_xticks([x for x in outputs if x & (x - 1) == 0][::2])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.minorticks_off()
        axes.set_xlabel("output tokens of each sample")
        axes.set_ylabel("blocks saved by sharing")
    return figure


def first_token_over_cached(
    spec: ModelSpec, chip: Accelerator, prompts: Sequence[int], block_size: int = 16
) -> Figure:
    """Draw the least time to the first token over the share of the prompt found in the cache.

    Parameters: ``prompts`` a line each, in tokens, longer than a block; ``block_size``: a hit is
    whole blocks and leaves a token to compute, so each line ends before the whole prompt. Dashed:
    the time to read the weights once.
    Returns: the figure. Raises: ``TypeError``, ``ValueError`` for bad counts, a chip without bf16.

    >>> from servelab import hardware, models
    >>> chip, spec = hardware.get("h100-sxm-80gb"), models.get("qwen3-8b")
    >>> figure = first_token_over_cached(spec, chip, [2048])
    >>> x, y = figure.axes[0].lines[0].get_data()
    >>> float(x[-1]), bool(y[0] > y[-1])
    (0.9921875, True)
    """
    floor = 1e3 * 2 * spec.matmul_params / chip.bandwidth_bytes_per_second
    with styled():
        figure, (axes,) = new_figure(height_inches=3.9, width_inches=6.4)
        for prompt, colour, marker in zip(prompts, CYCLE, MARKERS, strict=False):
            blocks = (check_count("prompt", prompt, minimum=block_size + 1) - 1) // block_size
            hits = sorted({block_size * (blocks * i // _POINTS) for i in range(_POINTS + 1)})
            times = [
                1e3 * time_bound(step_cost(spec, [(prompt - hit, hit)]), chip, _DTYPE).seconds
                for hit in hits
            ]
            label = f"prompt of {format_tokens(prompt)}"
            shares = [hit / prompt for hit in hits]
            axes.plot(shares, times, color=colour, marker=marker, markevery=8, label=label)
        axes.axhline(floor, color=COLORS["black"], linestyle="--", linewidth=1.4)
        axes.annotate(
            "the weights, read once", (0, floor), xytext=(2, -4), textcoords="offset points",
            va="top",
        )  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(floor / 1.8, None)
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:,g}"))
        axes.set_xlabel("share of the prompt found in the prefix cache")
        axes.set_ylabel("least time to the first token (ms)")
        axes.legend(loc="upper right")
    return figure
