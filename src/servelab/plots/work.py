"""Figures of work: the FLOP of a generation, of a token by context, and the pairs of attention.

Models: nothing of its own: every height is a `step_cost`, every count a `causal_pairs`.

Assumes: one sequence, logits of the last row only.

Ignores: time; FLOP are drawn, not seconds.
"""

from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MultipleLocator

from servelab.models import ModelSpec
from servelab.plots.style import COLORS, new_figure, styled
from servelab.roofline import generation_steps, step_cost
from servelab.units import KiB, check_count, format_flop, format_tokens


def cumulative_work(spec: ModelSpec, prompt_tokens: int, new_tokens: int) -> Figure:
    """Return the FLOP spent until each generated token, with and without a KV cache.

    Parameters: ``prompt_tokens`` read first; ``new_tokens`` generated after them.
    Raises: ``TypeError``, ``ValueError`` for bad counts.
    """
    spent = {
        cached: list(
            accumulate(
                step_cost(spec, step).flop
                for step in generation_steps(prompt_tokens, new_tokens, cached)
            )
        )
        for cached in (True, False)
    }
    prompt_flop = spent[True][0]
    with styled():
        figure, (axes,) = new_figure(width_inches=6.0, height_inches=3.5)
        for cached, name, colour, dash, offset in (
            (False, "without a cache", COLORS["accent"], "--", 11),
            (True, "with a cache", COLORS["kv"], "-", 11),
        ):
            total = spent[cached][-1]
            axes.plot(range(1, new_tokens + 1), spent[cached], dash, color=colour)
            axes.annotate(
                f"{name}: {format_flop(total)}",
                (new_tokens, total),
                xytext=(0, offset),
                textcoords="offset points",
                ha="right",
                color=colour,
                weight="bold",
            )
        axes.plot(1, prompt_flop, "o", color=COLORS["black"])
        axes.annotate(
            f"reading the prompt: {format_flop(prompt_flop)}",
            (1, prompt_flop),
            xytext=(6, -16),
            textcoords="offset points",
        )
        axes.set_yscale("log")
        axes.set_ylim(prompt_flop / 2.5, 3 * spent[False][-1])
        axes.yaxis.set_major_formatter(EngFormatter("FLOP"))
        axes.set_xlabel(f"tokens generated after a prompt of {format_tokens(prompt_tokens)}")
        axes.set_ylabel("work since the start")
    return figure


def work_per_token(spec: ModelSpec, longest_tokens: int) -> Figure:
    """Return the FLOP of one token over its context, linear layers and attention apart.

    Parameters: ``longest_tokens`` right end of the axis; contexts count the token itself.
    Raises: ``TypeError``, ``ValueError`` for bad counts.
    """
    grid = 256
    contexts = [max(1, longest_tokens * i // grid) for i in range(grid + 1)]
    costs = [step_cost(spec, [(1, context - 1)]) for context in contexts]
    attention = [cost.by_name()["attention"].flop for cost in costs]
    linear = [cost.flop - a for cost, a in zip(costs, attention, strict=True)]
    with styled():
        figure, (axes,) = new_figure(width_inches=6.0, height_inches=3.5)
        axes.stackplot(
            contexts,
            linear,
            attention,
            colors=[COLORS["light"], COLORS["attention"]],
            edgecolor="white",
        )
        axes.set_xlim(0, longest_tokens)
        axes.set_ylim(0, 1.12 * (linear[-1] + attention[-1]))
        axes.text(
            longest_tokens * 0.03,
            linear[0] / 2,
            "linear layers: the same for every token",
            va="center",
        )
        axes.text(
            longest_tokens * 0.97,
            linear[0] + attention[-1] * 0.42,
            "attention: a share\nfor every token in the context",
            va="center",
            ha="right",
        )
        crossing = next((i for i, a in enumerate(attention) if a >= linear[i]), None)
        if crossing is not None:
            top = 1.06 * (linear[-1] + attention[-1])
            axes.vlines(
                contexts[crossing],
                linear[0],
                top,
                color=COLORS["black"],
                linestyle=":",
                linewidth=1.5,
            )
            axes.text(
                contexts[crossing] - longest_tokens * 0.01,
                top,
                "attention = linear layers",
                ha="right",
                va="top",
            )
        axes.xaxis.set_major_locator(MultipleLocator(longest_tokens / 4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t / KiB:g}K" if t else "0"))
        axes.yaxis.set_major_formatter(EngFormatter("FLOP"))
        axes.set_xlabel("context of the token, in tokens")
        axes.set_ylabel("work of one token")
    return figure


def pair_counts(prompt_tokens: int, new_tokens: int, cached: bool) -> list[list[int]]:
    """Return how often a generation computes each (query, key) pair, one row per query.

    Parameters: as for ``generation_steps``; the rows are 1, 2, 3 ... keys long, by the causal mask.
    Raises: ``TypeError``, ``ValueError`` for bad counts.

    >>> pair_counts(2, 2, cached=False)
    [[2], [2, 2], [1, 1, 1]]
    >>> pair_counts(2, 2, cached=True)
    [[1], [1, 1], [1, 1, 1]]
    """
    steps = [step[0] for step in generation_steps(prompt_tokens, new_tokens, cached)]
    return [
        [sum(before <= query < before + new for new, before in steps)] * (query + 1)
        for query in range(prompt_tokens + new_tokens - 1)
    ]


def pair_grid(prompt_tokens: int, new_tokens: int) -> Figure:
    """Return two grids of (query, key) pairs, without and with a cache: how often each is computed.

    Parameters: a handful of ``prompt_tokens`` and ``new_tokens``, so that the numbers can be read.
    Raises: ``TypeError``, ``ValueError`` for bad counts.
    """
    check_count("new_tokens", new_tokens, minimum=2)
    with styled():
        figure, axes = new_figure(columns=2, width_inches=6.4, height_inches=3.8)
        for panel, cached in zip(axes, (False, True), strict=True):
            counts = pair_counts(prompt_tokens, new_tokens, cached)
            name = "With a cache" if cached else "Without a cache"
            panel.set_title(f"{name}: {sum(map(sum, counts))} pairs")
            _draw_counts(panel, counts, prompt_tokens, highest=new_tokens)
    return figure


def _draw_counts(axes: Axes, counts: list[list[int]], prompt_tokens: int, highest: int) -> None:
    """Draw one grid: queries downwards, keys to the right, the count in every cell."""
    size = len(counts)
    padded = [[*map(float, row), *[float("nan")] * (size - len(row))] for row in counts]
    axes.imshow(padded, cmap="Oranges", vmin=0, vmax=1.6 * highest)
    for query, row in enumerate(counts):
        for key, count in enumerate(row):
            axes.text(key, query, str(count), ha="center", va="center", fontsize=12)
    axes.axhline(prompt_tokens - 0.5, color=COLORS["black"], linestyle="--", linewidth=1.2)
    for side, part in (("bottom", "prompt"), ("top", "reply")):
        edge = prompt_tokens - (0.6 if side == "bottom" else 0.4)
        axes.text(size - 0.6, edge, part, ha="right", va=side, fontsize=9.5)
    tokens = [str(token) for token in range(1, size + 1)]
    axes.set_xticks(range(size), tokens)
    axes.set_yticks(range(size), tokens)
    axes.grid(visible=False)
    axes.set_xlabel("key of token")
    axes.set_ylabel("query of token")
