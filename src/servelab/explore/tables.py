"""Tables, free order and prefixes of a pool: the rows beside its grid.

Models: a table as the blocks behind its entries, in order; the free blocks in the order of their
next use; the prefix cache as a tree, one row for each stretch without a branch.

Assumes: as ``servelab.explore.pool``.

Ignores: the middle of a long row. It is left out, and the number of blocks left out is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from servelab.explore.pool import (
    MOST_SAID,
    NO_NAMES,
    NOTHING,
    BlockView,
    Pointing,
    blocks_of,
    colour_of,
    counted,
    grid,
    key,
    name_of,
    summary,
)
from servelab.explore.svg import (
    NEUTRAL,
    WIDTH,
    Drawing,
    Svg,
    box,
    clip,
    fill,
    hover,
    paragraph,
    picture,
    rule,
    text,
)
from servelab.markup import element, number
from servelab.paging import BlockPool, PoolState

# What a prefix key stands for: the key of the prefix before it, and the tokens of its block, as
# numbers or in any other form that can be printed.
Prefixes = Mapping[str, tuple[str, tuple[object, ...]]]

_PITCH, _ROW = 28.0, 22.0  # of the chips that stand for blocks
_MOST_TABLES = 40  # drawn


def prefixes_of(pool: BlockPool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what the prefix cache of a live pool holds, by key (hexadecimal)."""
    found = {}
    for block in pool.index:
        prefix = pool.index.get(block)
        if prefix is not None:
            found[prefix.key.hex()] = (prefix.parent.key.hex(), prefix.tokens)
    return found


def _chip(
    view: BlockView,
    block_size: int,
    names: Mapping[int, str],
    tokens: int,
    pointing: Pointing,
    mark: str | None = None,
) -> str:
    """Return one block of a row; its bar shows ``tokens`` of it."""
    mark = pointing.mark(view) if mark is None else mark
    dashed, shared = view.is_free and not view.cached, len(view.owners) > 1
    body = hover(view.words(block_size, names))
    body += box(0.5, 0.5, _PITCH - 3, _ROW - 4, dashed, shared)
    if view.block == pointing.chosen:
        body += box(-0.8, -0.8, _PITCH - 0.4, _ROW - 1.4, heavy=True)
    if tokens:
        colours = [colour_of(table) for table in view.owners[:3]] or [NEUTRAL]
        body += fill(2, 13.5, (_PITCH - 6) * tokens / block_size, 3.5, colours)
    return body + text((_PITCH - 3) / 2, 10.5, mark, 9, anchor="middle")


def _chips(
    chips: Sequence[tuple[int, str]], left: float, rows: int, words: str, pointing: Pointing
) -> tuple[str, float]:
    """Return chips (block, body) in at most ``rows`` rows, and their height."""
    per_row = int((WIDTH - left) // _PITCH)
    most = per_row * rows
    body, shown = [], list(chips)
    if len(chips) > most:  # room for the note, three chips wide
        ahead = most - 3 - per_row // 3
        left_out = len(chips) - ahead - per_row // 3
        note = element("g", text(1, 11, f"… {left_out:,} more …", 9) + hover(words))
        shown = [*chips[:ahead], (-1, note), (-1, ""), (-1, ""), *chips[-(per_row // 3) :]]
    for place, (block, chip) in enumerate(shown):
        row, column = divmod(place, per_row)
        at = f"translate({number(left + column * _PITCH)} {number(row * _ROW)})"
        data = {"data_block": str(block), "data_action": pointing.action(block)}
        if chip:
            body.append(element("g", chip, transform=at, **(data if block >= 0 else {})))
    return "".join(body), _ROW * max(1, -(-len(shown) // per_row))


def rows_of_tables(
    state: PoolState,
    block_size: int,
    names: Mapping[int, str] = NO_NAMES,
    pointing: Pointing = NOTHING,
) -> Drawing:
    """Return one row per table: its name, its tokens, and its blocks in order."""
    views = blocks_of(state, block_size)
    body = [text(4, 11, "Tables: the blocks of each sequence, in order", 10, weight="bold")]
    y, said = 18.0, []
    for table, blocks in sorted(state.tables.items())[:_MOST_TABLES]:
        name, length = name_of(table, names), state.lengths.get(table, 0)
        # A table that is being filled has its blocks before its length.
        written = [max(0, min(block_size, length - i * block_size)) for i in range(len(blocks))]
        chips = [
            (block, _chip(views[block], block_size, names, tokens, pointing))
            for block, tokens in zip(blocks, written, strict=True)
        ]
        words = f"{name}: {counted(length, 'token')} in {_blocks(blocks)}"
        chip_body, height = _chips(chips, 88, 3, words, pointing)
        label = hover(words) + fill(4, 2, 4, 15, [colour_of(table)])
        label += text(12, 9, clip(name, 74, 9), 9) + text(12, 18, counted(length, "token"), 9)
        row = label + chip_body
        body.append(
            element(
                "g",
                row,
                class_="table",
                data_table=str(table),
                transform=f"translate(0 {number(y)})",
            )
        )
        y += height + 2
        said.append(words)
    if len(state.tables) > _MOST_TABLES:
        body.append(text(4, y + 9, f"and {len(state.tables) - _MOST_TABLES:,} tables more", 9))
        y += 14
        said.append(f"and {len(state.tables) - _MOST_TABLES:,} tables more")
    if not state.tables:
        body.append(text(4, y + 9, "no sequence holds a block", 9))
        y, said = y + 14, ["no sequence holds a block"]
    return Drawing("".join(body), y, "Tables: " + "; ".join(said) + ".")


def row_of_free(
    state: PoolState,
    block_size: int,
    names: Mapping[int, str] = NO_NAMES,
    pointing: Pointing = NOTHING,
) -> Drawing:
    """Return the free blocks in the order of their next use; # marks those still cached."""
    views = blocks_of(state, block_size)
    heading = text(4, 11, "Free blocks, the next to be used first", 10, weight="bold")
    if not state.free:
        return Drawing(heading + text(4, 27, "none", 9), 32, "No block is free.")
    cached = [block for block in state.free if views[block].cached]
    words = f"Free, in order of next use: {_numbers(state.free)}"
    words += f"; cached of these: {_numbers(cached)}." if cached else "."
    chips = [
        (b, _chip(views[b], block_size, names, block_size if views[b].cached else 0, pointing))
        for b in state.free
    ]
    body, height = _chips(chips, 4, 3, words, pointing)
    return Drawing(
        heading + element("g", body, transform="translate(0 17)", class_="free"), 17 + height, words
    )


def tree_of_prefixes(
    state: PoolState,
    block_size: int,
    prefixes: Prefixes,
    names: Mapping[int, str] = NO_NAMES,
    pointing: Pointing = NOTHING,
) -> Drawing:
    """Return the cached prefixes as a tree: a row for each stretch without a branch.

    Blocks that hold the same prefix stand side by side, the later ones behind an equals sign.
    """
    views = blocks_of(state, block_size)
    body = [text(4, 11, "Prefix cache: a row continues the one it hangs on", 10, weight="bold")]
    y, said = 17.0, []
    ends: list[float] = []  # of the row last drawn at each depth, where its children hang
    for depth, run in _runs(state, prefixes):
        left = 4 + 14.0 * min(depth, 12)
        if depth:
            top = ends[depth - 1]
            body.append(rule(left - 7, top, left - 7, y + 9) + rule(left - 7, y + 9, left, y + 9))
        chips = [
            (
                b,
                _chip(
                    views[b],
                    block_size,
                    names,
                    block_size,
                    pointing,
                    ("=" if place else "") + str(b),
                ),
            )
            for found in run
            for place, b in enumerate(state.cached[found])
        ]
        tokens = " ".join(str(token) for found in run[:8] for token in prefixes[found][1])
        tokens += " …" if len(run) > 8 else ""
        words = f"{_blocks([b for b, _ in chips])} with tokens {tokens}"
        drawn, height = _chips(chips, left, 2, words, pointing)
        room = WIDTH - left - len(chips) * _PITCH - 8
        if room > 40:
            drawn += text(WIDTH - room - 4, 11.5, clip(tokens, room, 9), 9)
        body.append(element("g", drawn, transform=f"translate(0 {number(y)})"))
        parent = state.cached.get(prefixes[run[0]][0])
        said.append((f"behind block {parent[0]}, " if parent else "") + words)
        ends[depth:] = [y + height - 4]
        y += height
    if not said:
        body.append(text(4, y + 9, "nothing is cached", 9))
        y, said = y + 14, ["nothing is cached"]
    more = [f"and {len(said) - MOST_SAID:,} rows more"] if len(said) > MOST_SAID else []
    return Drawing("".join(body), y, "Prefix cache: " + "; ".join(said[:MOST_SAID] + more) + ".")


def _runs(state: PoolState, prefixes: Prefixes) -> Iterator[tuple[int, list[str]]]:
    """Yield each unbranched stretch of keys, depth first, with the branches above it."""
    children: dict[str, list[str]] = {}
    # In order of their blocks: going back may have changed the order of the keys.
    for found in sorted(state.cached, key=lambda key: state.cached[key][0]):
        children.setdefault(prefixes[found][0], []).append(found)
    first = [
        found for parent in children if parent not in state.cached for found in children[parent]
    ]
    # A stack of our own: chains can be longer than Python's recursion is deep.
    todo = [(0, found) for found in reversed(first)]
    while todo:
        depth, found = todo.pop()
        run = [found]
        while len(children.get(run[-1], ())) == 1:
            run += children[run[-1]]
        yield depth, run
        todo += [(depth + 1, child) for child in reversed(children.get(run[-1], []))]


def _blocks(blocks: Sequence[int]) -> str:
    """Return "block" or "blocks" and their numbers."""
    return f"block{'' if len(blocks) == 1 else 's'} {_numbers(blocks)}"


def _numbers(blocks: Sequence[int]) -> str:
    """Return the numbers of blocks, the middle of a long list left out."""
    shown = [str(block) for block in blocks]
    if len(shown) > MOST_SAID:
        left_out = len(shown) - MOST_SAID + 4
        shown = [*shown[: MOST_SAID - 8], f"({left_out:,} more)", *shown[-4:]]
    return ", ".join(shown)


def draw_cache(
    state: PoolState,
    block_size: int,
    names: Mapping[int, str] = NO_NAMES,
    prefixes: Prefixes | None = None,
    title: str = "Paged cache",
    pointing: Pointing = NOTHING,
    free_order: bool = True,
) -> Svg:
    """Return a picture of a pool, its tables, its free order and, if given, its prefixes.

    Parameters: ``state`` of the pool; ``block_size`` slots per block; ``names`` of tables, by id;
    ``prefixes`` behind the cached keys (``prefixes_of`` a pool, or ``Trace.prefixes``); what it is
    ``pointing`` at; ``free_order``: whether it is shown.
    Returns: the picture; its description says all of it in words.
    Raises: ``TypeError``, ``ValueError`` for a block size below 1; ``KeyError`` for a cached key
    that ``prefixes`` lacks.

    >>> draw_cache(PoolState.empty(num_blocks=3), block_size=16)
    Paged cache. 2 blocks of 16 slots: 0 held, 2 free. Tables: no sequence holds a block.
    Free, in order of next use: 1, 2.
    """
    drawings = [
        paragraph(summary(state, block_size)),
        grid(state, block_size, names, pointing),
        key(state, block_size, pointing),
        rows_of_tables(state, block_size, names, pointing),
    ]
    if free_order:
        drawings.append(row_of_free(state, block_size, names, pointing))
    if prefixes is not None:
        drawings.append(tree_of_prefixes(state, block_size, prefixes, names, pointing))
    return picture(title, drawings)
