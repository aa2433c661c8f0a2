"""Figures of an engine under load: what its token budget trades, what pre-emption costs, and how
latency and throughput follow the rate of requests.

Models: nothing of its own. Times come from `servelab.roofline` and `servelab.simulation`; these
functions only draw them.

Assumes: seconds in, milliseconds or seconds on the axes, as their labels say.

Ignores: where a value comes from, a bound or a simulation: captions say it.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from servelab.plots.style import COLORS, CYCLE, MARKERS, new_figure, styled
from servelab.simulation import Simulation, percentile


def budget_trade(
    budgets: Sequence[int], gap_seconds: Sequence[float], ttft_seconds: Sequence[float]
) -> Figure:
    """Draw, over the token budget of a step, the longest gap of those that decode, and the TTFT.

    Parameters: ``budgets`` in tokens, ascending; one time of each kind per budget.
    Returns: the figure. Raises: ``ValueError`` where a series has another number of points.

    >>> figure = budget_trade([256, 512], [0.008, 0.011], [0.3, 0.2])
    >>> [float(y) for y in figure.axes[0].lines[0].get_ydata()]
    [8.0, 11.0]
    """
    if not len(budgets) == len(gap_seconds) == len(ttft_seconds):
        raise ValueError(f"every series needs {len(budgets)} points")
    with styled():
        figure, panels = new_figure(columns=2, height_inches=3.4)
        for axes, title, seconds, color, marker in (
            (panels[0], "longest gap of the others, ms", gap_seconds, COLORS["memory"], "o"),
            (panels[1], "TTFT of the prompt, ms", ttft_seconds, COLORS["accent"], "s"),
        ):
            axes.plot(budgets, [1e3 * s for s in seconds], marker=marker, color=color)
            axes.set_title(title, loc="left")
            axes.set_ylim(bottom=0)
            axes.set_xscale("log", base=2)
            axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("token budget of a step (log scale)")
    return figure


def preemption_costs(
    contexts: Sequence[int], seconds: Mapping[str, Sequence[float]], break_even: int
) -> Figure:
    """Draw what it costs to take a sequence's blocks and bring it back, over its length.

    Parameters: ``contexts`` in tokens, ascending; ``seconds`` by way of doing it, one per context;
    ``break_even`` context at which the first two ways cost the same.
    Returns: the figure. Raises: ``ValueError`` where a series has another number of points.

    >>> figure = preemption_costs([64, 128], {"a": [0.1, 0.2], "b": [0.2, 0.3]}, 100)
    >>> [line.get_label() for line in figure.axes[0].lines[:2]]
    ['a', 'b']
    """
    if any(len(series) != len(contexts) for series in seconds.values()):
        raise ValueError(f"every series needs {len(contexts)} points")
    with styled():
        figure, (axes,) = new_figure(height_inches=3.9)
        for place, (label, series) in enumerate(seconds.items()):
            axes.plot(
                contexts, [1e3 * s for s in series], color=CYCLE[place], marker=MARKERS[place],
                markersize=4, label=label,
            )  # fmt: skip
        axes.axvline(break_even, color=COLORS["neutral"], linestyle=":", linewidth=1.5)
        axes.annotate(
            f"{break_even} tokens", (break_even, 1), xycoords=("data", "axes fraction"),
            xytext=(4, -12), textcoords="offset points", fontsize=9.5,
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.minorticks_off()
        axes.set_xlabel("tokens of the sequence (log scale)")
        axes.set_ylabel("added time, ms (log scale)")
        axes.legend(loc="lower right")
    return figure


def load_sweep(runs: Mapping[float, Simulation], capacity: float) -> Figure:
    """Draw TTFT, TPOT and throughput over the rate of arrivals.

    Parameters: ``runs`` by requests per second, ascending; ``capacity`` in requests per second as
    predicted, a dotted line.
    Returns: the figure. Raises: ``ValueError`` for no runs.

    >>> from servelab import hardware, models
    >>> from servelab.serving import Engine, RooflineRunner
    >>> from servelab.simulation import poisson, simulate
    >>> runner = RooflineRunner(models.get("qwen3-8b"), hardware.get("h100-sxm-80gb"))
    >>> run = simulate(Engine(runner), poisson(4.0, [(100, 5)] * 3))
    >>> figure = load_sweep({4.0: run}, capacity=30.0)
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['TTFT, s (log scale)', 'TPOT, ms', 'output tokens/s']
    """
    if not runs:
        raise ValueError("there is no run to draw")
    rates = list(runs)
    with styled():
        figure, (first, further, speed) = new_figure(columns=3, height_inches=3.6, width_inches=7.4)
        for place, percent in enumerate((50, 99)):
            ttfts = [percentile(run.ttft_seconds, percent) for run in runs.values()]
            tpots = [1e3 * percentile(run.tpot_seconds, percent) for run in runs.values()]
            for axes, times in ((first, ttfts), (further, tpots)):
                axes.plot(
                    rates, times, color=CYCLE[place], marker=MARKERS[place], label=f"p{percent}"
                )
        first.set_yscale("log")
        first.set_title("TTFT, s (log scale)", loc="left")
        further.set_title("TPOT, ms", loc="left")
        speed.plot(
            rates, [r.output_tokens_per_second for r in runs.values()], color=COLORS["kv"],
            marker="^",
        )  # fmt: skip
        speed.set_title("output tokens/s", loc="left")
        first.legend(loc="upper left")
        further.legend(loc="lower right")
        for axes in (further, speed):
            axes.set_ylim(bottom=0)
        for axes in (first, further, speed):
            _mark(axes, capacity)
    return figure


def _mark(axes: Axes, capacity: float) -> None:
    axes.axvline(capacity, color=COLORS["neutral"], linestyle=":", linewidth=1.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second")
