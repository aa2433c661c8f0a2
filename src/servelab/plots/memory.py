"""Figures of KV-cache memory: how the cache grows, what fits, and what attention moves.

Models: nothing of its own. Bytes come from `servelab.models` and `servelab.roofline`; these
functions only draw them.

Assumes: sizes on axes are decimal (GB), as bandwidth is; labels in cells and on arrows name their
unit.

Ignores: block rounding, which no picture of this scale could show.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from servelab.models import Attention, ModelSpec
from servelab.plots.style import COLORS, CYCLE, MARKERS, new_figure, styled
from servelab.roofline import attention
from servelab.units import GB, format_bytes, format_tokens

_OVER = "#E3E6EA"  # cells beyond the capacity: grey, and hatched


def _token_axis(axes: Axes, tokens: Sequence[int], label: str) -> None:
    """Give a logarithmic token axis its own values as ticks, every second one where crowded."""
    axes.set_xscale("log", base=2)
    shown = tokens[:: 1 if len(tokens) <= 8 else 2]
    axes.set_xticks(shown, [format_tokens(t) for t in shown])
    axes.minorticks_off()
    axes.set_xlabel(label)


def kv_growth(
    specs: Sequence[ModelSpec],
    tokens: Sequence[int],
    limit_bytes: int,
    limit_label: str,
    kv_dtype: str = "bf16",
) -> Figure:
    """Draw the cache of one sequence over its length, a line per model, and a limit across.

    Parameters: ``specs`` models; ``tokens`` lengths in ascending order; ``limit_bytes`` with its
    ``limit_label``; ``kv_dtype`` of the cache. A line is solid up to the longest length the
    model's configuration allows, and dotted beyond it.
    Returns: the figure. Raises: ``ValueError`` for an unknown dtype.

    >>> from servelab import models
    >>> figure = kv_growth([models.get("qwen3-8b")], [1024, 2048], 10**10, "limit")
    >>> len(figure.axes[0].lines)
    3
    """
    with styled():
        figure, (axes,) = new_figure(height_inches=4.4, width_inches=6.4)
        for i, spec in enumerate(specs):
            size = [spec.sequence_bytes(t, kv_dtype) / GB for t in tokens]
            legal = [t for t in tokens if t <= (spec.max_context_tokens or tokens[-1])]
            color, marker = CYCLE[i % len(CYCLE)], MARKERS[i % len(MARKERS)]
            axes.plot(tokens, size, ":", color=color, linewidth=1.4)
            axes.plot(legal, size[: len(legal)], color=color, marker=marker, label=spec.name)
        axes.axhline(limit_bytes / GB, color=COLORS["black"], linewidth=1.4, linestyle="--")
        axes.annotate(
            f"{limit_label}: {format_bytes(limit_bytes, 'GB', 1)}",
            (tokens[0], limit_bytes / GB),
            xytext=(0, 5),
            textcoords="offset points",
        )
        axes.set_yscale("log")
        axes.set_ylim(top=8 * limit_bytes / GB)
        _token_axis(axes, tokens, "tokens in the sequence (log scale)")
        axes.set_ylabel("KV cache of one sequence, GB (log scale)")
        axes.legend(loc="upper left", ncols=3, fontsize=8.5, columnspacing=1.2, handletextpad=0.4)
    return figure


def batch_context_map(
    spec: ModelSpec,
    batches: Sequence[int],
    contexts: Sequence[int],
    available_bytes: int,
    kv_dtype: str = "bf16",
) -> Figure:
    """Draw the cache of a batch as a map over batch and context; what does not fit is hatched.

    Parameters: ``batches`` sequences (upwards); ``contexts`` tokens per sequence (to the right);
    ``available_bytes`` for the cache; ``kv_dtype``.
    Returns: the figure. Raises: ``ValueError`` for an unknown dtype.

    >>> from servelab import models
    >>> figure = batch_context_map(models.get("qwen3-8b"), [1, 2], [1024, 2048], 500_000_000)
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['0.15', '0.30', '0.30', '0.60']
    """
    size = [[b * spec.sequence_bytes(c, kv_dtype) for c in contexts] for b in batches]
    with styled():
        figure, (axes,) = new_figure(height_inches=4.6, width_inches=6.4)
        axes.imshow(
            [[value / GB for value in row] for row in size],
            origin="lower",
            aspect="auto",
            cmap="GnBu",
            # the darkest tones of the map lie beyond the limit, so that black text stays legible
            norm=LogNorm(size[0][0] / GB, 6 * available_bytes / GB),
        )
        axes.grid(False)
        fits = [[value <= available_bytes for value in row] for row in size]
        for y, row in enumerate(size):
            for x, value in enumerate(row):
                if not fits[y][x]:
                    axes.add_patch(
                        Rectangle(
                            (x - 0.5, y - 0.5),
                            1,
                            1,
                            facecolor=_OVER,
                            edgecolor="white",
                            hatch="///",
                            linewidth=0,
                        )
                    )
                digits = 2 if value < GB else 1 if value < 10 * GB else 0
                axes.text(
                    x,
                    y,
                    f"{value / GB:,.{digits}f}",
                    ha="center",
                    va="center",
                    color=COLORS["black"] if fits[y][x] else COLORS["neutral"],
                    bbox=None
                    if fits[y][x]
                    else {"facecolor": _OVER, "edgecolor": "none", "pad": 1.2},
                )
        _draw_edge(axes, fits)
        axes.set_xticks(range(len(contexts)), [format_tokens(c) for c in contexts])
        axes.set_yticks(range(len(batches)), [str(b) for b in batches])
        axes.tick_params(length=0)
        axes.set_xlabel("tokens per sequence")
        axes.set_ylabel("sequences in the batch")
        axes.set_title(
            f"KV cache in GB; hatched: more than {format_bytes(available_bytes, 'GB', 1)}",
            loc="left",
        )
    return figure


def _draw_edge(axes: Axes, fits: Sequence[Sequence[bool]]) -> None:
    """Draw a line between the cells that fit and those that do not."""
    style: dict[str, Any] = {"color": COLORS["accent"], "linewidth": 2.6, "solid_capstyle": "round"}
    for y, row in enumerate(fits):
        for x, inside in enumerate(row):
            if x + 1 < len(row) and inside != row[x + 1]:
                axes.plot([x + 0.5, x + 0.5], [y - 0.5, y + 0.5], **style)
            if y + 1 < len(fits) and inside != fits[y + 1][x]:
                axes.plot([x - 0.5, x + 0.5], [y + 0.5, y + 0.5], **style)


def attention_schematic(head: Attention, tokens: int, dtype: str = "bf16") -> Figure:
    """Draw what crosses between HBM and SRAM in a prefill, unfused above and fused below.

    Parameters: ``head`` the heads of a layer (one query head on one KV head is easiest to read);
    ``tokens`` of one prompt, nothing cached; ``dtype`` of cache and activations.
    Returns: the figure; the bytes on its arrows add up to `servelab.roofline.attention`.
    Raises: ``ValueError`` for an unknown dtype.

    >>> figure = attention_schematic(Attention(1, 1, 128), 2048)
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['Unfused: three kernels, 34 MiB', 'Fused: one kernel, 2 MiB']
    """
    step = [(tokens, 0)]
    fused = attention(head, step, kv_dtype=dtype, activation_dtype=dtype)
    unfused = attention(head, step, kv_dtype=dtype, activation_dtype=dtype, fused=False)
    query = output = format_bytes(fused.written_bytes)  # O has the shape of Q
    key = value = format_bytes((fused.read_bytes - fused.written_bytes) // 2)
    scores = format_bytes((unfused.written_bytes - fused.written_bytes) // 2)  # of the two writes
    scored, shared = ("scores", scores), ("shares", scores)
    kernels = [
        ("Q Kᵀ", [("Q", query), ("K", key)], scored),
        ("softmax", [scored], shared),
        ("times V", [shared, ("V", value)], ("output", output)),
    ]
    tiled = "Q Kᵀ, softmax, times V: tile by tile"
    whole = [(tiled, [("Q", query), ("K", key), ("V", value)], ("output", output))]
    with styled():
        figure, (axes,) = new_figure(height_inches=5.6, width_inches=6.4)
        axes.remove()
        above, below = figure.subplots(2, 1)
        _draw_kernels(above, kernels)
        above.set_title(f"Unfused: three kernels, {format_bytes(unfused.bytes)}", loc="left")
        _draw_kernels(below, whole)
        below.set_title(f"Fused: one kernel, {format_bytes(fused.bytes)}", loc="left")
    return figure


Arrow = tuple[str, str]  # what is moved, and its size as text


def _draw_kernels(axes: Axes, kernels: Sequence[tuple[str, Sequence[Arrow], Arrow]]) -> None:
    """Draw HBM above, the kernels' SRAM below, an arrow down per read and one up per write."""
    axes.set(xlim=(0, 10), ylim=(0, 4.1))
    axes.axis("off")

    def box(x: float, y: float, width: float, height: float, text: str, color: str) -> None:
        axes.add_patch(
            FancyBboxPatch(
                (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12",
                facecolor="white", edgecolor=color, linewidth=2,
            )
        )  # fmt: skip
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center")

    box(0.05, 3.15, 9.9, 0.8, "HBM (device memory)", COLORS["memory"])
    arrows = sum(len(reads) + 1 for _, reads, _ in kernels)
    slot = 10 / arrows
    left = 0.0
    for name, reads, written in kernels:
        width = slot * (len(reads) + 1)
        box(left + 0.1, 0.1, width - 0.2, 0.8, f"SRAM: {name}", COLORS["compute"])
        for i, (what, size) in enumerate([*reads, written]):
            x = left + slot * (i + 0.5)
            upwards = i == len(reads)
            color = COLORS["compute"] if upwards else COLORS["memory"]
            start, stop = (0.95, 3.1) if upwards else (3.1, 0.95)
            heavy = 4.0 if what in ("scores", "shares") else 1.4
            axes.annotate(
                "", (x, stop), (x, start),
                arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": heavy},
            )  # fmt: skip
            verb = "write" if upwards else "read"
            axes.text(
                x, 2.02, f"{verb}\n{what}\n{size}", ha="center", va="center", fontsize=9.5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
        left += width


def attention_bytes(layer: Attention, tokens: Sequence[int], dtype: str = "bf16") -> Figure:
    """Draw the bytes one layer's attention moves in a prefill over its length, both ways.

    Parameters: ``layer`` its heads; ``tokens`` prompt lengths in ascending order; ``dtype`` of
    cache and activations.
    Returns: the figure. Raises: ``ValueError`` for an unknown dtype.

    >>> figure = attention_bytes(Attention(32, 8, 128), [1024, 2048])
    >>> len(figure.axes[0].lines)
    2
    """
    ways = (
        ("scores in HBM (unfused)", False, COLORS["attention"], "s", "-"),
        ("scores on the chip (fused)", True, COLORS["memory"], "o", "--"),
    )
    with styled():
        figure, (axes,) = new_figure(height_inches=3.9, width_inches=6.4)
        for label, fused, color, marker, line in ways:
            moved = [
                attention(
                    layer, [(n, 0)], kv_dtype=dtype, activation_dtype=dtype, fused=fused
                ).bytes
                for n in tokens
            ]
            axes.plot(
                tokens, [b / GB for b in moved], line, color=color, marker=marker, label=label
            )
        axes.set_yscale("log")
        _token_axis(axes, tokens, "prompt tokens (log scale)")
        axes.set_ylabel("bytes moved, GB (log scale)")
        axes.legend(loc="upper left")
    return figure
