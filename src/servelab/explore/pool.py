"""A block pool in one picture: every block once, with what it holds, who holds it, what finds it.

Models: a pool as its state (``PoolState``) says it: reference counts, tables, cached prefixes. The
size of a cell follows from the number of blocks: up to 64 show names, up to 256 numbers, more show
colours and marks only; a pointer over a cell shows the words for it in every size.

Assumes: all blocks of a table are full but its last.

Ignores: the keys and values. A block that nobody holds is drawn full if it is cached: a cached
block always is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from servelab.explore.svg import (
    NEUTRAL,
    OWNERS,
    WIDTH,
    Drawing,
    Svg,
    box,
    clip,
    fill,
    hover,
    paragraph,
    picture,
    text,
    text_width,
)
from servelab.markup import element, number
from servelab.paging import NULL_BLOCK, PoolState
from servelab.units import check_count, format_count

NO_NAMES: Mapping[int, str] = {}
#: Blocks, or rows, that one sentence of a description names.
MOST_SAID = 24


@dataclass(frozen=True)
class BlockView:
    """What there is to say about one block.

    Parameters: ``tokens`` written in it; ``owners`` tables that hold it; ``cached`` whether the
    prefix cache finds it; ``refs`` its reference count, which for an event or two differs from the
    number of owners: a block is counted before it is in a table, and left before it is released.
    """

    block: int
    tokens: int
    owners: tuple[int, ...]
    cached: bool
    refs: int

    @property
    def is_free(self) -> bool:
        """Return whether nobody holds it, in a table or on the way to one."""
        return not self.owners and not self.refs

    def words(self, block_size: int, names: Mapping[int, str]) -> str:
        """Return what it is, as a sentence."""
        if self.block == NULL_BLOCK:
            return "block 0: the null block, never handed out"
        full = f"{self.tokens} of {block_size} slots written"
        found = "; the prefix cache finds it" if self.cached else ""
        if self.refs != len(self.owners):
            found += f"; reference count {self.refs}"
        if not self.owners:
            where = "in no table" if self.refs else "free"
            return f"block {self.block}: {where}" + (f", {full}{found}" if found else "")
        held = ", ".join(name_of(table, names) for table in self.owners)
        shared = f"shared by {len(self.owners)}: " if len(self.owners) > 1 else "held by "
        return f"block {self.block}: {shared}{held}; {full}{found}"


@dataclass(frozen=True)
class Counts:
    """The numbers of a pool: blocks of each sort (null block apart), and the slots of those held.

    Parameters: ``blocks`` that can be handed out; ``held`` by a table, ``shared`` by several;
    ``free``; ``cached`` blocks that the prefix cache finds, ``cached_free`` of them free;
    ``between``, in no table and not free: on the way into one, or out of the last; ``tokens``
    written in held blocks, each block once; ``unused_slots`` of held blocks;
    ``table_tokens`` of all tables, shared tokens counted once per table.
    """

    blocks: int
    held: int
    shared: int
    free: int
    cached: int
    cached_free: int
    between: int
    tokens: int
    unused_slots: int
    table_tokens: int


def name_of(table: int, names: Mapping[int, str]) -> str:
    """Return the name of a table, its number where it has none."""
    return names.get(table, f"table {table}")


def colour_of(table: int) -> str:
    """Return the colour of a table, the same in every picture."""
    return OWNERS[table % len(OWNERS)]


def blocks_of(state: PoolState, block_size: int) -> list[BlockView]:
    """Return all blocks of a pool, in order.

    Raises: ``TypeError``, ``ValueError`` for a block size below 1.

    >>> state = PoolState([0, 2, 1], [], tables={0: [1, 2], 1: [1]}, lengths={0: 6, 1: 4})
    >>> blocks_of(state, block_size=4)[1:]
    [BlockView(block=1, tokens=4, owners=(0, 1), cached=False, refs=2),
     BlockView(block=2, tokens=2, owners=(0,), cached=False, refs=1)]
    """
    check_count("block_size", block_size)
    owners: list[list[int]] = [[] for _ in state.refs]
    cached = {block for blocks in state.cached.values() for block in blocks}
    tokens = [block_size if block in cached else 0 for block in range(len(state.refs))]
    for table, blocks in sorted(state.tables.items()):  # going back may have changed their order
        length = state.lengths.get(table, 0)
        for place, block in enumerate(blocks):
            owners[block].append(table)
            written = min(block_size, max(0, length - place * block_size))
            tokens[block] = max(tokens[block], written)
    return [
        BlockView(block, tokens[block], tuple(owners[block]), block in cached, refs)
        for block, refs in enumerate(state.refs)
    ]


def count_blocks(state: PoolState, block_size: int) -> Counts:
    """Return the numbers of a pool.

    >>> count_blocks(PoolState.empty(num_blocks=4), block_size=16).free
    3
    """
    blocks = blocks_of(state, block_size)[1:]
    held = [view for view in blocks if view.owners]
    tokens = sum(view.tokens for view in held)
    return Counts(
        blocks=len(blocks),
        held=len(held),
        shared=sum(len(view.owners) > 1 for view in held),
        free=len(state.free),
        cached=sum(view.cached for view in blocks),
        cached_free=sum(view.cached and view.is_free for view in blocks),
        between=sum(not view.owners and not view.is_free for view in blocks),
        tokens=tokens,
        unused_slots=len(held) * block_size - tokens,
        table_tokens=sum(state.lengths.values()),
    )


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, which takes an s unless there is one of it.

    >>> counted(1, "block"), counted(1200, "block")
    ('1 block', '1,200 blocks')
    """
    return f"{format_count(count)} {noun}" + ("" if count == 1 else "s")


def summary(state: PoolState, block_size: int) -> str:
    """Return the numbers of a pool, as sentences.

    >>> summary(PoolState.empty(num_blocks=4), block_size=16)
    '3 blocks of 16 slots: 0 held, 3 free.'
    """
    n = count_blocks(state, block_size)
    shared = f" ({format_count(n.shared)} of them shared)" if n.shared else ""
    cached = f" ({format_count(n.cached_free)} of them cached)" if n.cached_free else ""
    between = f" {format_count(n.between)} in no table," if n.between else ""
    said = (
        f"{counted(n.blocks, 'block')} of {counted(block_size, 'slot')}: "
        f"{format_count(n.held)} held{shared},{between} {format_count(n.free)} free{cached}."
    )
    if n.held:
        said += f" Those held have {counted(n.tokens, 'slot')} written, "
        said += f"{format_count(n.unused_slots)} unused."
    if n.shared:
        said += f" Without sharing, {format_count(n.table_tokens)} would be written."
    return said


@dataclass(frozen=True)
class Pointing:
    """What a picture of blocks points at, for a page that can be asked about a block.

    Parameters: ``chosen`` block, with a second outline; ``touched`` blocks, with a dot before their
    number (what has just changed); ``asks`` whether a click on a block is an action, named "block:"
    and its number.
    """

    chosen: int | None = None
    touched: frozenset[int] = frozenset()
    asks: bool = False

    def action(self, block: int) -> str | None:
        """Return the name of a click on a block; None: it does nothing."""
        return f"block:{block}" if self.asks and block != NULL_BLOCK else None

    def mark(self, view: BlockView) -> str:
        """Return the number of a block with its marks."""
        return ("•" if view.block in self.touched else "") + (
            f"{view.block}#" if view.cached else str(view.block)
        )


NOTHING = Pointing()


def grid(
    state: PoolState,
    block_size: int,
    names: Mapping[int, str] = NO_NAMES,
    pointing: Pointing = NOTHING,
) -> Drawing:
    """Return the blocks of a pool as a grid of cells, the null block first."""
    views = blocks_of(state, block_size)
    layout = _Layout.of(len(views))
    cells = []
    for view in views:
        row, column = divmod(view.block, layout.columns)
        x, y = layout.left + column * layout.width, row * layout.height
        body = hover(view.words(block_size, names))
        body += _cell(view, block_size, names, layout, pointing)
        cells.append(
            element(
                "g",
                body,
                class_="block",
                data_block=str(view.block),
                data_action=pointing.action(view.block),
                transform=f"translate({number(x)} {number(y)})",
            )
        )
        if not layout.numbers and column == 0:  # each row says where it begins
            cells.append(text(x - 4, y + 8, str(view.block), 9, anchor="end"))
    rows = -(-len(views) // layout.columns)
    shared = [v.words(block_size, names) for v in views if len(v.owners) > 1]
    words = summary(state, block_size)
    if shared:
        more = len(shared) - MOST_SAID
        words += (
            " " + "; ".join(shared[:MOST_SAID]) + (f"; and {more:,} more." if more > 0 else ".")
        )
    # An outline alone has no inside for a pointer to meet, unless it is told so.
    return Drawing(element("g", "".join(cells), pointer_events="all"), rows * layout.height, words)


@dataclass(frozen=True)
class _Layout:
    """Cells of one size: ``width`` and ``height`` from cell to cell, ``columns``, ``left`` margin;
    whether there is room for ``numbers``, for ``names`` too."""

    width: float
    height: float
    columns: int
    left: float
    numbers: bool
    names: bool

    @classmethod
    def of(cls, num_blocks: int) -> _Layout:
        if num_blocks <= 64:
            return cls((WIDTH - 6) / 8, 41, 8, 3, numbers=True, names=True)
        if num_blocks <= 256:
            return cls((WIDTH - 6) / 16, 24, 16, 3, numbers=True, names=False)
        return cls((WIDTH - 35) / 40, 10, 40, 32, numbers=False, names=False)


def _cell(
    view: BlockView, block_size: int, names: Mapping[int, str], layout: _Layout, pointing: Pointing
) -> str:
    colours = [colour_of(table) for table in view.owners[:3]] or [NEUTRAL]
    full, shared = view.tokens / block_size, len(view.owners) > 1
    if not layout.numbers:  # the cell itself is the bar
        width, height = layout.width - 1.5, layout.height - 1.5
        body = fill(0, 0, width * full, height, colours) if full else ""
        return body + (box(0, 0, width, height, heavy=shared) if shared or full < 1 else "")
    width, height = layout.width - 3, layout.height - 3
    body = box(0, 0, width, height, dashed=view.is_free and not full, heavy=shared)
    if view.block == pointing.chosen:
        body += box(-1.5, -1.5, width + 3, height + 3, heavy=True)
    if full:
        inner, bar = width - 6, 7.0 if layout.names else 5.0
        body += fill(3, height - bar - 2, inner * full, bar, colours)
        body += box(3, height - bar - 2, inner, bar)
    mark = pointing.mark(view)
    if not layout.names:
        return body + text(3, 10, mark, 9, weight="bold")
    body += text(3, 11, mark, 10.5, weight="bold")
    if view.refs > 1:
        body += text(width - 2.5, 11, f"×{view.refs}", 10.5, anchor="end", weight="bold")
    return body + text(3, 23, _label(view, names, width - 6), 9)


def _label(view: BlockView, names: Mapping[int, str], width: float) -> str:
    if view.block == NULL_BLOCK:
        return "null"
    if not view.owners:
        return "cached" if view.cached else "free" if view.is_free else "no table"
    owners = [name_of(table, names) for table in view.owners]
    together = "+".join(owners)
    if len(owners) > 1 and text_width(together, 9) > width:
        together = f"{len(owners)} share"
    return clip(together, width, 9)


def key(state: PoolState, block_size: int, pointing: Pointing = NOTHING) -> Drawing:
    """Return what the marks of a grid mean, those that it has."""
    views = blocks_of(state, block_size)
    parts = [f"Bar: slots written, of {block_size}."]
    if any(len(view.owners) > 1 for view in views):
        by = " (×2: by two tables)" if _Layout.of(len(views)).names else ""
        parts.append(f"Striped, heavy outline: shared{by}.")
    if any(view.cached for view in views):
        parts.append("#: found by the prefix cache (grey bar: held by nobody).")
    parts.append("Dashed: free." if _Layout.of(len(views)).numbers else "Empty: free.")
    if pointing.touched:
        parts.append("•: just changed.")
    return paragraph(" ".join(parts))


def draw_pool(
    state: PoolState,
    block_size: int,
    names: Mapping[int, str] = NO_NAMES,
    title: str = "Block pool",
    pointing: Pointing = NOTHING,
) -> Svg:
    """Return a picture of all blocks of a pool.

    Parameters: ``state`` of the pool; ``block_size`` slots per block; ``names`` of tables, by id;
    what it is ``pointing`` at.
    Returns: the picture; its description has the numbers, and each shared block with its holders.
    Raises: ``TypeError``, ``ValueError`` for a block size below 1.

    >>> draw_pool(PoolState.empty(num_blocks=4), block_size=16)
    Block pool. 3 blocks of 16 slots: 0 held, 3 free.
    """
    numbers = paragraph(summary(state, block_size))
    blocks = grid(state, block_size, names, pointing)
    return picture(title, [numbers, blocks, key(state, block_size, pointing)])
